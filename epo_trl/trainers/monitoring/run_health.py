"""Warnings of a run that explodes or collapses, as `epo_trl.evaluation.outcomes` defines it, or has no signal."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from epo_trl.evaluation.outcomes import COLLAPSED_RATIO, EXPLODED_RATIO, WINDOW, Collapse, Explosion, RollingSeries
from epo_trl.methods import Comm

PATIENCE = 3  # number of consecutive RL steps with equal rewards before a warning


@dataclass
class Streak:
    """Counts consecutive RL steps in which a condition holds."""

    length: int  # of a streak, in RL steps
    _steps: int = field(default=0, init=False)

    def add(self, holds: bool) -> bool:
        """Adds an RL step; returns whether the streak has just reached its length, once per streak."""
        self._steps = self._steps + 1 if holds else 0
        return self._steps == self.length


def watched_entropy(metrics: Mapping[str, float]) -> float:
    """Returns the entropy used to detect a collapse, in nats; NaN if no token has one.

    If `ref-nucleus` logs the entropy of tokens where the reference policy had a choice, that is used, otherwise the
    entropy of all tokens. `entropy/decision_tokens` is not suitable: its tokens are those above a threshold, or a fixed
    share, so the set of tokens changes with the entropy.
    """
    watched = "ref-nucleus/choice_entropy" if "ref-nucleus/choice_share" in metrics else "entropy/all_tokens"
    return metrics.get(watched, math.nan)


def explosion_warning(rl_step: int, watch: Explosion) -> str:
    """Returns the warning for an explosion, with its symptoms and advice."""
    entropy, invalid, seen = watch.entropy, watch.invalid, []
    if watch.by_entropy:
        seen.append(f"entropy is above {EXPLODED_RATIO:g} times its start ({entropy.start:.3g} nats)")
    if watch.by_invalid_turns:
        seen.append(f"{invalid.recent:.0%} of the turns are invalid, {invalid.start:.0%} at the start")
        if not watch.by_entropy:
            seen.append("entropy has not doubled, so the policy has learned malformed answers")
    fix = "less weight on entropy (epo_lambda)" if watch.by_entropy else "invalid_action: skip"
    return (
        f"The run has exploded (RL step {rl_step}): over the last {WINDOW} RL steps {' and '.join(seen)}. Some runs "
        f"recover. If this one does not, restart from an earlier checkpoint with {fix}, a lower learning_rate, fewer "
        "updates per batch (num_iterations, steps_per_generation), an invalid_action_penalty, or a small KL term (beta)"
    )


def collapse_warning(rl_step: int, watch: Collapse) -> str:
    """Returns the warning for a collapse, with its symptoms and advice."""
    entropy, success = watch.entropy, watch.success
    return (
        f"The run has collapsed (RL step {rl_step}): over the last {WINDOW} RL steps the mean entropy was "
        f"{entropy.recent:.3g} nats, below {COLLAPSED_RATIO:g} times its start ({entropy.start:.3g}), and success "
        f"{success.recent:.0%}, {watch.best:.0%} at best. Restart from an earlier checkpoint with a lower "
        "learning_rate, fewer updates per batch (num_iterations, steps_per_generation), more episodes per task "
        "(num_generations), an entropy bonus where there is a choice (entropy_method: ref-nucleus), or a small KL term "
        "(beta)"
    )


def equal_rewards_warning(rl_step: int, success: float) -> str:
    """Returns the warning for a streak of equal rewards, with advice by the share of solved episodes."""
    advice = "use harder tasks, or stop here"
    if success != 1:
        advice = (
            "start from a policy that solves some of the tasks (warm start: recipes/sft.py), play more episodes per "
            "task (num_generations), use easier tasks or more turns, or reward partial progress (env_reward_weight)"
        )
    return (
        f"In each of the last {PATIENCE} RL steps (up to {rl_step}) the episodes that are compared got equal rewards, "
        f"{success:.0%} of them solved, so rewards give no gradient: {advice}."
    )


class RunHealth:
    """Monitors a run, and warns once when it explodes or collapses, and once per streak of RL steps without a signal.

    It warns of an explosion or a collapse again after `WINDOW` RL steps without it. The first process warns.
    """

    def __init__(self, ranks: Comm):
        self._ranks = ranks
        self._equal_rewards, self._empty_batches = Streak(PATIENCE), Streak(1)
        self._explosion, self._collapse = Explosion(), Collapse()
        self._calm = {"exploded": WINDOW, "collapsed": WINDOW}  # RL steps since the condition last held
        self._invalid = self._success = math.nan  # of the current batch

    def add_rollout(self, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a collected batch, equal on all ranks."""
        self._invalid, self._success = metrics["env/invalid_actions"], metrics["env/success_rate"]

    def add_credit(self, num_episodes: Tensor, advantages: Tensor, rl_step: int) -> None:
        """Adds the credit of a batch. Collective.

        Args:
            num_episodes: Number of episodes with a token in the loss, over all ranks.
            advantages: (B, T) advantages of this rank: all 0 if all rewards that are compared are equal.
            rl_step: Index of the RL step.
        """
        is_equal = not self._ranks.sum((advantages.abs() > 1e-4).sum().float())
        if self._equal_rewards.add(is_equal and bool(num_episodes)):
            self._warn(equal_rewards_warning(rl_step, self._success))
        if self._empty_batches.add(not num_episodes):
            self._warn(
                f"No token of RL step {rl_step} is trained on: see env/aborted, rollout/cut_responses (raise "
                "max_completion_length or set mask_truncated_completions to false) and rollout/left_out_groups."
            )

    def _warn(self, text: str) -> None:
        if self._ranks.index == 0:
            warnings.warn(text, stacklevel=3)

    def end_rl_step(self, metrics: Mapping[str, float], rl_step: int) -> dict[str, float]:
        """Returns the metrics of the run's health, 0 or 1 each, from those of the methods."""
        exploded = self._explosion.add(metrics.get("entropy/all_tokens", math.nan), self._invalid)
        collapsed = self._collapse.add(watched_entropy(metrics), self._success)
        if self._begins("exploded", exploded):
            self._warn(explosion_warning(rl_step, self._explosion))
        if self._begins("collapsed", collapsed):
            self._warn(collapse_warning(rl_step, self._collapse))
        return {"run/exploded": float(exploded), "run/collapsed": float(collapsed)}

    def _begins(self, what: str, holds: bool) -> bool:
        calm, self._calm[what] = self._calm[what], 0 if holds else self._calm[what] + 1
        return holds and calm >= WINDOW

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the monitor, as plain JSON types."""
        return {
            "explosion": asdict(self._explosion),
            "collapse": asdict(self._collapse),
            "calm": dict(self._calm),
            "rollout": [self._invalid, self._success],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of the monitor."""
        explosion, collapse = state["explosion"], state["collapse"]
        self._explosion = Explosion(RollingSeries(**explosion["entropy"]), RollingSeries(**explosion["invalid"]))
        series = RollingSeries(**collapse["entropy"]), RollingSeries(**collapse["success"])
        self._collapse = Collapse(*series, best=collapse["best"])
        self._calm = dict(state["calm"])
        self._invalid, self._success = state["rollout"]
