"""Episodes as one HTML page that needs nothing beside itself: no network, no server.

What a run has said is data. It stands in the page as JSON in which no `<` is left, the script puts it into text nodes
only, and a content security policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from epo_trl.evaluation.samples import spelled
from epo_trl.long_runs.state_file import write_whole
from epo_trl.types import Episode, StopReason
from epo_trl.watch.sample import Sample

ENTROPY_NOTE = (
    "Colour of a token: entropy of the distribution it was sampled from, at the sampling temperature, as the update "
    "has computed it."
)
TURN_FIELDS = ("observation", "response", "action", "error", "reward", "prompt", "tokens", "entropy")
PICKED_NOTE = (
    "These were picked (the worst, the best, an aborted one, random ones), so shares among them say nothing about the "
    "run."
)
NO_PROMPTS = "The prompt is not on this page."


def write_page(path: str | os.PathLike[str], samples: Sequence[Sample], name: str, max_bytes: int) -> str:
    """Writes the page, whole or not at all, and returns what it leaves out, in words.

    Args:
        path: The file.
        samples: The worst first; at least one.
        name: Of the run.
        max_bytes: Of the episodes' data. What does not fit is left out, and the page says what: first prompts after
            those of the first turn, then RL steps in between, then whatever comes last.
    """
    shown, left_out = fitting(samples, max_bytes)
    write_whole(path, page_of(shown, name, left_out))
    return left_out


def page_of(shown: Sequence[Sample], name: str, left_out: str = "") -> str:
    """Returns the page.

    Args:
        shown: The episodes, the worst first; at least one.
        name: Of the run.
        left_out: What is missing, in words.
    """
    about = " ".join([_summary(shown), PICKED_NOTE if any(sample.why for sample in shown) else "", left_out])
    data = {
        "about": " ".join(about.split()), "top": top_of(shown), "entropy_note": ENTROPY_NOTE, "no_prompts": NO_PROMPTS,
        "episodes": [_shown(sample, number) for number, sample in enumerate(shown, start=1)],
    }  # fmt: skip
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "@TITLE@": html.escape(name), "@SCRIPT_HASH@": f"sha256-{digest}", "@STYLE@": _part("page.css"),
        "@SCRIPT@": script, "@DATA@": embedded(data),
    }  # fmt: skip
    return re.sub("@[A-Z_]+@", lambda mark: parts[mark[0]], _part("page.html"))  # not looked through again


def embedded(data: Any) -> str:
    """Returns JSON that cannot end the script element it stands in, nor open a comment there."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def fitting(samples: Sequence[Sample], max_bytes: int) -> tuple[list[Sample], str]:
    """Returns what fits of the samples, and what was left out in words."""
    if _size(samples) <= max_bytes:
        return list(samples), ""
    short = [_without_prompts(sample) for sample in samples]
    note = "Left out for the size of the page: prompts after each first turn"
    steps = sorted({sample.rl_step for sample in samples})
    every, kept = 1, short
    while _size(kept) > max_bytes and every < len(steps):
        every *= 2
        some = set(steps[::-every])
        kept = [sample for sample in short if sample.rl_step in some]
    if every > 1:
        note += f", {len(steps) - len(steps[::-every])} of {len(steps)} RL steps"
    total = 0
    fit: list[Sample] = []
    for sample in kept:
        total += _size([sample])
        if total <= max_bytes or not fit:
            fit.append(sample)
    if len(fit) < len(kept):
        note += f", {len(kept) - len(fit)} other episodes"
    return fit, f"{note}; so {len(fit)} of {len(samples)} episodes are here."


def outcome_of(episode: Episode) -> str:
    """Returns how an episode ended, in words."""
    words = {StopReason.WON: "won", StopReason.LOST: "failed", StopReason.ABORTED: "aborted"}
    return words.get(episode.stop, f"cut off ({episode.stop.value.replace('_', ' ')})")


def top_of(samples: Sequence[Sample]) -> float:
    """Returns the upper end of the colours in nats: 1 % of the tokens are above it; at least 0.5, to one decimal."""
    values = sorted(value for sample in samples for text in sample.texts for value in text.entropy)
    high = values[math.ceil(0.99 * len(values)) - 1] if values else 0.0
    return max(0.5, math.ceil(10 * high) / 10)


def _size(samples: Sequence[Sample]) -> int:
    return sum(len(embedded(_shown(sample, 0))) for sample in samples)


def _without_prompts(sample: Sample) -> Sample:
    rest = (replace(text, prompt="") for text in sample.texts[1:])
    return replace(sample, texts=(*sample.texts[:1], *rest))


def _shown(sample: Sample, number: int) -> dict[str, Any]:
    """Returns the sample as the script wants it."""
    content = sample.to_dict()
    turns = [{name: turn[name] for name in TURN_FIELDS} for turn in content["turns"]]
    for turn in turns:
        if turn["tokens"]:
            turn["response"] = ""  # which they are, with its control tokens
    names = ("split", "rl_step", "why", "group", "task_id", "task", "task_type", "error", "score",
             "final_observation")  # fmt: skip
    found = {
        "number": number, "outcome": outcome_of(sample.episode), "reward": sample.episode.total_reward, "turns": turns,
        **{name: content[name] for name in names},
    }  # fmt: skip
    return _spelled(found)


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, dict):
        return {name: _spelled(inner) for name, inner in value.items()}
    return [_spelled(inner) for inner in value] if isinstance(value, list | tuple) else value


def _summary(samples: Sequence[Sample]) -> str:
    steps = sorted({sample.rl_step for sample in samples} - {0})
    splits = sorted({sample.split for sample in samples if not sample.rl_step})
    parts = []
    if steps:
        parts.append(
            f"RL step {steps[0]}" if len(steps) == 1 else f"{len(steps)} RL steps from {steps[0]} to {steps[-1]}"
        )
    if splits:
        parts.append(f"evaluation of {', '.join(splits)}")
    noun = "episode" if len(samples) == 1 else "episodes"
    return f"{len(samples)} {noun}: {'; '.join(parts)}."


def _part(name: str) -> str:
    return files("epo_trl.watch").joinpath(name).read_text(encoding="utf-8")
