"""Settings of a multi-turn rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from epo_trl.bounds import Count, CountOrZero, Finite, OneOf, Positive, Range, Share
from epo_trl.rollout.context import CONTEXTS
from epo_trl.rollout.few_shot import FewShotArguments
from epo_trl.rollout.rules import INVALID_ACTIONS, LARGEST_REWARD
from epo_trl.rollout.tool_calls import ACTION_FORMATS


@dataclass
class RolloutArguments(FewShotArguments):
    """Settings of the rollout."""

    context: Annotated[str, OneOf(CONTEXTS)] = field(
        default="windowed",
        metadata={"help": "'windowed': each turn is a fresh prompt; 'concatenated': the episode is one sequence."},
    )
    history_length: CountOrZero = field(default=2, metadata={"help": "Number of past turns in a windowed prompt."})
    max_turns: Count = field(default=50, metadata={"help": "Maximum number of turns per episode."})
    max_prompt_length: Count = field(
        default=2048, metadata={"help": "Maximum prompt length of a turn, in tokens; oldest history is dropped first."}
    )
    max_completion_length: Count = field(default=512, metadata={"help": "Maximum response length per turn, in tokens."})
    prompt_template: str = field(
        default="alfworld", metadata={"help": "Name of a template of epo_trl, or a folder with custom text files."}
    )
    action_format: Annotated[str, OneOf(ACTION_FORMATS)] = field(
        default="tags",
        metadata={
            "help": "Format of the action in a response: 'tags', between <action> and </action>; or, with an "
            "environment of tools, 'tool_calls' in the format of the model's chat template."
        },
    )
    require_think: bool = field(
        default=True, metadata={"help": "Whether a response without <think> </think> counts as invalid."}
    )
    invalid_action: Annotated[str, OneOf(INVALID_ACTIONS)] = field(
        default="pass",
        metadata={"help": "'pass' sends an invalid action to the environment; 'skip' only uses up the turn."},
    )
    invalid_action_penalty: Annotated[float, Range(0, LARGEST_REWARD)] = field(
        default=0.1, metadata={"help": "Invalid-action penalty: subtracted from the reward of each invalid turn."}
    )
    success_reward: Annotated[float, Range(-LARGEST_REWARD, LARGEST_REWARD)] = field(
        default=10.0, metadata={"help": "Reward for solving the task."}
    )
    env_reward_weight: Finite = field(
        default=0.0, metadata={"help": "Factor on the environment's own reward, added to every turn's reward."}
    )
    env_workers: CountOrZero = field(
        default=0,
        metadata={
            "help": "Number of worker processes per rank for the environments; 0 runs them in the trainer's process. "
            "ALFWorld's games run faster in workers, and ScienceWorld's have Java processes of their own."
        },
    )
    env_step_seconds: Positive = field(
        default=60.0, metadata={"help": "Seconds per environment step before its worker is killed and replaced."}
    )
    env_reset_seconds: Positive = field(
        default=120.0, metadata={"help": "Seconds per environment reset before its worker is killed and replaced."}
    )
    env_reset_retries: CountOrZero = field(
        default=2, metadata={"help": "Number of times a reset is retried after its worker died or was killed."}
    )
    simulated_lag: CountOrZero = field(
        default=0,
        metadata={
            "help": "Number of RL steps that the acting policy is behind the trained one, to study off-policy data. "
            "0 is on-policy."
        },
    )
    lag_correction: bool = field(
        default=True,
        metadata={
            "help": "Whether to weight the advantages of lagged data by importance weights, at most "
            "`vllm_importance_sampling_clip_max` per token."
        },
    )
    keep_episodes: CountOrZero = field(
        default=4,
        metadata={
            "help": "Number of episodes per selected RL step to save in output_dir for `epo-trl watch`: the worst, the "
            "best, an aborted one, and random ones. 0 saves none."
        },
    )
    keep_episodes_steps: Count | None = field(
        default=None,
        metadata={"help": "Save episodes every N RL steps, and at the last one; defaults to a fiftieth of the run."},
    )
    max_aborted_share: Share = field(
        default=0.5,
        metadata={
            "help": "Limit on the share of a batch that is aborted by environment or parser errors, or by a first "
            "prompt that does not fit. Above it, all ranks save a checkpoint and stop. 1 never stops."
        },
    )
