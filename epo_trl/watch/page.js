"use strict";
// The output of a run is untrusted: it reaches the page only as text nodes and fixed attributes, never as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const LEVELS = 8;
const KINDS = ["won", "failed", "cut off", "aborted"];
const at = (id) => document.getElementById(id);

function make(tag, className, text, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  element.append(...children);
  return element;
}

function drawn(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(2);
const nats = (value) => `${value.toFixed(2)} nats`;
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const kind = (episode) => KINDS.find((name) => episode.outcome.startsWith(name));
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const errors = (episode) => episode.turns.filter((turn) => turn.error);

// ------------------------------------------------------------------------------------------------------- one episode

function tokenSpans(turn) {
  const text = make("p", "text mono");
  if (!turn.tokens.length) text.textContent = turn.response;
  turn.tokens.forEach((token, i) => {
    const value = turn.entropy[i];
    const level = value === undefined ? "" : ` h${Math.min(LEVELS - 1, Math.floor((LEVELS * value) / DATA.top))}`;
    const span = make("span", `tok${level}`, token.replaceAll("\n", "↵\n"));
    span.title = value === undefined ? "entropy unknown" : nats(value);
    span.addEventListener("click", () => {
      document.querySelectorAll(".picked").forEach((other) => other.classList.remove("picked"));
      span.classList.add("picked");
      at("token").textContent = `token ${i + 1} of ${turn.tokens.length}: ${JSON.stringify(token)}, ${span.title}`;
    });
    text.append(span);
  });
  return text;
}

function legend() {
  const boxes = make("span", "boxes");
  for (let level = 0; level < LEVELS; level++) boxes.append(make("span", `box h${level}`));
  return make("div", "legend dim", null, "0", boxes, `${DATA.top.toFixed(1)} nats or more`);
}

function curve(turns) {
  const points = turns.map((turn, i) => [i, mean(turn.entropy), turn.error]).filter((point) => point[1] !== null);
  if (points.length < 2) return [];
  const top = Math.max(...points.map((point) => point[1])) * 1.08 || 1;
  const width = Math.max(240, Math.min(640, at("episode").clientWidth - 30)); // a hidden pane has no width
  const x = (i) => 40 + ((width - 50) * i) / (turns.length - 1);
  const y = (value) => 100 - (88 * value) / top;
  const svg = drawn("svg", { viewBox: `0 0 ${width} 122`, role: "img", "aria-label": "Mean entropy of each turn" });
  svg.append(drawn("path", { class: "axis", d: `M40 8V100H${width - 8}` }));
  for (const value of [0, top / 2, top]) {
    svg.append(drawn("text", { x: 34, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(2)));
  }
  for (const i of new Set([0, Math.floor((turns.length - 1) / 2), turns.length - 1])) {
    svg.append(drawn("text", { x: x(i), y: 115, "text-anchor": "middle" }, i ? `${i + 1}` : "turn 1"));
  }
  svg.append(drawn("path", { class: "curve", d: points.map(([i, v], n) => `${n ? "L" : "M"}${x(i)} ${y(v)}`).join("") }));
  for (const [i, value, error] of points) {
    const dot = drawn("circle", { cx: x(i), cy: y(value), r: error ? 4 : 3, class: error ? "bad" : "" });
    dot.append(drawn("title", {}, `turn ${i + 1}: ${nats(value)}${error ? `, invalid: ${error}` : ""}`));
    svg.append(dot);
  }
  return [make("div", "dim", "Mean over the tokens of each turn, in nats; a ring is an invalid turn:"), svg];
}

function turnCard(turn, number) {
  const entropy = mean(turn.entropy);
  const head = make("h3", "", null, make("span", "", `Turn ${number}`), make("span", "dim", `reward ${signed(turn.reward)}`));
  if (entropy !== null) head.append(make("span", "dim", `mean entropy ${nats(entropy)}`));
  if (turn.error) head.append(make("span", "bad", `invalid: ${turn.error}`));
  const prompt = turn.prompt
    ? make("details", "", null, make("summary", "", "prompt"), make("p", "text mono", turn.prompt))
    : make("p", "dim", "The prompt is not on this page.");
  return make(
    "article", "turn", null, head,
    make("div", "label", "observation"), make("p", "text", turn.observation), prompt,
    make("div", "label", "response"), tokenSpans(turn),
    make("div", "label", "action"), make("p", `text action${turn.error ? " bad" : ""}`, turn.action),
  );
}

const asked = () => Number((location.hash.match(/^#episode-(\d+)$/) || [])[1]);

function mark() {
  document.querySelectorAll("#list button").forEach((button) => {
    const shown = Number(button.dataset.number) === asked();
    button.setAttribute("aria-current", String(shown));
    if (shown) button.scrollIntoView({ block: "nearest" });
  });
  document.querySelectorAll(".step").forEach((button) => { button.disabled = !neighbour(Number(button.dataset.by)); });
}

// The episode before or after the open one in the filtered, sorted list; the first if the open one is not in the list.
function neighbour(by) {
  const place = found.findIndex((episode) => episode.number === asked());
  return place < 0 ? found[0] : found[place + by];
}

function go(by) {
  const to = neighbour(by);
  if (to) location.hash = `episode-${to.number}`;
}

function step(by, text) {
  const button = make("button", "step", text);
  button.dataset.by = by;
  button.addEventListener("click", () => go(by));
  return button;
}

const KEYS = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 };

function pressed(event) {
  const typing = event.target instanceof Element && event.target.closest("input, select");
  if (typing || event.altKey || event.ctrlKey || event.metaKey || !(event.key in KEYS)) return;
  event.preventDefault();
  go(KEYS[event.key]);
}

function show(episode) {
  const side = at("episode");
  side.replaceChildren();
  at("token").textContent = "";
  document.body.classList.toggle("open", Boolean(episode));
  if (!episode) {
    side.append(make("p", "dim", "Select an episode from the list."));
    mark();
    return;
  }
  const back = make("button", "back", "← all episodes");
  back.addEventListener("click", () => { location.hash = ""; });
  const keys = make("p", "keys dim", null, step(-1, "← previous"), step(1, "next →"));
  keys.append(make("span", "hint", "keys ← → or k j"));
  const facts = make("p", "facts dim", null, make("span", `outcome ${kind(episode)}`, episode.outcome));
  const told = [`reward ${signed(episode.reward)}`, count(episode.turns.length, "turn"), where(episode), episode.task_id];
  if (episode.score !== null) told.push(`score ${episode.score}`);
  if (episode.task_type) told.push(episode.task_type);
  if (episode.split === "train") told.push(`group ${episode.group + 1}`);
  if (episode.why) told.push(`kept as: ${episode.why}`);
  facts.append(...told.map((text) => make("span", "", text)));
  side.append(back, keys, make("h2", "", `Episode ${episode.number}`), make("p", "text task", episode.task), facts);
  const known = episode.turns.some((turn) => turn.entropy.length);
  if (known) {
    const note = "Token colour: entropy of the distribution it was sampled from, at the sampling temperature, as computed by the update.";
    const card = make("div", "card", null, make("div", "dim", note), legend(), ...curve(episode.turns));
    side.append(card);
  } else {
    side.append(make("p", "dim", "Token entropies are unknown."));
  }
  side.append(...episode.turns.map((turn, i) => turnCard(turn, i + 1)));
  if (episode.final_observation) {
    const end = make("div", "card", null, make("div", "label", "last observation"));
    end.append(make("p", "text", episode.final_observation));
    side.append(end);
  }
  if (episode.error) side.append(make("p", "card text bad", episode.error));
  mark();
}

// -------------------------------------------------------------------------------------------------- list and filters

const where = (episode) => (episode.rl_step ? `RL step ${episode.rl_step}` : episode.split);
const ORDERS = {
  "worst first": (a, b) => a.number - b.number,
  "best first": (a, b) => b.number - a.number,
  "latest first": (a, b) => b.rl_step - a.rl_step || a.number - b.number,
  "earliest first": (a, b) => a.rl_step - b.rl_step || a.number - b.number,
  "most invalid turns first": (a, b) => errors(b).length - errors(a).length || a.number - b.number,
};

function choices(select, all, options) {
  select.append(new Option(all, ""), ...options.map(([value, text]) => new Option(text, value)));
  select.hidden = options.length < 2;
}

function tally(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function words(episode) {
  const turns = episode.turns.flatMap((turn) => [
    turn.observation, turn.response || turn.tokens.join(""), turn.action, turn.error,
  ]);
  const all = [episode.task, episode.task_id, episode.error, episode.final_observation, ...turns];
  return all.join("\n").toLowerCase();
}

function wanted(episode) {
  const [search, error] = [at("search").value.toLowerCase(), at("error").value];
  return (
    (!at("outcome").value || kind(episode) === at("outcome").value) &&
    (!at("type").value || episode.task_type === at("type").value.slice(1)) &&
    (!at("split").value || episode.split === at("split").value) &&
    (!error || errors(episode).some((turn) => error === "any" || turn.error === error.slice(1))) &&
    (!episode.rl_step || !at("from").value || episode.rl_step >= Number(at("from").value)) &&
    (!episode.rl_step || !at("to").value || episode.rl_step <= Number(at("to").value)) &&
    (!search || words(episode).includes(search))
  );
}

function entry(episode) {
  const invalid = errors(episode).length;
  const told = [`reward ${signed(episode.reward)}`, count(episode.turns.length, "turn"), where(episode)];
  if (invalid) told.push(`${invalid} invalid`);
  const button = make(
    "button", "", null, make("span", `outcome ${kind(episode)}`, episode.outcome),
    ...told.flatMap((text) => [" ", make("span", "dim piece", text)]), " ", make("span", "task", `${episode.number}. ${episode.task || episode.task_id}`),
  );
  button.type = "button";
  button.dataset.number = episode.number;
  button.addEventListener("click", () => { location.hash = `episode-${episode.number}`; });
  return make("li", "", null, button);
}

let found = []; // in the order of the list

function list() {
  found = DATA.episodes.filter(wanted).sort(ORDERS[at("order").value]);
  const [turns, invalid] = [found.flatMap((episode) => episode.turns), found.flatMap(errors)];
  const reasons = tally(invalid.map((turn) => turn.error)).map(([reason, number]) => `${number} ${reason}`);
  at("count").textContent =
    `${count(found.length, "episode")}, ${invalid.length} of ${count(turns.length, "turn")} invalid` +
    (reasons.length ? `: ${reasons.slice(0, 4).join(", ")}${reasons.length > 4 ? ", ..." : ""}` : "");
  at("list").replaceChildren(...found.map(entry));
  mark();
}

function open() {
  show(DATA.episodes.find((episode) => episode.number === asked()));
  window.scrollTo(0, 0);
}

at("about").textContent = DATA.about;
choices(at("outcome"), "all outcomes", tally(DATA.episodes.map(kind)).map(([value]) => [value, value]));
choices(at("type"), "all task types", tally(DATA.episodes.map((e) => e.task_type)).map(([v]) => [`=${v}`, v || "(none)"]));
choices(at("split"), "all lists", tally(DATA.episodes.map((e) => e.split)).map(([value]) => [value, value]));
const reasons = tally(DATA.episodes.flatMap(errors).map((turn) => turn.error));
choices(at("error"), "any turns", [["any", "with an invalid turn"], ...reasons.map(([r, n]) => [`=${r}`, `${r} (${n})`])]);
at("error").hidden = !reasons.length;
at("order").append(...Object.keys(ORDERS).map((name) => new Option(name)));
const steps = DATA.episodes.map((episode) => episode.rl_step).filter(Boolean);
at("steps").hidden = new Set(steps).size < 2;
if (steps.length) [at("from").placeholder, at("to").placeholder] = [Math.min(...steps), Math.max(...steps)];
at("filters").addEventListener("input", list);
at("filters").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", open);
addEventListener("keydown", pressed);
list();
if (!location.hash && matchMedia("(min-width: 761px)").matches && found.length) {
  history.replaceState(null, "", `#episode-${found[0].number}`);
}
open();
