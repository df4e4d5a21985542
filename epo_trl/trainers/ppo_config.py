"""Configuration of PPO with a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from epo_trl.bounds import Count, CountOrZero, NonNegative, OneOf, Positive, Share, option
from epo_trl.trainers.config import EPOConfig

CRITICS = ("separate", "value_head")


@dataclass
class EPOPPOConfig(EPOConfig):
    """EPOConfig with a critic and advantages from it instead of from a group (PPO, arXiv 1707.06347).

    `num_generations` defaults to 1: PPO compares an episode with the critic's value, not with other episodes.
    TRL's `epsilon`, `num_iterations` and `steps_per_generation` are PPO's clipping, epochs and mini-batches.
    """

    has_critic: ClassVar[bool] = True

    num_generations: Count = option(1, "Number of episodes per task and RL step. PPO needs no group.")

    # Critic
    critic: Annotated[str, OneOf(CRITICS)] = option(
        "separate",
        "'separate': a separate model with a scalar head, initialized from the policy's base model; 'value_head': a "
        "scalar head on the policy's own transformer.",
    )
    critic_use_peft: bool = option(False, "Whether to train a separate critic with an adapter like the policy's.")
    critic_learning_rate: Positive | None = option(
        None, "Learning rate of the critic, with the same schedule; null for the policy's."
    )
    critic_warmup_steps: CountOrZero = option(0, "Number of initial optimizer steps that train only the critic.")
    value_coef: NonNegative = option(1.0, "Weight of the critic's loss. It matters most with a shared transformer.")
    value_clip: Positive | None = option(
        0.5, "Clipping range of values during the updates on one batch, in units of reward; null for no limit."
    )

    # Credit
    credit: str = option(
        "turn",
        "'turn': GAE from turn to turn; 'token': GAE over all response tokens of the episode; 'outcome': the "
        "episode's whole reward at the end of every turn, no bootstrapping; 'vetta': GAE over turns and inside each "
        "turn, from two heads; 'module:Class': your own method.",
    )
    gamma: Share = option(1.0, "Discount from one decision point (a turn or a token) to the next.")
    gae_lambda: Share = option(1.0, "lambda of GAE, from one decision point to the next.")
    bootstrap_truncated: bool = option(
        False,
        "Whether to bootstrap truncated episodes from the critic's value of their last state; false counts them as "
        "ended. Use true with a gamma below 1.",
    )
    normalize_advantages: bool = option(
        True, "Whether advantages are normalized to mean 0 and deviation 1 over tokens."
    )
