"""EPO over many turns as a subclass of TRL's GRPOTrainer.

TRL keeps what it is good at: sampling and grouping tasks, the clipped surrogate and its variants, KL, reference
model, gradient accumulation, distribution, logging. This class fills five seams, always around `super()`:

- `rollout_func`: plays whole episodes; each becomes one row whose turns are segments;
- `_calculate_rewards`: leaves aborted episodes out of the baseline;
- `_generate_and_score_completions`: adds the turn ids and per-token advantages to the batch;
- `_get_per_token_logps_and_entropies`: shows the model turns where TRL sees episodes;
- `compute_loss`: adds the entropy terms of EPO to TRL's policy loss.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import pad

from epo_trl.advantages import CreditBatch, share_episode_advantage
from epo_trl.envs.base import Faults, TaskSuite, TextEnv
from epo_trl.envs.pool import PooledSuite, PoolSettings
from epo_trl.evaluation import EvalReport, Protocol, get_protocol
from epo_trl.evaluation.play import check_first_task, protocol_context, protocol_settings
from epo_trl.evaluation.samples import print_episodes
from epo_trl.long_runs.aborts import first_errors, too_many_aborted
from epo_trl.long_runs.progress import use_short_progress
from epo_trl.long_runs.state_file import write_state
from epo_trl.long_runs.update_guard import spread_nonfinite
from epo_trl.models import load_tokenizer
from epo_trl.models.generate import decoding
from epo_trl.models.prefix_cache import can_reuse, reusing_prefixes, settings_allow_reuse
from epo_trl.objectives import EntropyHistory, band_shares, beta_schedule, smoothing_penalty, turn_mean_weights
from epo_trl.rollout import (
    ContextBuilder,
    PromptTemplate,
    RolloutSettings,
    RolloutTimes,
    episode_to_row,
    play_episodes,
)
from epo_trl.trainers.checks import (
    check_context_fits,
    check_packing,
    check_reference,
    check_sampling,
    check_tokenizer,
    warn_of_divisor,
    warn_of_empty_thought,
)
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.entropy_meter import EntropyMeter
from epo_trl.trainers.long_run_trainer import LongRunTrainer
from epo_trl.trainers.model_card import EPO, GRPO, REPORTS, CardFacts, PlayRules, protocol_row
from epo_trl.trainers.nothing_to_learn import (
    PATIENCE,
    Stretch,
    empty_batch_warning,
    equal_rewards_warning,
    equal_within_groups,
)
from epo_trl.trainers.task_checks import check_arguments, check_test_tasks, check_train_tasks
from epo_trl.trainers.turn_forward import TurnBatch, TurnLayout, TurnScores, cut_turns, score_turns
from epo_trl.types import Episode, StopReason

TEST_SPLITS = ("iid", "ood")


def episode_return(completions: Sequence[Any], episode_return: Sequence[float], **_: Any) -> list[float]:
    """Returns the total reward of each episode."""
    return list(episode_return)


def _protocol_of(args: EPOConfig, suite: TaskSuite) -> Protocol:
    """Returns the training rules as a protocol, for a run that names none."""
    return Protocol(
        name=f"{suite.name}-{args.max_turns}turns",
        max_turns=args.max_turns,
        history_length=args.history_length,
        temperature=args.eval_temperature,
        invalid_action=args.invalid_action,
        context=args.context,
    )


def _response_mask(batch: dict[str, Any]) -> Tensor:
    """Returns (B, T), 1 on the tokens that count."""
    return batch["completion_mask"] * batch["tool_mask"]


def _is_scored(batch: dict[str, Any]) -> bool:
    """Whether the batch holds log-probs of the policy that played: TRL keeps them where updates come between."""
    return "old_per_token_logps" in batch


def _in_workers(suite: TaskSuite, args: EPOConfig) -> TaskSuite:
    """Returns the suite as `env_workers` wants it played."""
    if not args.env_workers:
        return suite
    limits = (args.env_step_seconds, args.env_reset_seconds, args.env_reset_retries)
    return PooledSuite(suite, PoolSettings(args.env_workers, *limits))


class EPOTrainer(LongRunTrainer):
    """Trains a language model on text environments with GRPO and the entropy terms of EPO (arXiv 2509.22576).

    Args:
        model: A model, a Hub id or a local path.
        suite: The tasks and their environments.
        args: The configuration.
        reward_funcs: TRL reward functions; by default the episodes' total reward. They also receive the `episode`. What
            they return for one without `is_usable` (aborted, or without a turn) is not used.
        train_dataset: Rows with a `prompt` column that holds task ids; by default the suite's `train` list.
        processing_class: The tokenizer; by default the model's.
        **kwargs: Passed to `GRPOTrainer` (`peft_config`, `callbacks`, `optimizers`, `quantization_config`, ...).
    """

    _tag_names = ["trl", "epo_trl", "grpo"]
    _name = "EPO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        suite: TaskSuite,
        args: EPOConfig | None = None,
        reward_funcs: Any = None,
        train_dataset: Dataset | None = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        args = args if args is not None else EPOConfig("epo-trl")
        check_arguments(kwargs)
        if train_dataset is None:
            train_dataset = Dataset.from_dict({"prompt": list(suite.task_ids("train"))})
        check_train_tasks(args, train_dataset, suite.name)
        eval_lists = {split: suite.task_ids(split) for split in TEST_SPLITS if split in suite.splits}
        self.eval_tasks = {split: list(ids)[: args.eval_episodes] for split, ids in eval_lists.items()}
        if args.eval_strategy != "no":
            check_test_tasks(self.eval_tasks, suite.name)
        self.suite = _in_workers(suite, args)
        if processing_class is None:
            path = model if isinstance(model, str) else model.config._name_or_path
            processing_class = load_tokenizer(path)
        check_tokenizer(processing_class)
        check_reference(args, model, kwargs.get("peft_config"))
        warn_of_divisor(args)
        check_sampling(args)
        self.context = ContextBuilder(
            processing_class,
            PromptTemplate.load(args.prompt_template),
            mode=args.context,
            history_length=args.history_length,
            max_prompt_tokens=args.max_prompt_length,
            max_response_tokens=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs or {},
        )
        warn_of_empty_thought(args, self.context)
        self.rollout_settings = RolloutSettings(
            max_turns=args.max_turns,
            success_reward=args.success_reward,
            invalid_action_penalty=args.invalid_action_penalty,
            env_reward_weight=args.env_reward_weight,
            invalid_action=args.invalid_action,
            require_think=args.require_think,
        )
        self.protocol = get_protocol(args.protocol) if args.protocol else _protocol_of(args, suite)
        self.eval_context = protocol_context(
            self.protocol,
            processing_class,
            args.prompt_template,
            max_prompt_tokens=args.max_prompt_length,
            max_response_tokens=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs,
        )
        self._envs: list[TextEnv] = [self.suite.make_env()]
        check_first_task(self._envs[0], train_dataset[0]["prompt"], args.seed, self.context, self.protocol)

        with warnings.catch_warnings():
            # Our seam; its name and behaviour are checked by tests/test_trl_contract.py.
            warnings.filterwarnings("ignore", message=".*'rollout_func', which is an experimental feature")
            super().__init__(
                model=model,
                reward_funcs=reward_funcs if reward_funcs is not None else episode_return,
                args=args,
                train_dataset=train_dataset,
                eval_dataset={s: Dataset.from_dict({"prompt": ids}) for s, ids in self.eval_tasks.items()} or None,
                processing_class=processing_class,
                rollout_func=self._rollout,
                **kwargs,
            )
        use_short_progress(self)
        for context in (self.context, self.eval_context):
            context.max_context_tokens = check_context_fits(args, self.model.config)
            context.end_ids = self.eos_token_ids
        self.entropy_history = EntropyHistory(per=args.entropy_history, window=args.entropy_history_window)
        self.rl_step = 0
        self._meter = self._new_meter()
        self._packing_unchecked = args.pack_turns
        self._layout: TurnLayout | None = None
        self._entropies: Tensor | None = None
        self._scored: list[tuple[Tensor, Tensor | None]] = []  # (log-probs, entropies) of passes outside of the update
        self._episodes: list[Episode] = []
        self._printed = self._episodes
        self.last_reports: list[EvalReport] = []
        self._equal_rewards, self._empty_batches = Stretch(PATIENCE), Stretch(1)

    # --- Rollout -----------------------------------------------------------------------------------------------

    def _rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: one episode per task id, each as one row."""
        times, faults = RolloutTimes(), self.suite.faults()
        # One seed for all: the members of a group, wherever they are played, start from the identical state.
        tasks = [(task_id, self.args.seed) for task_id in prompts]
        self._episodes = self.play(tasks, description="rollout", times=times)
        rows = [episode_to_row(episode, self._tokenizer.eos_token_id) for episode in self._episodes]
        self._layout = TurnLayout(
            self._pad_rows([row.turn_ids for row in rows], -1),
            self._pad_rows([row.env_mask for row in rows], 0),
            windowed=self._windowed,
        )
        self._stop_if_too_many_aborted(self._log_rollout(times, self.suite.faults() - faults)["env/aborted"])
        has_logprobs = any(row.logprobs is not None for row in rows)
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "logprobs": [row.logprobs or [0.0] * len(row.completion_ids) for row in rows] if has_logprobs else None,
            "episode_return": [e.total_reward for e in self._episodes],
            "episode": list(self._episodes),
        }

    def play(
        self,
        tasks: Sequence[tuple[str, int]],
        *,
        context: ContextBuilder | None = None,
        settings: RolloutSettings | None = None,
        description: str = "episodes",
        times: RolloutTimes | None = None,
    ) -> list[Episode]:
        """Returns one episode per `(task_id, seed)`, played by the current policy. Collective: every rank calls it.

        `context` and `settings` are those of training unless given.
        """
        while len(self._envs) < len(tasks):
            self._envs.append(self.suite.make_env())
        context = context or self.context
        hidden = self.args.disable_tqdm or not self.accelerator.is_main_process
        with (
            tqdm(total=len(tasks), desc=description, unit="episode", leave=False, disable=hidden) as bar,
            self._keeping_prefixes(context),
        ):
            return play_episodes(
                self._envs,
                tasks,
                self._respond,
                context,
                settings or self.rollout_settings,
                prompts_needed=self._prompts_needed,
                on_finished=bar.update,
                times=times,
                waves=self.args.rollout_waves,
            )

    def _respond(self, prompt_ids: list[list[int]]) -> Any:
        """Returns a response to each prompt, in the mode that is on: continuous batching leaves another on."""
        training = self.model.training
        responses = self._generate_single_turn(prompt_ids, None, {}, 1)
        if self.model.training != training:
            self.model.train(training)
        return responses

    def _keeping_prefixes(self, context: ContextBuilder) -> AbstractContextManager[Any]:
        """Lets generation go on from the turn before, as far as the backend does not do that by itself."""
        if self.use_vllm:
            sleeps = self.vllm_mode == "colocate" and self.vllm_generation.enable_sleep_mode  # a server never does
            return self._keeping_vllm_awake() if sleeps else nullcontext()
        model = self.accelerator.unwrap_model(self.model_wrapped)
        if context.mode != "concatenated" or self.use_transformers_continuous_batching:
            return nullcontext()
        if can_reuse(model) and settings_allow_reuse(model, self.generation_config):
            return reusing_prefixes(model, self.args.rollout_waves)
        return nullcontext()

    @contextmanager
    def _keeping_vllm_awake(self) -> Iterator[None]:
        """Lets a colocated vLLM sleep between rollouts only.

        TRL sends it to sleep after every generation call. It forgets its weights and its prefix cache then, and TRL
        sends the weights again at the next call: once a turn.
        """
        vllm = self.vllm_generation
        if vllm._llm_weights_sleeping or self._last_loaded_step != self.state.global_step:
            vllm.sync_weights()  # wakes them too
            self._last_loaded_step = self.state.global_step
        vllm.llm.wake_up(tags=["kv_cache"])
        vllm.enable_sleep_mode = False
        try:
            yield
        finally:
            vllm.enable_sleep_mode = True
            vllm.llm.sleep(level=2)
            vllm._llm_weights_sleeping = True

    def _stop_if_too_many_aborted(self, share: float) -> None:
        """Saves a checkpoint and raises, on all ranks, if more of the batch was aborted than the limit allows."""
        if share <= self.args.max_aborted_share:
            return
        errors = gather_object(first_errors(self._episodes, self.accelerator.process_index))
        checkpoint = None
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._save_checkpoint(self.model, trial=None)
            checkpoint = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        raise too_many_aborted(share, self.args.max_aborted_share, errors, checkpoint)

    def close_envs(self) -> None:
        """Frees what the environments hold, processes of theirs too. A later rollout makes new ones."""
        while self._envs:
            self._envs.pop().close()

    def _prompts_needed(self, running: int) -> int:
        """Generation is collective, so all ranks go on until the last episode of any rank has ended."""
        if self.accelerator.num_processes == 1:
            return running
        counts = self.accelerator.gather(torch.tensor([running], device=self.accelerator.device)).tolist()
        if not any(counts):
            return 0
        # A vLLM server slices one list by rank, so every rank sends equally many.
        return max(counts) if self.use_vllm else max(running, 1)

    def _pad_rows(self, rows: list[list[int]], value: int) -> Tensor:
        return pad(
            [torch.tensor(row) for row in rows],
            padding_value=value,
            padding_side="right",
            pad_to_multiple_of=self.pad_to_multiple_of,
        ).to(self.accelerator.device)

    # --- Batch -------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the rewards of all ranks, NaN for episodes without a signal: TRL leaves those out of baselines."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        usable = torch.tensor([episode.is_usable for episode in self._episodes], device=rewards.device)
        rewards[~self.accelerator.gather(usable)] = torch.nan
        if self.model.training:
            self._warn_of_equal_rewards(rewards)
        return rewards

    def _warn_of_equal_rewards(self, rewards: Tensor) -> None:
        weighed = rewards[:, self.reward_weights.to(rewards.device) != 0]
        group, name = self._compared
        if self._equal_rewards.add(equal_within_groups(weighed, group)) and self.accelerator.is_main_process:
            success = self._metrics["train"]["env/success_rate"][-1]
            warnings.warn(equal_rewards_warning(self.rl_step, success, name), stacklevel=2)

    @property
    def _compared(self) -> tuple[int, str]:
        """Number of episodes whose rewards are compared with each other, and what they are called."""
        return self.num_generations, "every group"

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._scored = []
        output = super()._generate_and_score_completions(inputs)
        assert self._layout is not None
        turn_ids, response_mask = self._layout.turn_ids, self._layout.response_mask
        # Rows without a token in the loss (aborted, or cleared by `mask_truncated_completions`) do not count.
        usable = _response_mask(output).any(1).sum()
        output["turn_ids"] = turn_ids
        output["num_episodes"] = self.accelerator.reduce(usable.float(), reduction="sum")
        if self._empty_batches.add(not output["num_episodes"]) and self.accelerator.is_main_process:
            warnings.warn(empty_batch_warning(self.rl_step), stacklevel=2)
        output["advantages"] = self.assign_credit(
            CreditBatch(self._episodes, output["advantages"], turn_ids, response_mask)
        )
        self._measure_as_collected(output)
        return output

    def assign_credit(self, batch: CreditBatch) -> Tensor:
        """Returns (B, T) advantages. The hook for methods that tell turns or tokens apart."""
        return share_episode_advantage(batch)

    # --- Loss --------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert self._layout is not None and self._layout.turn_ids.shape == (len(input_ids), logits_to_keep)
        extra = {"output_router_logits": True} if compute_aux_loss else {}
        rows = batch_size or len(input_ids)
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        aux_losses: list[Tensor] = []
        for start in range(0, len(input_ids), rows):
            end = start + rows
            turns = cut_turns(input_ids[start:end], attention_mask[start:end], self._layout.rows(start, end))
            with self.accelerator.autocast():
                scores = self._score_turns(model, turns, **extra)
            logps.append(turns.to_rows(scores.log_probs))
            if scores.entropy is not None:
                entropies.append(turns.to_rows(scores.entropy))
            if compute_aux_loss and scores.aux_loss is not None:
                aux_losses.append(scores.aux_loss)
        log_probs, entropy = torch.cat(logps), torch.cat(entropies) if entropies else None
        if compute_entropy:
            self._entropies = entropy
        else:
            self._scored.append((log_probs, entropy))
        return (
            log_probs,
            entropy if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _score_turns(self, model: Any, turns: TurnBatch, **model_inputs: Any) -> TurnScores:
        """Returns what the model says about the turns. The hook for what else is to come from the same forward."""
        return score_turns(model, turns, **self._turn_passes, **model_inputs)

    @property
    def _turn_passes(self) -> dict[str, Any]:
        return {"buckets": self.args.turn_buckets, "packed": self.args.pack_turns}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns TRL's policy loss plus `-lambda * (L_H - beta_k * L_smooth)`, for one micro-batch.

        Scaled so that the sum over the micro-batches of an optimizer step, averaged over ranks, is the loss of the
        whole batch, however it is cut.
        """
        self._layout = TurnLayout(inputs["turn_ids"], inputs["tool_mask"] * (inputs["turn_ids"] >= 0), self._windowed)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        entropies, self._entropies = self._entropies, None
        assert entropies is not None
        bonus, penalty = self._entropy_terms(entropies, inputs)
        if self._step % self.args.micro_steps_per_rl_step < self.args.steps_per_generation and not _is_scored(inputs):
            self._measure(entropies, inputs, bonus, penalty)
        if self.args.epo_lambda:
            # The terms are parts of means over the collected batch; this is their share in one optimizer step.
            updates = self.args.steps_per_generation / self.current_gradient_accumulation_steps
            coef = self.args.epo_lambda * updates * self.accelerator.num_processes
            loss = loss - coef * (bonus - self.smoothing_beta * penalty)
        return spread_nonfinite(loss)

    def _entropy_terms(self, entropies: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns what these rows add to L_H and to L_smooth of the collected batch, all ranks together."""
        weights = turn_mean_weights(
            inputs["turn_ids"],
            _response_mask(inputs),
            num_trajectories=inputs["num_episodes"].clamp(min=1),
            dtype=entropies.dtype,
        )
        penalty = smoothing_penalty(
            entropies,
            self.entropy_history.reference(inputs["turn_ids"]),
            alpha=self.args.smoothing_alpha,
            kind=self.args.smoothing_penalty,
            **self._band,
        )
        return (weights * entropies).sum(), (weights * penalty).sum()

    @property
    def _band(self) -> dict[str, float]:
        return {"kappa_low": self.args.kappa_low, "kappa_high": self.args.kappa_high}

    def _measure(self, entropies: Tensor, inputs: dict[str, Any], bonus: Tensor, penalty: Tensor) -> None:
        """Feeds the statistics of the RL step. They are those of the policy that played, so no update comes before."""
        turn_ids, mask = inputs["turn_ids"], _response_mask(inputs)
        shares = band_shares(entropies.detach(), self.entropy_history.reference(turn_ids), mask, **self._band)
        self._meter.add(entropies, turn_ids, mask, shares=shares, bonus=bonus, penalty=penalty)

    def _measure_as_collected(self, batch: dict[str, Any]) -> None:
        """Measures the whole batch if several updates come from it: TRL then scores it with the policy that played."""
        if _is_scored(batch):
            entropies = next(e for logps, e in self._scored if logps is batch["old_per_token_logps"])
            assert entropies is not None
            self._measure(entropies, batch, *self._entropy_terms(entropies, batch))
        self._scored = []

    @property
    def smoothing_beta(self) -> float:
        """beta_k of Eq. 7 at the current RL step."""
        return beta_schedule(
            self.rl_step,
            self.args.total_rl_steps(max(self.state.max_steps, 1), len(self.train_dataset)),
            start=self.args.smoothing_beta_start,
            end=self.args.smoothing_beta_end,
            decay=self.args.smoothing_decay,
        )

    @property
    def _windowed(self) -> bool:
        return self.args.context == "windowed"

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs one forward-backward pass; after the last one of a collected batch the RL step is closed."""
        if self._packing_unchecked:  # before the first rollout, by the wrapped model: under ZeRO-3 no other has weights
            with self.accelerator.autocast():
                check_packing(model, self.model.config._attn_implementation)
            self._packing_unchecked = False
        output = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.micro_steps_per_rl_step == 0:
            self._close_rl_step()
        return output

    def _close_rl_step(self) -> None:
        """Appends this step's entropy to the history, equal on all ranks, and logs."""
        self._meter.reduce(lambda sums: self.accelerator.reduce(sums, reduction="sum"))
        means = self._meter.means()
        reference = self.entropy_history.reference() if self.entropy_history.per == "step" else None
        alpha, beta, coef = self.args.smoothing_alpha, self.smoothing_beta, self.args.epo_lambda
        metrics = {f"entropy/{part}": value for part, value in means.items() if part != "all"}
        bonus, penalty = self._meter.loss_terms()
        below, inside, above = self._meter.band_shares()
        metrics |= {
            "epo/beta": beta,
            "epo/net_coef_above_band": coef * (1 - alpha * beta),
            "epo/entropy_loss": bonus,
            "epo/smoothing_loss": penalty,
            "epo/share_below_band": below,
            "epo/share_inside_band": inside,
            "epo/share_above_band": above,
        }
        if isinstance(reference, float):
            metrics["epo/reference"] = reference
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        # A batch without a token, or with an entropy that is not finite, has no entry.
        if math.isfinite(means.get("all", math.nan)):
            per_step = self.entropy_history.per == "step"
            self.entropy_history.append(means["all"] if per_step else self._meter.turn_means())
        self.rl_step += 1
        self._meter = self._new_meter()

    def _new_meter(self) -> EntropyMeter:
        return EntropyMeter(self.args.max_turns, self.accelerator.device)

    # --- Evaluation --------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Plays the whole fixed test lists and returns (and logs) the metrics; `last_reports` holds the details.

        The sampling has its own seed and does not touch the random state of training. The reports are kept under
        `output_dir/evaluations`.

        Args:
            eval_dataset: None; the lists are the suite's.
            ignore_keys: As for TRL.
            metric_key_prefix: In front of the metrics.
        """
        check_arguments({"eval_dataset": eval_dataset})
        check_test_tasks(self.eval_tasks, self.suite.name)
        training = self.model.training
        self.model.eval()
        reports = [self.evaluate_split(split) for split in self.eval_tasks]
        self.last_reports = reports
        metrics: dict[str, float] = {}
        for report in reports:
            metrics |= {f"{metric_key_prefix}_{report.split}/{k}": v for k, v in report.scalars().items()}
        if self.accelerator.is_main_process:
            folder = os.path.join(self.args.output_dir, REPORTS)
            os.makedirs(folder, exist_ok=True)
            write_state(
                os.path.join(folder, f"step_{self.state.global_step:06d}.json"),
                {"step": self.state.global_step, "reports": [report.to_dict() for report in reports]},
            )
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.model.train(training)
        return metrics

    def evaluate_split(self, split: str) -> EvalReport:
        """Returns the report of one list. Collective; the list is spread over the ranks."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        tasks = [(task_id, self.args.seed) for task_id in self.eval_tasks[split]]
        size = self.args.per_device_eval_batch_size
        rounds = -(-len(tasks) // (size * world))
        local = tasks[rank::world]
        times = RolloutTimes()
        episodes: list[Episode] = []
        settings = protocol_settings(self.protocol, require_think=self.args.require_think)
        with self._sampling(self.protocol.temperature, self.args.eval_seed + rank):
            for i in range(rounds):
                chunk = local[i * size : (i + 1) * size]
                name = f"{split} {i + 1}/{rounds}" if rounds > 1 else split
                episodes += self.play(
                    chunk,
                    context=self.eval_context,
                    settings=settings,
                    description=f"evaluate {name}",
                    times=times,
                )
        if world > 1:
            episodes = gather_object([episode.without_tokens() for episode in episodes])
        return EvalReport.from_episodes(
            episodes,
            protocol=self.protocol,
            suite=self.suite.name,
            split=split,
            seconds=times.generate + times.env + times.text,
        )

    @contextmanager
    def _sampling(self, temperature: float, seed: int) -> Iterator[None]:
        """Samples at another temperature, greedily at 0, and from a random stream of its own."""
        holder: Any = self.vllm_generation if self.use_vllm else self.generation_config
        changes = {"temperature": temperature} if self.use_vllm else decoding(temperature)
        # Plain generation reads them from here too; with vLLM there is no such dictionary.
        kwargs: dict[str, Any] = {} if self.use_vllm else self.generation_kwargs
        before, kwargs_before = {name: getattr(holder, name) for name in changes}, dict(kwargs)
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            try:
                vars(holder).update(changes)
                kwargs.update(changes)
                yield
            finally:
                vars(holder).update(before)
                kwargs.update(kwargs_before)

    # --- Watching ----------------------------------------------------------------------------------------------

    def _log_rollout(self, times: RolloutTimes, faults: Faults) -> dict[str, float]:
        """Collects the rollout's metrics over all ranks, and returns them."""
        episodes = self._episodes
        turns = sum(len(e.turns) for e in episodes)
        local = {
            "episodes": len(episodes),
            "usable": sum(e.is_usable for e in episodes),
            "won": sum(e.won for e in episodes),
            "return": sum(e.total_reward for e in episodes if e.is_usable),
            "turns": turns,
            "invalid": sum(e.invalid_actions for e in episodes),
            "dropped": sum(t.dropped_turns > 0 for e in episodes for t in e.turns),
            "cut": sum(t.response_ids[-1] not in self.eos_token_ids for e in episodes for t in e.turns),
            **{f"stop/{reason}": sum(e.stop is reason for e in episodes) for reason in StopReason},
            **asdict(faults),
        }
        sums = torch.tensor(list(local.values()), dtype=torch.float64, device=self.accelerator.device)
        total = dict(zip(local, self.accelerator.reduce(sums, reduction="sum").tolist(), strict=True))
        usable, all_turns = max(total["usable"], 1), max(total["turns"], 1)
        metrics = {
            "env/success_rate": total["won"] / usable,
            "env/return": total["return"] / usable,
            "env/turns": total["turns"] / usable,
            "env/invalid_actions": total["invalid"] / all_turns,
            "env/aborted": 1 - total["usable"] / total["episodes"],
            **{f"env/{name}": total[name] for name in asdict(faults)},
            "rollout/shortened_prompts": total["dropped"] / all_turns,
            "rollout/cut_responses": total["cut"] / all_turns,
            "time/generate": times.generate,
            "time/env": times.env,
            "time/text": times.text,
            **{name: total[name] / total["episodes"] for name in total if name.startswith("stop/")},
        }
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as TRL does; with `print_episodes`, also shows sample episodes."""
        if self.model.training and self._metrics["train"].get("step_time"):
            step_times = self._metrics["train"]["step_time"]
            updates = max(len(self._metrics["train"].get("time/generate", [])), 1)
            rollout = sum(sum(self._metrics["train"].get(f"time/{part}", [])) for part in ("generate", "env", "text"))
            # TRL's step time covers everything between two optimizer steps, the rollout among it.
            self._metrics["train"]["time/update"] = [max(0.0, sum(step_times) - rollout) / updates]
        super().log(logs, start_time)
        watched = self.args.print_episodes and self.model.training and self.accelerator.is_main_process
        if watched and self._episodes is not self._printed:  # the end of training logs once more
            self._printed = self._episodes
            print_episodes(self._episodes[: self.args.print_episodes], step=self.state.global_step)

    # --- The model card -----------------------------------------------------------------------------------------

    _method = GRPO

    def card_facts(self) -> CardFacts:
        """Returns what the model card has to say."""
        args, protocol = self.args, self.protocol
        episodes = f"{args.generation_batch_size} episodes an RL step, {self.num_generations} of each task"
        return CardFacts(
            method=f"{self._method} and {EPO}, weight {args.epo_lambda:g}" if args.epo_lambda else self._method,
            suite=self.suite.suite if isinstance(self.suite, PooledSuite) else self.suite,
            rows={"training": f"{episodes}, up to {args.max_turns} turns", "evaluation": protocol_row(protocol)},
            rules=PlayRules(
                template=args.prompt_template,
                context=protocol.context,
                history_length=protocol.history_length,
                max_turns=protocol.max_turns,
                max_prompt_length=args.max_prompt_length,
                max_completion_length=args.max_completion_length,
                temperature=protocol.temperature,
                require_think=args.require_think,
            ),
        )

    # --- What belongs to a checkpoint ---------------------------------------------------------------------------

    def _run_state(self) -> dict[str, Any]:
        own = {"rl_step": self.rl_step, "entropy_history": self.entropy_history.state_dict()}
        return {**super()._run_state(), **own}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        super()._load_run_state(state)
        self.rl_step = state["rl_step"]
        self.entropy_history.load_state_dict(state["entropy_history"])

    def _batch_state(self) -> dict[str, Any]:
        return {**super()._batch_state(), "entropies": self._meter.state_dict()}

    def _load_batch_state(self, state: dict[str, Any]) -> None:
        super()._load_batch_state(state)
        self._meter.load_state_dict(state["entropies"])
