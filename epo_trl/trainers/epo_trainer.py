"""Multi-turn training as a subclass of TRL's GRPOTrainer.

TRL samples and groups the tasks and provides the clipped surrogate and its variants, KL, the reference model, gradient
accumulation, distribution and logging. This class overrides its methods, nearly all around `super()`. `RLStep` takes a
batch of episodes from their collection to the loss, with the methods named in the configuration (`epo_trl.methods`).
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from trl import GRPOTrainer

from epo_trl.devices import return_freed_memory
from epo_trl.envs.base import TaskSuite
from epo_trl.envs.border import close_all
from epo_trl.errors import InputError, differences, spelled
from epo_trl.evaluation import EvalReport
from epo_trl.evaluation.samples import print_episodes
from epo_trl.methods import Batch, Comm, MicroBatch, TokenScores
from epo_trl.models.critic import causal_lm
from epo_trl.models.families import freeze_unread, settle_experts, turn_off_noise
from epo_trl.rollout import ContextBuilder, RolloutSettings, RolloutTimes, play_episodes
from epo_trl.runs.callbacks import use_short_progress
from epo_trl.runs.files import step_of
from epo_trl.runs.guards import TooManyAborted, UpdateGuard, check_skipped, first_errors, spread_nonfinite
from epo_trl.runs.long_run import LongRun
from epo_trl.runs.run_settings import content_digest, model_digest
from epo_trl.scoring.reference import reference_model
from epo_trl.scoring.row_scorer import RowScorer
from epo_trl.trainers.ahead import RolloutAhead
from epo_trl.trainers.collection import Collected, Collector, episode_return
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.engines import make_engine, starting
from epo_trl.trainers.evaluator import Evaluator
from epo_trl.trainers.model_card import OwnModelCard
from epo_trl.trainers.monitoring.episode_samples import EpisodeSamples
from epo_trl.trainers.monitoring.run_health import RunHealth, Streak
from epo_trl.trainers.setup import check_context_fits, divide, keeping_reference, set_up
from epo_trl.trainers.step import Part, RLStep
from epo_trl.trainers.support import check_arguments, check_policy
from epo_trl.types import Episode

# Files of a checkpoint, equal on all ranks.
METHODS, REFERENCE = "methods.pt", "reference_weights.pt"
# Fields that decide which forward-backward passes make an RL step.
PASSES = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")


class EPOTrainer(OwnModelCard, LongRun, GRPOTrainer):
    """Trains a language model on text environments, by default with GRPO and the terms of EPO (arXiv 2509.22576).

    Args:
        model: A model, a Hub id or a local path.
        suite: The tasks and their environments.
        args: Configuration of the trainer.
        reward_funcs: TRL reward functions; defaults to the episodes' total reward. They also receive the `episode`.
            Their values for episodes without `is_usable` (aborted, or without a turn) are ignored.
        train_dataset: Rows with a `prompt` column of task ids; defaults to the suite's `train` list.
        processing_class: The tokenizer; defaults to the model's.
        **kwargs: Passed to `GRPOTrainer` (`peft_config`, `callbacks`, `optimizers`, `quantization_config`, ...).

    Attributes:
        rl_step: Number of completed RL steps.
        step: The batch collected last.
        update_seconds: Duration of the RL step in progress, without its rollout.
        last_reports: Those of the last evaluation, with the details.
    """

    card_tags = ("trl", "epo_trl", "grpo")
    args: EPOConfig
    step: RLStep
    has_critic = False

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
        setup = set_up(model, suite, args, train_dataset, processing_class, reward_funcs, kwargs, self.has_critic)
        self.suite, self.rules, self.methods, self.envs = setup.suite, setup.rules, setup.methods, setup.envs

        test_lists = {name: Dataset.from_dict({"prompt": tasks}) for name, tasks in setup.test_tasks.items()}
        with starting(args), keeping_reference(self, args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs if reward_funcs is not None else episode_return,
                args=args,
                train_dataset=setup.train_dataset,
                eval_dataset=test_lists or None,
                processing_class=setup.tokenizer,
                **kwargs,
            )
        noisy = filter(None, (self.model, self.ref_model)) if args.disable_dropout else ()
        self.without_noise = [changed for one in noisy for changed in turn_off_noise(one)]
        check_policy(self.model, vllm=args.use_vllm)
        freeze_unread(causal_lm(self.model), quiet=args.process_index != 0)
        self.aux_loss_enabled &= settle_experts(self.model.config)
        use_short_progress(self)
        self.rules.set_model_limits(check_context_fits(args, self.rules.context, self.model.config), self.eos_token_ids)

        accelerator, group_size = self.accelerator, self.num_generations
        self.ranks = ranks = Comm(
            sum=lambda tensor: accelerator.reduce(tensor.to(accelerator.device), reduction="sum").to(tensor.device),
            gather=gather_object,
            index=accelerator.process_index,
            count=accelerator.num_processes,
        )
        self.rollout_func = lambda prompts, trainer: trainer.step.to_rollout_output()
        self.engine = make_engine(self)
        self.collector = Collector(
            self.suite, self.methods, ranks, setup.train_dataset["prompt"], args, group_size, self.eos_token_ids
        )
        passes = divide(args, self.model, accelerator)
        self.scorer = RowScorer(accelerator.autocast, *passes, args.per_device_train_batch_size, self.methods)
        self.evaluator = Evaluator(self.engine, self.rules, setup.test_tasks, suite.name, args, ranks)
        self.samples = EpisodeSamples(args, self.processing_class, ranks, group_size)
        self.health = RunHealth(ranks)
        self.ahead = RolloutAhead(self) if args.rollout_ahead else None
        self.last_episodes: list[Episode] = []
        self.last_reports: list[EvalReport] = []
        self._to_print: list[Episode] = []
        self._aborts = Streak(1)  # RL steps with aborted episodes
        self.rl_step, self.update_seconds = 0, 0.0
        self._guard = UpdateGuard(args.max_skipped_updates, args.output_dir)
        self._passed_at = -1  # number of optimizer steps before the last forward-backward pass

    def create_accelerator_and_postprocess(self) -> None:
        """Keeps what the model returns in its precision under FSDP2, before the models are sharded.

        By accelerate's policy for bf16, FSDP2 would round log-probabilities, entropies and values of the critic, which
        are computed in float32.
        """
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)

    # --- Rollout -----------------------------------------------------------------------------------------------

    def play(
        self,
        tasks: Sequence[tuple[str, int]],
        *,
        context: ContextBuilder | None = None,
        settings: RolloutSettings | None = None,
        description: str = "episodes",
        times: RolloutTimes | None = None,
    ) -> list[Episode]:
        """Plays one episode per `(task_id, seed)` with the current policy. Collective: every rank must call it.

        `context` and `settings` default to those of training. Override this method to customize the rollout.
        """
        if self.ahead:
            self.ahead.wait()
        args, context, settings = self.args, context or self.rules.context, settings or self.rules.settings
        batch = max(args.per_device_train_batch_size * args.steps_per_generation, args.per_device_eval_batch_size)
        count = len(tasks) if self.engine.in_step else min(len(tasks), batch)
        while len(self.envs) < count:
            self.envs.append(self.suite.make_env())
        # `disable: False` would override TQDM_DISABLE.
        hidden = {"disable": True} if args.disable_tqdm or args.process_index else {}
        with (
            tqdm(total=len(tasks), desc=description, unit="episode", leave=False, **hidden) as bar,
            self.engine.rollout(context, count),
        ):
            return play_episodes(
                self.envs[:count], tasks, self.engine, context, settings, on_finished=bar.update, times=times
            )

    def close_envs(self) -> None:
        """Releases the environments and their processes. A later rollout creates new ones."""
        close_all(self.envs)

    def _collect(self, tasks: Sequence[str]) -> Collected:
        """Plays a batch, stops the run if too many episodes were aborted, and logs the metrics of the batch."""
        start = time.perf_counter()
        played = self.ahead.take(tasks) if self.ahead else None
        batch, metrics = self.collector.collect(tasks, self.play, self.rl_step, played)
        waited = time.perf_counter() - start
        parts = (metrics[f"time/{part}"] for part in ("generate", "env", "text"))
        self.update_seconds -= waited if self.ahead else sum(parts)  # in the background only the wait takes time
        return_freed_memory(self.accelerator.device)
        self._check_aborts(metrics["env/aborted"], batch.played)
        self._keep_metrics(metrics)
        self.health.add_rollout(metrics)
        self.last_episodes, self._to_print = batch.episodes, batch.played[: self.args.print_episodes]
        if self.ahead:
            self._keep_metrics(self.ahead.start_next(waited))
        return batch

    def _check_aborts(self, share: float, episodes: Sequence[Episode]) -> None:
        """Warns of aborted episodes; saves a checkpoint and stops if their share is above the limit. Collective."""
        limit = self.args.max_aborted_share
        if not self._aborts.add(share > 0) and share <= limit:
            return
        errors = self.ranks.gather(first_errors(episodes, self.ranks.index))
        if share > limit:
            saved = "nothing was saved inside an optimizer step"
            if self._passed_at != self.state.global_step:
                saved = f"the state before it is in {self.save_checkpoint()}"
            lines = "".join(f"\n  {error}" for error in errors)
            raise TooManyAborted(
                f"max_aborted_share: {share:.0%} of the episodes of this batch were aborted, {limit:.0%} are allowed; "
                f"the batch was not trained on, and {saved}. The first errors:{lines}"
            )
        if self.ranks.index == 0:
            message = (
                f"{share:.0%} of the episodes of this batch were aborted; they are excluded from training and from "
                f"rates (see env/aborted). The first error: {errors[0]}"
            )
            warnings.warn(spelled(message), stacklevel=2)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def tasks_of_rl_steps(self) -> Iterator[list[str]]:
        """Yields this rank's tasks of each RL step of a run, in TRL's order, without an end."""
        sampler, args = super()._get_train_sampler(), self.args
        size = args.per_device_train_batch_size * args.steps_per_generation
        first, prompts = args.process_index * size, self.train_dataset["prompt"][:]
        while True:
            order = list(sampler)
            for start in range(first, len(order), args.generation_batch_size * args.micro_steps_per_rl_step):
                yield [prompts[i] for i in order[start : start + size]]

    # --- Batch -------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        collected = self._collect([row["prompt"] for row in inputs])
        self.step = step = RLStep.lay_out(
            collected.episodes,
            self.rules.context,
            self.num_generations,
            self.ranks,
            placeholder_id=self.processing_class.eos_token_id,
            multiple=self.pad_to_multiple_of,
        )
        inputs = [{**row, "prompt": task} for row, task in zip(inputs, collected.tasks, strict=True)]
        output = super()._generate_and_score_completions(inputs)
        batch = self._method_batch(step, output)
        advantages = self._advantages(step, batch)
        assert step.num_episodes is not None
        self.health.add_credit(step.num_episodes, advantages, self.rl_step)
        self.samples.begin(step.episodes, self.rl_step, self.total_rl_steps)
        output["advantages"] = step.modify(self.methods, advantages, batch)
        return {**output, "row": torch.arange(len(step.rows))}

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:
        """Returns the rewards of all ranks, NaN for episodes without a signal."""
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        return self.step.compare(rewards, self.reward_weights, self.multi_objective_aggregation)

    def _method_batch(self, step: RLStep, inputs: dict[str, Any]) -> Batch:
        """Returns what the methods assign advantages to. Subclasses add further scores."""
        reference = partial(reference_model, self.model, self.ref_model)
        return step.batch(inputs, self.methods, self.scorer, self.model, reference, self.rl_step, self.total_rl_steps)

    def _advantages(self, step: RLStep, batch: Batch) -> Tensor:
        """Returns the credit's (B, T) advantages. Subclasses add further targets to `step` here."""
        return self.methods.credit(batch).advantages

    # --- Loss --------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns TRL's policy loss plus the methods' terms, for one micro-batch.

        The loss is scaled so that its sum over the micro-batches of an optimizer step, averaged over ranks, is the loss
        of the whole batch, however the batch is split.
        """
        step = self.step
        part = step.part(inputs, self.args, self.current_gradient_accumulation_steps)
        scores, aux_loss = self.scorer.score(
            model,
            part.input_ids,
            part.layout,
            annotations=part.annotations,
            with_values=part.targets is not None,
            with_aux_loss=self.aux_loss_enabled,
        )
        # TRL's policy loss is linear in the advantages and in beta, the weight of its KL. The factor must not reach its
        # entropy bonus and router loss, which are means over tokens.
        self.beta = self.args.beta and part.row_factor * self.args.beta
        weighted = {**inputs, "advantages": part.row_factor * inputs["advantages"]}
        logps = self.methods.ratio(scores.logps, part.old_logps(scores.logps), part.turn_ids, part.mask)
        scored = Scored(logps, scores.entropy, aux_loss)
        loss = super().compute_loss(scored, weighted, return_outputs, num_items_in_batch)
        micro = self._micro_batch(part, scores)
        if step.micro_batches_done < self.args.steps_per_generation:  # the first pass over these rows
            observed = micro if part.behaviour is None else self._micro_batch(part, part.behaviour)
            self.methods.observe(observed)
            self.samples.add_entropy(part.rows, part.layout.sampled, observed.entropy)
        step.micro_batches_done += 1
        for term in self._terms(part, micro, scores):
            loss = loss + term.to(loss.dtype)
        return spread_nonfinite(loss)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the log-probabilities of a model, or the scores that `compute_loss` has passed in its place."""
        if isinstance(model, Scored):
            return model
        scores, _ = self.scorer.score(model, input_ids, self.step.layout)
        self.step.scored.append(scores)
        return scores.logps, None, None

    def _micro_batch(self, part: Part, scores: TokenScores) -> MicroBatch:
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = autocast.get(self.accelerator.mixed_precision, self.model.dtype)
        return MicroBatch(
            logps=scores.logps,
            entropy=scores.entropy,
            old_logps=part.old_logps(scores.logps),
            advantages=part.inputs["advantages"],
            turn_ids=part.turn_ids,
            mask=part.mask,
            num_episodes=part.num_episodes,
            policy_mean=lambda values: (part.token_weights * values).sum() / part.update_factor,
            rl_step=self.rl_step,
            total_rl_steps=self.total_rl_steps,
            statistics=scores.statistics,
            compute_dtype=dtype,
        )

    def _terms(self, part: Part, micro: MicroBatch, scores: TokenScores) -> Iterator[Tensor]:
        """Yields the terms added to the policy loss. Subclasses add further terms here."""
        term = self.methods.loss(micro, part.annotations)
        if term is not None:
            yield part.update_factor * term  # the methods' terms are parts of means over the batch

    # --- RL steps ----------------------------------------------------------------------------------------------

    @property
    def total_rl_steps(self) -> int:
        """Number of RL steps in the whole run: K of EPO's Eq. 7."""
        return self.args.total_rl_steps(max(self.state.max_steps, 1), len(self.train_dataset))

    @property
    def micro_steps_done(self) -> int:
        """Number of forward-backward passes made on the collected batch; 0 at the start of an RL step."""
        return self._step % self.args.micro_steps_per_rl_step

    @property
    def pending_metrics(self) -> dict[str, list[float]]:
        """Metrics whose means TRL logs at the next logging step, for the model's current mode."""
        return self._metrics["train" if self.model.training else "eval"]

    def _keep_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.pending_metrics[name].append(value)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as `LongRun.train` does."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.ahead:
                self.ahead.stop()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs one forward-backward pass. After the last pass on a collected batch, it closes the RL step."""
        start = time.perf_counter()
        output = super().training_step(model, inputs, num_items_in_batch)
        self.update_seconds += time.perf_counter() - start
        self._guard.losses.append(output.detach())
        self._passed_at = self.state.global_step
        if not self.micro_steps_done:
            self._close_rl_step()
        return output

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Returns the norm of the gradient. A non-finite gradient is not used for an update."""
        norm = super()._get_grad_norm(model, grad_norm)
        finite = math.isfinite(norm)
        if not finite and self.is_deepspeed_enabled:
            check_skipped(float(norm), lambda: self.accelerator.optimizer_step_was_skipped)
        elif not finite and self.accelerator.scaler is None:  # a scaler skips the update itself and needs the gradients
            model.zero_grad(set_to_none=True)
        rank = self.accelerator.process_index
        self._guard.end_update(float(norm), self.state.global_step, rank, self._batch_state)
        self.pending_metrics["guard/skipped_updates"] = [self._guard.skipped]
        return norm

    def _close_rl_step(self) -> None:
        metrics = self.methods.end_rl_step(self.ranks, self.rl_step, self.total_rl_steps)
        seconds = {"time/update": max(0.0, self.update_seconds)}
        self.update_seconds = 0.0
        self._keep_metrics(metrics | seconds | self.health.end_rl_step(metrics, self.rl_step))
        self.samples.end()
        self.rl_step += 1

    # --- Checkpoints -------------------------------------------------------------------------------------------

    def settings_of_data(self) -> dict[str, Any]:
        """Returns the tasks, environment settings, rewards, method settings, and checksums of the prompts' texts.

        With `load_best_model_at_end`, also what decides which evaluation is the best.
        """
        args = self.args
        best_by = {"metric": args.metric_for_best_model, "greater_is_better": args.greater_is_better}
        return {
            **({"best_by": best_by | self.evaluator.settings()} if args.load_best_model_at_end else {}),
            "methods": self.methods.settings(),
            "template": self.rules.context.template.checksums(),
            "examples": self.rules.protocol.few_shot,
            "reward_funcs": self.reward_func_names,
            "suite": self.suite.name,
            "environment": dict(self.suite.settings),
            "train_tasks": model_digest(self.train_dataset["prompt"][:], "tasks"),
            "task_contents": content_digest(self.suite.content("train")),
        }

    def _run_state(self) -> dict[str, Any]:
        return {
            **super()._run_state(),
            "micro_step": self._step,
            "rl_step": self.rl_step,
            "skipped_updates": self._guard.skipped,
            "pending_metrics": {name: [*map(float, values)] for name, values in self._metrics["train"].items()},
            "health": self.health.state_dict(),
        }

    def _load_run_state(self, state: dict[str, Any], folder: str) -> None:
        """Restores the run, and the batch in use. With other settings, the rest of the RL step plays a new batch."""
        self._guard.skipped, self.rl_step = state["skipped_updates"], state["rl_step"]
        self._step = self._passes_before(state["micro_step"], state["settings"])
        self._metrics["train"].update(state["pending_metrics"])
        self.health.load_state_dict(state["health"])
        self.methods.load_state_dict(self._load_tensors(os.path.join(folder, METHODS)) or {})
        if self.args.sync_ref_model and (weights := self._load_tensors(os.path.join(folder, REFERENCE))):
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(weights)
        if self.micro_steps_done and not differences(state["settings"], self._settings):
            batch = self._load_tensors(self._batch_file(folder))
            assert batch is not None
            self._buffered_inputs, self.update_seconds = batch["inputs"], batch["update_seconds"]
            self.step = RLStep.from_state(batch["step"], self.num_generations, self.ranks)
            self.methods.load_batch_state(batch["methods"])
            self.samples.load_state(batch["samples"])

    def _passes_before(self, saved_passes: int, saved: Mapping[str, Any]) -> int:
        """Returns the number of passes that this run would have made up to a checkpoint with these passes and settings.

        Raises:
            InputError: If RL steps are divided in another way, and the checkpoint is inside one with either division.
        """
        args = self.args
        changed = [name for name in PASSES if saved[name] != getattr(args, name)]
        passes = self.rl_step * args.micro_steps_per_rl_step
        was_inside = saved_passes % (saved["steps_per_generation"] * saved["num_iterations"])
        if changed and (was_inside or passes != args.micro_steps(self.state.global_step, len(self.train_dataset))):
            now, then = ({name: settings[name] for name in changed} for settings in (vars(args), saved))
            raise InputError(
                f"{changed[0]}: expected {then} as in the checkpoint, got {now}: another division of RL steps needs a "
                "checkpoint at the end of one, and the same number of optimizer steps in each"
            )
        return passes if changed else saved_passes

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Restores the trainer's state and advances the order of the tasks to its position.

        Every epoch draws a new order from one generator, which would restart in a resumed run.
        """
        epochs, steps = super()._init_training_state(*args, **kwargs)
        for _ in range(epochs):
            next(iter(self._train_sampler))
        return epochs, steps

    def _save_rank_state(self, folder: str) -> None:
        if self.micro_steps_done:
            torch.save(self._batch_state(), self._batch_file(folder))
        if not self.args.should_save:
            return
        tensors = {METHODS: self.methods.state_dict()}
        if self.args.sync_ref_model:
            tensors[REFERENCE] = self.accelerator.unwrap_model(self.ref_model).state_dict()
        for name, state in tensors.items():
            if state:
                torch.save(state, os.path.join(folder, name))

    def _batch_file(self, folder: str) -> str:
        return os.path.join(folder, f"collected_batch_{self.accelerator.process_index}.pt")

    def _batch_state(self) -> dict[str, Any]:
        """Returns the batch in use: TRL's tensors, and what ours needs of it, as plain containers of tensors."""
        return {
            "inputs": self._buffered_inputs,
            "update_seconds": self.update_seconds,
            "step": self.step.state_dict(),
            "methods": self.methods.batch_state(),
            "samples": self.samples.state(),
        }

    def _load_best_model(self) -> None:
        """Loads the weights of the best evaluation, and sends them to vLLM before the next generation."""
        super()._load_best_model()
        if os.path.isdir(best := str(self.state.best_model_checkpoint)):  # otherwise the last weights stay
            self.best_step = step_of(best)
        self.engine.weights_changed()

    # --- Evaluation and logs -----------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates on the fixed test lists and returns the metrics, as `<metric_key_prefix>_<list>/<name>`.

        Logs them unless the best weights were loaded. The other arguments are those of TRL, and have no effect.
        """
        check_arguments({"eval_dataset": eval_dataset})
        if self.ahead:
            self.ahead.wait()  # its rollouts have the settings of training
        training = self.model.training
        self.model.eval()
        self.last_reports = reports = self.evaluator.reports(self.play, self.step_of_weights)
        metrics = {
            f"{metric_key_prefix}_{report.split}/{name}": value
            for report in reports
            for name, value in report.scalars().items()
        }
        if self.best_step is None:  # that of the best weights was logged at their step
            self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.model.train(training)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as TRL does, completions in training only; with `print_episodes`, prints episodes once per batch."""
        self.log_completions = self.args.log_completions and self.model.training
        super().log(logs, start_time)
        if self._to_print and self.model.training and self.accelerator.is_main_process:
            print_episodes(self._to_print, step=self.state.global_step)
            self._to_print = []

    def card_rows(self) -> dict[str, str]:
        """Returns the rows for the model card."""
        args, protocol = self.args, self.rules.protocol
        past = f"{protocol.history_length} past turns" if protocol.is_windowed else "the whole episode"
        action = "a tool call" if args.action_format == "tool_calls" else "an action, as in `<action>look</action>`"
        return {
            "method": self.methods.model_card_text(),
            "prompts": f"template `{Path(args.template_for(self.suite)).name}`; an answer ends with {action}",
            "training": f"{args.generation_batch_size} episodes per RL step, {self.num_generations} per task, up to "
            f"{args.max_turns} turns",
            "evaluation": f"`{protocol.name}`: {protocol.max_turns} turns, temperature {protocol.temperature:g}, "
            f"{protocol.context} context, {past} in the prompt, success by `{protocol.success_rule}`",
        }


class Scored(NamedTuple):
    """Scores that `compute_loss` passes through TRL, which hands its model on to what scores it and to nothing else."""

    logps: Tensor
    entropy: Tensor
    aux_loss: Tensor | None
