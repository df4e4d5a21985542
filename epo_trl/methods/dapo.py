"""DAPO (arXiv 2503.14476): dynamic sampling of groups and a penalty on overlong responses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from epo_trl.bounds import NonNegative, OneOf, PositiveShare
from epo_trl.methods.base import Group, Method, Need, Selection, StepSummary, Tally
from epo_trl.types import Episode

# The rest of DAPO is configured by TRL's fields: Clip-Higher, a token-level loss, no KL term.
FIELDS = {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "beta": 0.0}


@dataclass
class DAPO(Method):
    """Dynamic sampling and overlong reward shaping. `FIELDS` holds the rest of DAPO.

    Overlong shaping subtracts `overlong_penalty * min(1, (n - (1 - c) L) / (c L))` from the reward of a turn whose
    response has n > (1 - c) L tokens, with `L = max_completion_length` and `c = overlong_share`.

    Args:
        max_completion_length: The field of the configuration, in tokens.
        outcome: What may not be equal in a group: `"won"`, as in the paper, or `"return"`, the total reward.
        overlong_share: Final fraction of the length limit that is penalised. The paper uses 4096 of 20480 tokens.
        overlong_penalty: Largest penalty. The paper uses 1, with 1 for success and -1 for failure. 0 disables it.
    """

    card = "the dynamic sampling and overlong shaping of [DAPO](https://arxiv.org/abs/2503.14476)"
    needs = {Need.GROUPS}
    config_fields = ("max_completion_length",)

    max_completion_length: int
    outcome: Annotated[str, OneOf(("won", "return"))] = "won"
    overlong_share: PositiveShare = 0.2
    overlong_penalty: NonNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally = Tally("overlong", "turns")

    def check(self, args: Any) -> None:
        others = [f"{name} {getattr(args, name)}, where DAPO uses {value}" for name, value in FIELDS.items()
                  if getattr(args, name) != value]  # fmt: skip
        if others:
            warnings.warn(f"policy_method: got 'dapo' with {'; '.join(others)}", stacklevel=2)

    def turn_rewards(self, episode: Episode) -> Sequence[float] | None:
        last = self.overlong_share * self.max_completion_length
        first = self.max_completion_length - last
        shares = [min(1.0, max(0.0, (len(turn.response_ids) - first) / last)) for turn in episode.turns]
        if episode.is_usable:
            self.tally.add(overlong=sum(share > 0 for share in shares), turns=len(shares))
        if not self.overlong_penalty:
            return None
        return [turn.reward - self.overlong_penalty * x for turn, x in zip(episode.turns, shares, strict=True)]

    def select(self, groups: Sequence[Group]) -> list[Selection]:
        return [Selection.TRAIN if self._differs(group) else Selection.REPLACE for group in groups]

    def _differs(self, group: Group) -> bool:
        outcomes = group.won if self.outcome == "won" else group.returns
        usable = [outcome for outcome, is_usable in zip(outcomes, group.usable, strict=True) if is_usable]
        return bool(usable) and max(usable) - min(usable) > 1e-6

    def end_rl_step(self, step: StepSummary) -> dict[str, float]:
        sums = self.tally.take(step.ranks)
        return {"dapo/overlong": sums["overlong"] / max(sums["turns"], 1)}
