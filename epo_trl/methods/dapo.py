"""DAPO (arXiv 2503.14476): groups that teach nothing are replaced, and responses that are too long cost something."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from epo_trl.methods.base import Group, Need, StepSummary
from epo_trl.methods.tally import Tallied, Tally
from epo_trl.types import Episode

# The rest of DAPO is in fields of TRL: Clip-Higher, a loss averaged over tokens, no KL term.
FIELDS = {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "beta": 0.0}
OUTCOMES = ("won", "return")


@dataclass
class DAPO(Tallied):
    """Dynamic sampling and overlong shaping; `FIELDS` has what else DAPO is.

    Dynamic sampling refuses groups whose members all have the same outcome. Overlong shaping takes
    `overlong_penalty * min(1, (n - (1 - c) L) / (c L))` from the reward of a turn whose response has n > (1 - c) L
    tokens, with `L = max_completion_length` and `c = overlong_share`. The paper has one response per episode; here each
    turn has its own.

    Args:
        max_completion_length: The field of the configuration, in tokens.
        outcome: What is compared: `"won"`, whether the task was solved, as in the paper, or `"return"`, the total
            reward, for environments that pay for a part of a task.
        overlong_share: The paper's 4096 of 20480 tokens.
        overlong_penalty: The paper's 1, where success is worth 1 and failure -1. 0 charges nothing.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.GROUPS})
    config_fields: ClassVar[tuple[str, ...]] = ("max_completion_length",)

    max_completion_length: int
    outcome: str = "won"
    overlong_share: float = 0.2
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome: got {self.outcome!r}, takes one of {OUTCOMES}")
        if not 0 < self.overlong_share <= 1:
            raise ValueError(f"overlong_share: got {self.overlong_share}, takes a number > 0 and <= 1")
        if not 0 <= self.overlong_penalty < math.inf:
            raise ValueError(f"overlong_penalty: got {self.overlong_penalty}, takes a number >= 0")
        self.tally = Tally(2)

    def described(self) -> str:
        """Returns name and paper."""
        return "the dynamic sampling and overlong shaping of [DAPO](https://arxiv.org/abs/2503.14476)"

    def check(self, args: Any) -> None:
        """Warns of TRL's fields that are not DAPO's."""
        others = [f"{name} {getattr(args, name)}, where DAPO has {value}" for name, value in FIELDS.items()
                  if getattr(args, name) != value]  # fmt: skip
        if others:
            warnings.warn(f"policy_method: got 'dapo' with {'; '.join(others)}", stacklevel=2)

    def turn_rewards(self, episode: Episode) -> Sequence[float] | None:
        """Returns the rewards, less what too long responses cost."""
        shares = [self._too_long(len(turn.response_ids)) for turn in episode.turns]
        if episode.is_usable:
            self.tally.add(sum(share > 0 for share in shares), len(shares))
        if not self.overlong_penalty:
            return None
        return [turn.reward - self.overlong_penalty * x for turn, x in zip(episode.turns, shares, strict=True)]

    def keep(self, group: Group) -> bool:
        """Returns whether outcomes differ among the members that carry a signal."""
        outcomes = group.won if self.outcome == "won" else group.returns
        usable = [outcome for outcome, is_usable in zip(outcomes, group.usable, strict=True) if is_usable]
        return bool(usable) and max(usable) - min(usable) > 1e-6

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        """Returns the share of turns that were too long."""
        overlong, turns = self.tally.take(step.ranks)
        return {"dapo/overlong": overlong / max(turns, 1)}

    def _too_long(self, tokens: int) -> float:
        """Returns how far a response is into the last part of the allowed length, from 0 to 1."""
        last = self.overlong_share * self.max_completion_length
        return min(1.0, max(0.0, (tokens - (self.max_completion_length - last)) / last))
