"""`epo-trl watch`: what a run says is shown and never obeyed by the browser; the page has its size."""

import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from epo_trl.types import Episode, StopReason, Turn
from epo_trl.watch.page import colour_limit, embedded, fitting, render_page
from epo_trl.watch.sample import TurnTexts, sample_of, write_samples
from epo_trl.watch.source import evaluation_file, find_samples, sample_file

EVIL = (
    "</script><img src=x onerror=alert(1)> <!-- <script> ${alert(1)} `x` {{7*7}} **bold** [a](javascript:alert(1)) "
    "@DATA@ @SCRIPT@ &lt;b&gt; \u2028 \u202e gnp.exe \x1b[31m\x1b]0;title\x07 \r \ud800 \x9b31m"
)


def sample(
    *, rewards=(0.0,), stop=StopReason.LOST, rl_step=1, prompt="the prompt", said="<think> hm </think>", **about
):
    turns = [Turn((1,), (2,), said, f"{said} seen", f"{said} done", True, reward) for reward in rewards]
    episode = Episode("train/0", f"{said} task", said, tuple(turns), stop, stop is StopReason.WON, said, "", 0, 0.5)
    texts = [TurnTexts(f"{prompt} {i}", ("a", said), (0.0, 1.5)) for i, _ in enumerate(rewards)]
    return sample_of(episode, texts, rl_step=rl_step, **{"why": "random", **about})


class Page(HTMLParser):
    """What a browser makes of a page: the elements, their attributes, and what is in the scripts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.scripts, self.attributes, self.title = [], [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements[-1:] == ["script"]:
            self.scripts[-1] += data
        self.title += data if self.elements[-1:] == ["title"] else ""


def page(*samples, name="name"):
    return render_page(samples, name, 2**20)[0]


def data_of(page):
    return json.loads(Page(page).scripts[0])


# --------------------------------------------------------------------------------------------------------------- page


def test_what_a_run_says_adds_no_element_no_attribute_and_no_script():
    harmless, evil = Page(page(sample())), Page(page(sample(said=EVIL)))
    assert evil.elements == harmless.elements and evil.attributes == harmless.attributes
    assert len(evil.scripts) == 2 and evil.scripts[1] == harmless.scripts[1]
    assert "<" not in evil.scripts[0] and ">" not in evil.scripts[0] and evil.scripts[0].isascii()
    [episode] = json.loads(evil.scripts[0])["episodes"]
    shown = EVIL.replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\r", "\\r").replace("\x9b", "\\x9b")
    shown = shown.replace("\u202e", "\\u202e").replace("\ud800", "\\ud800")
    assert episode["turns"][0]["tokens"] == ["a", shown] and episode["turns"][0]["observation"] == f"{shown} seen"
    assert episode["task"] == f"{shown} task"


def test_the_page_asks_for_nothing_from_outside_and_its_policy_allows_only_its_own_script():
    found = Page(page(sample()))
    assert not {name for name, _ in found.attributes} & {"src", "href", "onclick", "onload", "onerror"}
    [policy] = [value for name, value in found.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy
    assert not any(word in found.scripts[1] for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("))


def test_json_that_stands_in_a_script_is_the_same_data():
    values = ["</script>", "<!--", "]]>", "&amp;", "\u2028", "é", {"a<b": [1, None, True, 0.5]}]
    assert json.loads(embedded(values)) == values and not set(embedded(values)) & set("<>&\u2028é")


def test_colours_end_where_one_token_of_a_hundred_is_above():
    def with_entropies(*values):
        return [replace(sample(), texts=(TurnTexts("", ("x",) * len(values), values),))]

    assert colour_limit(with_entropies(*[i / 100 for i in range(1, 201)])) == 2.0
    assert colour_limit(with_entropies(*[1.0] * 99, 50.0)) == 1.0
    assert colour_limit(with_entropies(0.01)) == colour_limit([sample_of(sample().episode)]) == 0.5


def test_what_does_not_fit_is_left_out_and_named():
    samples = [sample(rl_step=step, rewards=(0.0,) * 4, prompt=1000 * "p") for step in range(1, 9) for _ in range(2)]
    entries = {entry["number"]: entry for entry in data_of(page(*samples))["episodes"]}
    size = sum(len(embedded(entry)) for entry in entries.values())
    assert fitting(entries, size) == (entries, "") and list(entries) == [*range(1, 17)]

    shown, note = fitting(entries, size // 2)
    assert len(shown) == 16 and [bool(turn["prompt"]) for turn in shown[1]["turns"]] == [True, False, False, False]
    assert note.endswith("prompts after each first turn; the page holds the worst 16 of 16 episodes.")

    shown, note = fitting(entries, size // 8)
    assert list(shown) == [*range(1, len(shown) + 1)] and 1 < len(shown) < 16
    whole, told = render_page(samples, "name", 1)  # the page always holds one episode
    assert [entry["number"] for entry in data_of(whole)["episodes"]] == [1] and told in data_of(whole)["about"]


def test_a_page_says_that_its_episodes_were_picked():
    assert "2 episodes: RL steps 1 to 3. These episodes were selected" in page(sample(), sample(rl_step=3))
    played = sample(rl_step=0, split="iid", why="")
    assert data_of(page(played))["about"] == "1 episodes: evaluation of iid."


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="no browser")
def test_a_browser_shows_what_was_said_as_text(tmp_path):
    text = page(sample(said=EVIL, rewards=(1.0, -1.0)), name=EVIL[:60])
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = Page(dom)
    assert "img" not in found.elements and found.elements.count("script") == 2
    assert found.elements.count("article") == 2 and "circle" in found.elements
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom and "1 episode, 0 of 2 turns invalid" in dom


# ------------------------------------------------------------------------------------------------- files and command


def test_the_worst_come_first_and_of_equal_ones_the_latest(tmp_path):
    order = [
        sample(stop=StopReason.ABORTED, rewards=(5.0,)),
        sample(rewards=(-1.0,)),
        sample(stop=StopReason.TURN_LIMIT, rl_step=2),
        sample(),
        sample(stop=StopReason.WON, rewards=(-3.0,)),
    ]
    for step in (1, 2):
        kept = [s.to_dict() for s in reversed(order) if s.rl_step == step]
        write_samples(sample_file(tmp_path, step), kept)
    assert find_samples(tmp_path) == order


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "made with keep_episodes above 0, got"),
        ("missing", "missing, which has no episodes"),
        ("bad", "bad.episodes.jsonl, line 1, is not an episode"),
    ],
)
def test_a_run_without_episodes_or_with_damaged_ones_is_one_line(tmp_path, command, path, message):
    evaluation_file(tmp_path / "bad").write_text("[]\n")
    code, _, error = command("watch", tmp_path / path)
    assert code == 1 and message in error and error.count("\n") == 1


def test_the_command_writes_a_page(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "grpo-seed0"
    write_samples(sample_file(run, 1), [sample(said="mug").to_dict()])
    assert command("watch", "grpo-seed0")[:2] == (0, "wrote grpo-seed0/episodes.html (0.0 MB).\n")
    assert data_of((run / "episodes.html").read_text())["episodes"][0]["task"] == "mug task"
    assert Page((run / "episodes.html").read_text()).title.strip() == "Episodes of grpo-seed0"
    assert command("watch", "grpo-seed0", "--out", "other.html")[0] == 0 and (tmp_path / "other.html").is_file()
    monkeypatch.chdir(run)
    assert command("watch", ".")[1].startswith("wrote episodes.html")


def test_the_page_of_an_evaluation_has_the_name_of_its_output(tmp_path, command):
    for name in ("lr0.001", "lr0.003", "r.json", "r.jsonl"):
        (tmp_path / name).write_text("{}")  # the reports
        write_samples(evaluation_file(tmp_path / name), [sample(said=name).to_dict()])
        assert command("watch", tmp_path / name)[0] == 0
    assert {path.name for path in tmp_path.glob("*.html")} == {"lr0.001.html", "lr0.003.html", "r.html", "r.jsonl.html"}
