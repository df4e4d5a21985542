"""The settings of a rollout of many turns."""

from __future__ import annotations

from dataclasses import dataclass, field

from epo_trl.rollout.few_shot import FewShotArguments


@dataclass
class RolloutArguments(FewShotArguments):
    """How episodes are played."""

    context: str = field(
        default="windowed",
        metadata={"help": "'windowed': each turn is a fresh prompt; 'concatenated': the episode is one sequence."},
    )
    history_length: int = field(default=2, metadata={"help": "Past turns shown in a windowed prompt."})
    max_turns: int = field(default=50, metadata={"help": "Turn budget of an episode."})
    max_prompt_length: int = field(
        default=2048, metadata={"help": "Longest prompt of one turn, in tokens; oldest history is dropped first."}
    )
    max_completion_length: int = field(default=512, metadata={"help": "Longest response of one turn, in tokens."})
    prompt_template: str = field(
        default="alfworld", metadata={"help": "Name of a template of epo_trl, or a folder with your own text files."}
    )
    action_format: str = field(
        default="tags",
        metadata={
            "help": "How a response names its action: 'tags', between <action> and </action>; or, with an environment "
            "of tools, 'tool_calls' in the format of the model's own chat template."
        },
    )
    require_think: bool = field(
        default=True, metadata={"help": "Whether a response without <think> </think> counts as invalid."}
    )
    invalid_action: str = field(
        default="pass",
        metadata={"help": "'pass' hands an invalid action to the environment; 'skip' only costs the turn."},
    )
    invalid_action_penalty: float = field(
        default=0.1, metadata={"help": "Subtracted from the reward for every turn without a valid action."}
    )
    success_reward: float = field(default=10.0, metadata={"help": "Reward for solving the task."})
    env_reward_weight: float = field(
        default=0.0, metadata={"help": "Factor on the environment's own reward, added to every turn's reward."}
    )
    env_workers: int = field(
        default=0,
        metadata={
            "help": "Processes of each rank among which environments are spread; 0 plays them in the trainer's own. "
            "ALFWorld's games are faster there, and ScienceWorld's have Java processes of their own."
        },
    )
    env_step_seconds: float = field(
        default=60.0, metadata={"help": "A worker whose environment takes longer for a step is killed and replaced."}
    )
    env_reset_seconds: float = field(
        default=120.0, metadata={"help": "A worker whose environment takes longer for a reset is killed and replaced."}
    )
    env_reset_retries: int = field(
        default=2, metadata={"help": "How often a reset is tried again if its worker died or was killed."}
    )
    rollout_waves: int = field(
        default=1,
        metadata={
            "help": "Parts into which a batch is split for the rollout. With 2, the environments of one half work "
            "while the policy answers for the other: for environments that take longer than generation."
        },
    )
    keep_episodes: int = field(
        default=4,
        metadata={
            "help": "Episodes that are kept in output_dir for `epo-trl watch`, of some RL steps: the worst, the best, "
            "an aborted one, and random ones. 0 keeps none."
        },
    )
    keep_episodes_steps: int | None = field(
        default=None,
        metadata={"help": "RL steps from one of these to the next; by default a fiftieth of the run. The last is one."},
    )
    max_aborted_share: float = field(
        default=0.5,
        metadata={
            "help": "If a larger share of a batch is aborted by errors of environments or the parser, or has no room "
            "for a first prompt, all ranks save a checkpoint and stop. 1 never stops."
        },
    )
