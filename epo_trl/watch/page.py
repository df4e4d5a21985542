"""Writes episodes as one self-contained HTML page that needs no network and no server.

The output of a run is untrusted. The page holds it as JSON without any `<`, the script inserts it as text nodes only,
and a content security policy blocks all other scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from epo_trl.errors import spelled
from epo_trl.types import Episode, StopReason
from epo_trl.watch.sample import Sample

Entry = dict[str, Any]

TURN_FIELDS = ("observation", "response", "action", "error", "reward", "prompt", "tokens", "entropy")
PICKED_NOTE = (
    "These episodes were selected (the worst, the best, an aborted one, random ones), so shares among them do not "
    "describe the run."
)


def render_page(samples: Sequence[Sample], name: str, max_bytes: int) -> tuple[str, str]:
    """Renders the page; returns it with a note about omitted content.

    Args:
        samples: At least one sample, sorted from worst to best.
        name: Name of the run.
        max_bytes: Maximum size of the episode data. The page omits the rest: first the prompts after the first turn,
            then the last episodes.
    """
    entries, left_out = fitting({n: _shown(sample, n) for n, sample in enumerate(samples, start=1)}, max_bytes)
    shown = [samples[number - 1] for number in entries]
    told = [_summary(shown), PICKED_NOTE if any(sample.why for sample in shown) else "", left_out]
    data = {"about": " ".join(filter(None, told)), "top": colour_limit(shown), "episodes": list(entries.values())}
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "@TITLE@": html.escape(name), "@SCRIPT_HASH@": f"sha256-{digest}", "@STYLE@": _part("page.css"),
        "@SCRIPT@": script, "@DATA@": embedded(data),
    }  # fmt: skip
    # A single pass, so that inserted text is not substituted again.
    return re.sub("@[A-Z_]+@", lambda mark: parts[mark[0]], _part("page.html")), left_out


def embedded(data: Any) -> str:
    """Returns JSON that can neither close its script element nor open a comment in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def fitting(entries: Mapping[int, Entry], max_bytes: int) -> tuple[dict[int, Entry], str]:
    """Reduces the entries, by number, to `max_bytes` of JSON; returns them with a note about omitted content."""
    if sum(len(embedded(entry)) for entry in entries.values()) <= max_bytes:
        return dict(entries), ""
    shortened = {
        number: entry | {"turns": [turn | {"prompt": ""} if i else turn for i, turn in enumerate(entry["turns"])]}
        for number, entry in entries.items()
    }
    totals = itertools.accumulate(len(embedded(entry)) for entry in shortened.values())
    fit = {number: shortened[number] for number, total in zip(shortened, totals, strict=True) if total <= max_bytes}
    fit = fit or dict(list(shortened.items())[:1])
    return fit, (
        "Omitted to limit the page size: prompts after each first turn; the page holds the worst "
        f"{len(fit)} of {len(entries)} episodes."
    )


def outcome_label(episode: Episode) -> str:
    """Returns a label for the outcome of an episode."""
    words = {StopReason.WON: "won", StopReason.LOST: "failed", StopReason.ABORTED: "aborted"}
    return words.get(episode.stop, f"cut off ({episode.stop.value.replace('_', ' ')})")


def colour_limit(samples: Sequence[Sample]) -> float:
    """Returns the upper end of the colour scale in nats: the 99th percentile, rounded up to 0.1, at least 0.5."""
    values = sorted(value for sample in samples for text in sample.texts for value in text.entropy)
    high = values[math.ceil(0.99 * len(values)) - 1] if values else 0.0
    return max(0.5, math.ceil(10 * high) / 10)


def _shown(sample: Sample, number: int) -> Entry:
    """Returns the sample in the format of the script."""
    content = sample.to_dict()
    turns = [{name: turn[name] for name in TURN_FIELDS} for turn in content["turns"]]
    for turn in turns:
        if turn["tokens"]:
            turn["response"] = ""  # the tokens contain it, with control tokens
    names = ("split", "rl_step", "why", "group", "task_id", "task", "task_type", "error", "score",
             "final_observation")  # fmt: skip
    found = {
        "number": number, "outcome": outcome_label(sample.episode), "reward": sample.episode.total_reward,
        "turns": turns,
        **{name: content[name] for name in names},
    }  # fmt: skip
    return _spelled(found)


def _spelled(value: Any) -> Any:
    """Escapes each text in a JSON value."""
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, dict):
        return {name: _spelled(inner) for name, inner in value.items()}
    return [_spelled(inner) for inner in value] if isinstance(value, list) else value


def _summary(samples: Sequence[Sample]) -> str:
    steps = sorted({sample.rl_step for sample in samples if sample.rl_step})
    parts = [f"RL steps {steps[0]} to {steps[-1]}"] if steps else []
    if splits := sorted({sample.split for sample in samples if not sample.rl_step}):
        parts.append(f"evaluation of {', '.join(splits)}")
    return f"{len(samples)} episodes: {'; '.join(parts)}."


def _part(name: str) -> str:
    return files("epo_trl.watch").joinpath(name).read_text(encoding="utf-8")
