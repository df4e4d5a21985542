"""The configuration of PPO with a critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from epo_trl.trainers.config import EPOConfig

CRITICS = ("separate", "value_head")


@dataclass
class EPOPPOConfig(EPOConfig):
    """EPOConfig with a critic and advantages from it instead of from a group (PPO, arXiv 1707.06347).

    `num_generations` is 1 by default: PPO compares an episode with the critic's value, not with other episodes.
    TRL's `epsilon`, `num_iterations` and `steps_per_generation` are PPO's clipping, epochs and mini-batches.
    """

    has_critic: ClassVar[bool] = True

    num_generations: int | None = field(
        default=1, metadata={"help": "Episodes played per task and RL step. PPO needs no group."}
    )

    # Critic
    critic: str = field(
        default="separate",
        metadata={
            "help": "'separate': a model of its own that starts from the policy's base model, with a scalar head; "
            "'value_head': a scalar head on the policy's own transformer."
        },
    )
    critic_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Model that a separate critic starts from, with the same tokenizer; null for the policy's."},
    )
    critic_use_peft: bool = field(
        default=False, metadata={"help": "Whether a separate critic is trained by an adapter like the policy's."}
    )
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the critic; null for the policy's. Same schedule."}
    )
    critic_warmup_steps: int = field(
        default=0, metadata={"help": "First optimizer steps in which the critic alone is trained."}
    )
    value_coef: float = field(
        default=1.0, metadata={"help": "Weight of the critic's loss. Matters for a shared transformer above all."}
    )
    value_clip: float | None = field(
        default=0.5,
        metadata={
            "help": "How far a value may move in the updates on one batch, in units of reward; null for no limit."
        },
    )

    # Credit
    credit: str = field(
        default="turn",
        metadata={
            "help": "'turn': GAE from turn to turn; 'token': GAE over all response tokens of the episode; 'outcome': "
            "the episode's whole reward at the end of every turn, no bootstrapping; 'module:Class': your own method."
        },
    )
    gamma: float = field(
        default=1.0, metadata={"help": "Discount from one decision point (a turn or a token) to the next."}
    )
    gae_lambda: float = field(default=1.0, metadata={"help": "lambda of GAE, from one decision point to the next."})
    bootstrap_truncated: bool = field(
        default=False,
        metadata={
            "help": "Whether an episode that was cut off is worth what the critic expects of its last state; false "
            "treats the cut as the end of the game. True goes with a gamma below 1."
        },
    )
    normalize_advantages: bool = field(
        default=True, metadata={"help": "Whether advantages get mean 0 and deviation 1 over the batch's tokens."}
    )

    def __post_init__(self) -> None:
        self._check_epo()
        self._check_limits()
        self._check_ppo()
        groups, self.num_generations = self.num_generations, self._group_that_trl_takes()
        super().__post_init__()
        self.num_generations = groups
        self._check_methods()

    def _group_that_trl_takes(self) -> int:
        """GRPOConfig refuses groups of one; any divisor of the batch from 2 on satisfies its checks instead."""
        if self.num_generations is None or self.num_generations > 1:
            return self.num_generations or 0
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        size = self.generation_batch_size or self.per_device_train_batch_size * steps
        if size < 2:
            raise ValueError(
                f"per_device_train_batch_size: got {self.per_device_train_batch_size} with one step per generation; "
                "takes a batch of at least 2 episodes on every process"
            )
        return size

    def _check_ppo(self) -> None:
        if self.critic not in CRITICS:
            raise ValueError(f"critic: got {self.critic!r}, takes one of {CRITICS}")
        if self.num_generations is None or self.num_generations < 1:
            raise ValueError(f"num_generations: got {self.num_generations!r}, takes an integer >= 1")
        checks = {
            "a number from 0 to 1": (("gamma", "gae_lambda"), lambda x: 0 <= x <= 1),
            "a number >= 0": (("critic_warmup_steps", "value_coef"), lambda x: x >= 0),
            "a number > 0 or null": (("critic_learning_rate", "value_clip"), lambda x: x is None or x > 0),
        }
        for takes, (names, holds) in checks.items():
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"{name}: got {getattr(self, name)!r}, takes {takes}")
        self._check_value_head()

    def _check_value_head(self) -> None:
        if self.critic == "value_head":
            for name in ("critic_model_name_or_path", "critic_use_peft"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}: got {getattr(self, name)!r}, takes nothing with critic='value_head', which has no "
                        "transformer of its own; set critic='separate'"
                    )
