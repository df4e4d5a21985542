"""Methods that the tests name as `method_examples:Class`: one for each hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from epo_trl.methods import Method, ModifiedAdvantages, Need, Selection, Tally


@dataclass
class Double(Method):
    def modify_advantages(self, advantages, batch):
        return ModifiedAdvantages(2 * advantages)


@dataclass
class AddOne(Method):
    def modify_advantages(self, advantages, batch):
        return ModifiedAdvantages(advantages + batch.mask)


@dataclass
class Marked(Method):
    """Marks each token with a number of its own, and looks whether the loss sees it on that token again."""

    needs = {Need.SCORES}

    def __post_init__(self):
        self.seen: list[tuple[Any, Any, Any]] = []

    def modify_advantages(self, advantages, batch):
        return ModifiedAdvantages(advantages, {"logps": batch.logps, "entropy": batch.entropy})

    def loss(self, micro):
        self.seen.append((micro, micro.token_annotations["logps"], micro.token_annotations["entropy"]))
        return 0.0 * micro.policy_mean(micro.logps)


@dataclass
class PolicyLossAsTerm(Method):
    """Takes the advantages away and puts them back as a term: what TRL's policy loss is where all ratios are 1."""

    def modify_advantages(self, advantages, batch):
        return ModifiedAdvantages(torch.zeros_like(advantages), {"advantages": advantages})

    def loss(self, micro):
        ratio = (micro.logps - micro.old_logps).exp()
        return -micro.policy_mean(ratio * micro.token_annotations["advantages"])


@dataclass
class KeepUnequal(Method):
    """Refuses groups of equal returns: DAPO's dynamic sampling."""

    def select(self, groups):
        return [Selection.REPLACE if max(g.returns) - min(g.returns) < 1e-6 else Selection.TRAIN for g in groups]


@dataclass
class KeepNothing(Method):
    def select(self, groups):
        return [Selection.REPLACE for _ in groups]


@dataclass
class OneReward(Method):
    """The whole reward of the episode at its first turn."""

    scale: float = 1.0

    def __post_init__(self):
        if self.scale <= 0:
            raise ValueError(f"scale: expected a number > 0, got {self.scale}")

    def turn_rewards(self, episode):
        rewards = [0.0] * len(episode.turns)
        if rewards:
            rewards[0] = self.scale * episode.total_reward
        return rewards


@dataclass
class Counter(Method):
    """Counts RL steps, and in the batch in use the tokens that were measured."""

    def __post_init__(self):
        self.steps, self.tally = 0, Tally("tokens")

    def modify_advantages(self, advantages, batch):
        return ModifiedAdvantages(advantages, metrics={"counter/collected": float(batch.rl_step)})

    def observe(self, micro):
        self.tally.add(tokens=micro.mask.sum())

    def end_rl_step(self, step):
        self.steps += 1
        return {"counter/tokens": self.tally.take(step.ranks)["tokens"], "counter/steps": float(self.steps)}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@dataclass
class Stubborn(Method):
    def check(self, args):
        if args.temperature != 1:
            raise ValueError(f"temperature: expected 1 with Stubborn, got {args.temperature}")


@dataclass
class Carded(Method):
    card = "a bonus of {scale:g}, $\\beta_{k}$"
    scale: ClassVar[float] = 0.5


@dataclass
class Recarded(Carded):
    card = "a bonus of {scale:g}"


class NoDataclass(Method):
    pass
