"""RLVMR's credit (arXiv 2507.22844): a turn tags its kind of reasoning and is rewarded for carrying it out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epo_trl.bounds import NonNegative, Share
from epo_trl.errors import InputError
from epo_trl.methods.anchors import compare_by_key, sample_deviation
from epo_trl.methods.base import Batch, Credit, Need, StepSummary, Tally
from epo_trl.methods.grpo import GRPO
from epo_trl.methods.token_statistics import rows_on_tokens
from epo_trl.types import Episode

TAGS = ("planning", "explore", "reflection", "monitor")
_OPENING = re.compile(f"<({'|'.join(TAGS)})>")


@dataclass
class RLVMR(GRPO):
    """`A = alpha * A_traj + (1 - alpha) * A_tag`, equal for all tokens of a turn.

    `A_traj` is GRPO's advantage. `A_tag` is a turn's reward for its kind of reasoning (`tag_rewards`), minus the mean
    over all turns with the same tag, divided by their standard deviation, over the whole batch on all ranks.

    Args:
        alpha: Weight of `A_traj`. The paper uses 0.5; 1 is GRPO.
        format_penalty: Penalty of a valid turn without exactly one tag before its action. The paper uses 0.1.
    """

    card = "[RLVMR](https://arxiv.org/abs/2507.22844), alpha {alpha:g}"
    needs = {Need.GROUPS, Need.TURN_REWARDS}

    alpha: Share = 0.5
    format_penalty: NonNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally = Tally("turns", "reward", *TAGS)

    def check(self, args: Any) -> None:
        for field, expected in (("require_think", False), ("action_format", "tags")):
            if (got := getattr(args, field)) != expected:
                raise InputError(
                    f"{field}: expected {expected!r} with credit 'rlvmr', got {got!r}. A turn gives its kind of "
                    "reasoning as a tag before <action>; prompt_template: general_tags asks for it."
                )

    def turn_rewards(self, episode: Episode) -> Sequence[float]:
        return [
            turn.reward - self.format_penalty * (turn.is_valid and not find_tag(turn.response))
            for turn in episode.turns
        ]

    def credit(self, batch: Batch) -> Credit:
        paid = [list(tag_rewards(episode)) if episode.is_usable else [] for episode in batch.episodes]
        tagged = [turn for turns in paid for turn in turns]
        counts = {name: sum(tag == name for tag, _ in tagged) for name in TAGS}
        self.tally.add(turns=len(tagged), reward=sum(reward for _, reward in tagged), **counts)
        per_token = rows_on_tokens(compare_by_key(paid, batch, divisor=sample_deviation), batch)
        return Credit(self.alpha * super().credit(batch).advantages + (1 - self.alpha) * per_token)

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        sums = self.tally.take(step.ranks)
        return {f"rlvmr/{name}": sums[name] / max(sums["turns"], 1) for name in (*TAGS, "reward")}


def find_tag(response: str) -> str:
    """Returns the tag of a response, or `""` unless exactly one nonempty tag precedes the action."""
    text = response.lower()
    tags = list(_OPENING.finditer(text))
    if len(tags) != 1:
        return ""
    thought, closing, rest = text[tags[0].end() :].partition(f"</{tags[0][1]}>")
    return tags[0][1] if closing and thought.strip() and "<action>" in rest else ""


def tag_rewards(episode: Episode) -> Iterator[tuple[str, float]]:
    """Yields the tag and the reward of each turn; a turn that is invalid or has not exactly one tag earns 0."""
    tried: set[str] = set()  # the actions of valid turns
    failed: str | None = None  # the last action, if it was invalid
    for turn in episode.turns:
        tag = find_tag(turn.response) if turn.is_valid else ""
        earned = {
            "planning": episode.won,
            "explore": turn.action not in tried,
            "reflection": failed not in (None, turn.action),
        }
        yield tag, float(earned.get(tag, False))
        if turn.is_valid:
            tried.add(turn.action)
        failed = None if turn.is_valid else turn.action
