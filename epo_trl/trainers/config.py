"""Configuration of EPO, on top of TRL's GRPOConfig, and the settings of its rollout."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from epo_trl.bounds import Count, CountOrZero, NonNegative, OneOf, Positive, Share, check_bounds, option
from epo_trl.errors import InputError
from epo_trl.evaluation.report import LOWER_IS_BETTER
from epo_trl.methods import build_methods
from epo_trl.models.generate import narrowing
from epo_trl.objectives.history import GRANULARITIES
from epo_trl.objectives.smoothing import PENALTIES
from epo_trl.rollout.spec import EpisodeArguments, ResponseArguments, RewardArguments
from epo_trl.runs.run_settings import LongRunArguments, check_training_arguments
from epo_trl.trainers.support import check_config

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")  # TRL's loss types
SAMPLING_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")  # TRL's modes
# Of TRL's fields. It checks other values of some only after a batch has been collected.
THEIR_BOUNDS = {
    "loss_type": Annotated[str, OneOf(LOSSES)],
    "num_generations": Count,
    "per_device_train_batch_size": Count,
    "gradient_accumulation_steps": Count,
    "temperature": Positive,
}
# TRL's losses whose scale is another where a sequence is an episode of several turns.
_SCALES = {
    "dr_grpo": "divides the sum over an episode's tokens by max_completion_length, the longest response of one turn: "
    "policy loss and KL are up to max_turns times too large, the entropy terms as much too small",
    "luspo": "sums over an episode's tokens without a divisor: policy loss and KL are larger than with dapo by the "
    "number of tokens of an episode, the entropy terms as much too small",
    "vespo": "weights an episode by the product of its tokens' ratios over all turns: after the first update on a "
    "batch long episodes give no signal",
}

# Generation settings that have a field of their own, or that the loss and the grouping of samples cannot take.
_NOT_IN_KWARGS = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation", "max_new_tokens",
    "max_tokens", "max_length", "do_sample", "num_beams", "num_return_sequences", "n", "return_dict_in_generate",
    "eos_token_id", "stop_token_ids", "stop", "stop_strings", "seed", "logprobs",
}  # fmt: skip
# Values that leave the model's distribution unchanged.
_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0,),
    "vllm_structured_outputs_regex": (None,),
}  # fmt: skip


def _check_sampling(args: EPOConfig) -> None:
    """Raises `InputError` if `generation_kwargs` bypass a field; warns if the sampled distribution is narrowed."""
    given: dict[str, Any] = args.generation_kwargs or {}
    if bypassing := sorted(_NOT_IN_KWARGS.intersection(given)):
        raise InputError(
            f"generation_kwargs: expected no {', '.join(bypassing)}, which the loss would not know of. temperature, "
            "top_p, top_k, min_p, repetition_penalty, max_completion_length, seed and request_seeds are fields. A "
            "prompt gets one sampled response, which ends at the model's own end tokens."
        )
    names = [*(name for name, values in _OFF.items() if getattr(args, name) not in values), *narrowing(given)]
    if names and args.process_index == 0:
        warnings.warn(
            f"{', '.join(names)}: expected the defaults, since the loss and the entropy terms assume responses from "
            "the full distribution; the entropy bonus includes tokens that cannot be sampled",
            stacklevel=4,
        )


def settle_defaults(values: Any) -> None:
    """Replaces defaults of TRL's configs that would warn or fail on this machine.

    By default, TRL enables bf16 even on a machine without a GPU for it, and sets activation checkpointing under a name
    that newer versions of transformers deprecate.

    Args:
        values: A TRL config before its checks, or the parsed options of one. Other objects are left unchanged.
    """
    given = vars(values)
    for suffix in ("", "_kwargs"):
        old, new = f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"
        if old in given and new in given and given[new] is None:
            setattr(values, new, given[old])
    if "bf16" in given and given["bf16"] is None and (given["use_cpu"] or not is_torch_bf16_gpu_available()):
        values.bf16 = False


@dataclass
class RolloutArguments(ResponseArguments, EpisodeArguments, RewardArguments):
    """Settings of the rollout in training."""

    env_workers: CountOrZero = option(
        0,
        "Number of worker processes per rank for the environments; 0 runs them in the trainer's process, which is "
        "faster for ALFWorld's fast engine. ScienceWorld has Java processes of its own.",
    )
    env_step_seconds: Positive = option(60.0, "Seconds per environment step before its worker is killed and replaced.")
    rollout_ahead: bool = option(
        False,
        "Play the next batch during the update, with the weights from before it; only with a vLLM server.",
    )
    request_seeds: bool = option(
        False,
        "Sample each vLLM response from its own seed (run, RL step, rank, episode, turn), whatever the order of the "
        "requests. Slower: vLLM then draws for one sequence after the other.",
    )
    keep_episodes: CountOrZero = option(
        4,
        "Number of episodes per selected RL step to save in output_dir for `epo-trl watch`: the worst, the best, an "
        "aborted one, and random ones. 0 saves none.",
    )
    keep_episodes_steps: Count | None = option(
        None, "Save episodes every N RL steps, and at the last one; defaults to a fiftieth of the run."
    )
    max_aborted_share: Share = option(
        0.5,
        "Largest share of a batch that errors may abort. Above it, all ranks save a checkpoint and stop. 1 never "
        "stops.",
    )


# Default of `tokens_per_pass` (docs/performance.md).
GPU_TOKENS, CPU_TOKENS = 16_384, 2_048


@dataclass
class EPOConfig(LongRunArguments, RolloutArguments, GRPOConfig):
    """GRPOConfig plus the terms of EPO (arXiv 2509.22576) and the settings of a multi-turn rollout.

    Greek letters keep the paper's names. TRL's `beta` is the KL coefficient; the paper's beta_k is `smoothing_beta_*`.
    `max_completion_length` is the maximum length of one turn's response. `max_steps` counts optimizer steps, as in all
    Hugging Face trainers; one RL step is one batch of collected episodes (`generation_batch_size` of them).
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "method_kwargs"]
    has_critic: ClassVar[bool] = False

    # Methods
    credit: str = option(
        "grpo",
        "Credit assignment: 'grpo', 'gigpo', ... (docs/methods.md lists the names), or 'module:Class' for your own "
        "method. With a critic: 'turn', 'token', 'outcome', 'vetta'.",
    )
    entropy_method: list[str] = option(
        lambda: ["epo"],
        "Entropy control: one or more names from docs/methods.md, or 'module:Class' for your own method.",
    )
    policy_method: list[str] = option(
        list,
        "Methods that change the ratio of the policy loss or select groups: names from docs/methods.md, or "
        "'module:Class' for your own.",
    )
    method_kwargs: dict[str, Any] | str | None = option(
        dict, 'Settings of methods that are not fields, by method: \'{"my:Method": {"weight": 0.1}}\'.'
    )
    max_resamples: CountOrZero = option(
        3,
        "Maximum number of rounds per RL step that replace groups rejected by a method. Groups still rejected after "
        "that are trained on.",
    )

    # Objective
    epo_lambda: NonNegative = option(0.001, "lambda: weight of the entropy terms; 0 for none.")
    smoothing_alpha: NonNegative = option(
        0.1, "alpha of Eq. 5: scale of the smoothing penalty. 0 leaves the bonus only."
    )
    smoothing_beta_start: NonNegative = option(
        2.0, "beta_start of Eq. 7: weight of the smoothing term at the first RL step."
    )
    smoothing_beta_end: NonNegative = option(
        1.0, "beta_end of Eq. 7: the weight that the second half of the run approaches, from 1."
    )
    smoothing_decay: NonNegative = option(3.0, "lambda_d of Eq. 7: rate of the schedule.")
    kappa_low: NonNegative = option(0.0, "kappa_l of Eq. 5: lower edge of the band, times the historical entropy.")
    kappa_high: float = option(2.0, "kappa_r of Eq. 5: upper edge of the band, times the historical entropy.")
    smoothing_penalty: Annotated[str, OneOf(PENALTIES)] = option(
        "hinge", "'hinge' (Eq. 5) or 'indicator' (Definition 9; built from constants, carries no gradient)."
    )
    entropy_history: Annotated[str, OneOf(GRANULARITIES)] = option(
        "step", "Entries of the history: 'step', one mean per RL step; 'turn', one per turn index too."
    )
    entropy_history_window: Count | None = option(
        None, "RL steps to look back; None uses the whole history, as in the paper."
    )

    disable_dropout: bool = option(
        True,
        "TRL's: turns off all dropout of policy, reference and critic, with adapters, attention, LayerDrop and router "
        "jitter. With dropout a ratio differs from 1 before any update.",
    )

    tokens_per_pass: Count | None = option(
        None,
        "Maximum number of tokens of a forward pass of the update, padding included. The turns of a micro-batch "
        "(concatenated context: its episodes) are sorted by length and divided into passes. By default "
        f"{GPU_TOKENS:,} on a GPU, {CPU_TOKENS:,} on a CPU.",
    )
    recompute_passes: bool = option(
        False,
        "Run each forward pass but the last again in the backward pass. Memory then depends on tokens_per_pass alone; "
        "it takes as much time as gradient_checkpointing. Not with ZeRO-3 or FSDP.",
    )

    # vLLM
    vllm_importance_sampling_mode: Annotated[str, OneOf(SAMPLING_CORRECTIONS)] = option(
        "token_truncate",
        "Correction for vLLM's own log-probabilities in the update. TRL's default, 'sequence_mask', has a ratio per "
        "completion, here a whole episode.",
    )

    # Evaluation
    eval_temperature: NonNegative = option(
        0.4, "Sampling temperature of evaluation if no protocol is set; 0 decodes greedily."
    )
    eval_episodes: Count | None = option(None, "Evaluate on a fixed random sample of N tasks of each list.")
    eval_seed: int = option(0, "Seed of the sampling in evaluation.")
    protocol: str = option("", "Name of the evaluation protocol; by default the training rules at eval_temperature.")
    print_episodes: CountOrZero = option(
        0, "Number of episodes to print as a table at every logging step, each batch once."
    )
    report_to: None | str | list[str] = option(
        "tensorboard", "Trackers of metrics: 'tensorboard' (files in output_dir), 'wandb', ..., 'all', or 'none'."
    )

    # Long runs
    max_skipped_updates: Count = option(
        5, "Updates with a non-finite loss or gradient are skipped; this many in a row end the run and save the batch."
    )

    def __post_init__(self) -> None:
        for slot in ("entropy_method", "policy_method"):
            names = getattr(self, slot)
            setattr(self, slot, [names] if isinstance(names, str) else list(names or ()))
        check_bounds(self, THEIR_BOUNDS)
        if not self.kappa_low <= self.kappa_high < math.inf:
            raise InputError(f"kappa_high: expected a number >= kappa_low ({self.kappa_low}), got {self.kappa_high}")
        settle_defaults(self)
        check_config(self)
        self.num_generations_eval = 1
        if self.greater_is_better is None and (self.metric_for_best_model or "").rpartition("/")[2] in LOWER_IS_BETTER:
            self.greater_is_better = False
        groups = self.num_generations
        if self.has_critic and groups == 1:  # TRL rejects groups of one in its config alone; any divisor is valid
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            self.num_generations = self.generation_batch_size or self.per_device_train_batch_size * steps
        try:
            GRPOConfig.__post_init__(self)
        except ValueError as error:
            if "divisible by num_generations" not in str(error):
                raise
            raise InputError(
                f"per_device_train_batch_size ({self.per_device_train_batch_size}) x steps_per_generation, by default "
                f"gradient_accumulation_steps ({self.steps_per_generation}), x processes ({self.world_size}): expected "
                f"a multiple of num_generations ({self.num_generations}), got {self.generation_batch_size}"
            ) from error
        self.num_generations = groups
        check_training_arguments(self)
        build_methods(self, critic=self.has_critic)  # checks them
        if self.loss_type == "cispo" and not (self.epsilon if self.epsilon_high is None else self.epsilon_high) >= 1:
            raise InputError(
                f"epsilon_high: expected a number >= 1 with loss_type 'cispo', got {self.epsilon_high}. CISPO caps "
                f"every ratio at epsilon_high, or at epsilon ({self.epsilon}) without one. A smaller cap would scale "
                "down every ratio near 1, and with it the gradient. ScaleRL (arXiv 2510.13786) uses epsilon_high: 5.0."
            )

        _check_sampling(self)
        warns = self.loss_type in _SCALES and (self.loss_type != "vespo" or self.updates_within_batch or self.use_vllm)
        if warns and self.process_index == 0:
            warnings.warn(
                f"loss_type: got {self.loss_type!r}, which {_SCALES[self.loss_type]}. Use loss_type: dapo, or change "
                "learning_rate and epo_lambda by that factor (docs/methods.md)",
                stacklevel=3,
            )

    @property
    def micro_steps_per_rl_step(self) -> int:
        """Number of forward-backward passes per collected batch."""
        return self.steps_per_generation * self.num_iterations

    @property
    def updates_within_batch(self) -> bool:
        """Whether the weights are updated before the end of a collected batch. If not, every ratio is 1."""
        return self.gradient_accumulation_steps % self.micro_steps_per_rl_step != 0

    @property
    def tasks_per_rl_step(self) -> int:
        """Number of tasks per RL step, over all ranks."""
        return self.generation_batch_size // self.num_generations

    def micro_steps(self, optimizer_steps: int, tasks: int) -> int:
        """Returns the number of forward-backward passes in the first optimizer steps of a run.

        `tasks` is their number per epoch, whose last optimizer step uses its remaining micro-batches.
        """
        epoch = tasks // self.tasks_per_rl_step * self.micro_steps_per_rl_step
        epochs, rest = divmod(optimizer_steps, -(-epoch // self.gradient_accumulation_steps))
        return epochs * epoch + min(rest * self.gradient_accumulation_steps, epoch)

    def total_rl_steps(self, optimizer_steps: int, tasks: int) -> int:
        """Returns K of Eq. 7 for a run of this many optimizer steps, with so many tasks per epoch."""
        return max(1, -(-self.micro_steps(optimizer_steps, tasks) // self.micro_steps_per_rl_step))
