"""TRL's GRPOTrainer for runs that take days: guards, and checkpoints within an RL step, on top of `LongRun`."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from trl import GRPOTrainer

from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError
from epo_trl.evaluation import EvalReport
from epo_trl.evaluation.report_files import REPORTS
from epo_trl.methods import Methods, build_methods
from epo_trl.runs.checkpoint_files import move_aside, step_of
from epo_trl.runs.guards import UpdateGuard, check_skipped
from epo_trl.runs.long_run import STATE_FILE, LongRun
from epo_trl.runs.run_settings import check_unchanged, config_settings, content_digest, differences, model_digest
from epo_trl.runs.state_file import read_state
from epo_trl.trainers.ahead import RolloutAhead
from epo_trl.trainers.batches import holds_what_the_loss_reads
from epo_trl.trainers.collection import Player
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.evaluator import Evaluator
from epo_trl.trainers.model_card import OwnModelCard
from epo_trl.trainers.monitoring.episode_samples import EpisodeSamples
from epo_trl.trainers.monitoring.run_health import RunHealth
from epo_trl.trainers.setup import RolloutRules, keeping_reference
from epo_trl.watch.source import FOLDER as EPISODES

# Files of a checkpoint, equal on all ranks.
METHODS, REFERENCE = "methods.pt", "reference_weights.pt"
# Fields that decide which forward-backward passes make an RL step.
PASSES = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")


class LongRunTrainer(LongRun, OwnModelCard, GRPOTrainer):
    """Resumes exactly from a checkpoint, even in the middle of a collected batch.

    Subclasses extend `_batch_state` with their own state of a run.
    """

    args: EPOConfig
    suite: TaskSuite
    methods: Methods
    health: RunHealth
    player: Player
    rules: RolloutRules
    samples: EpisodeSamples
    evaluator: Evaluator
    last_reports: list[EvalReport]
    ahead: RolloutAhead | None
    rl_step: int  # number of completed RL steps
    collected_at: int  # number of forward-backward passes before the collected batch
    update_seconds: float  # of the RL step in progress, without its rollout
    has_critic: bool
    used_settings: dict[str, Any]  # of `args`, when the trainer was made or trained last

    def __init__(self, *, args: EPOConfig, **kwargs: Any) -> None:
        with keeping_reference(self, args):
            super().__init__(args=args, **kwargs)
        self.used_settings = config_settings(args)
        self.collected_at, self.update_seconds = 0, 0.0
        self._guard = UpdateGuard(args.max_skipped_updates, args.output_dir)
        self._train_sampler: Any = None
        self._has_trained = False
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

    @property
    def micro_steps_done(self) -> int:
        """Number of forward-backward passes made on the collected batch; 0 at the start of an RL step."""
        return self._step % self.args.micro_steps_per_rl_step

    @property
    def pending_metrics(self) -> dict[str, list[float]]:
        """Metrics whose means TRL logs at the next logging step, for the model's current mode."""
        return self._metrics["train" if self.model.training else "eval"]

    def begin_first_pass(self) -> None:
        """Records that a batch has been collected, which the next forward-backward passes are the first to use."""
        self.collected_at = self._step

    @property
    def in_first_pass(self) -> bool:
        """Whether the next forward-backward pass is the first over its part of the collected batch."""
        return self._step - self.collected_at < self.args.steps_per_generation

    def _keep_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to TRL's, which logs their means at the next logging step."""
        for name, value in metrics.items():
            self.pending_metrics[name].append(value)

    # --- Checkpoint state ---------------------------------------------------------------------------------------

    def settings_of_data(self) -> dict[str, Any]:
        """Returns the tasks, environment settings, rewards, method settings, and checksums of the prompts' texts."""
        return {
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
        own = {"micro_step": self._step, "rl_step": self.rl_step, "skipped_updates": self._guard.skipped}
        parts = {"health": self.health.state_dict()}
        pending = {name: [float(value) for value in values] for name, values in self._metrics["train"].items()}
        return {**super()._run_state(), **own, **parts, "pending_metrics": pending, "best_by": self._best_by()}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        super()._load_run_state(state)
        self._guard.skipped = state["skipped_updates"]
        self.rl_step = state["rl_step"]
        self._step = self._passes_before(state["micro_step"], state["settings"])
        self.health.load_state_dict(state["health"])
        self._metrics["train"].update(state["pending_metrics"])
        self._check_best(state["best_by"])

    def _best_by(self) -> dict[str, Any]:
        """Returns what decides which evaluation is the best, as plain JSON types."""
        metric = {name: getattr(self.args, name) for name in ("metric_for_best_model", "greater_is_better")}
        return json.loads(json.dumps(metric | self.evaluator.settings()))

    def _check_best(self, saved: Mapping[str, Any]) -> None:
        """Forgets the best evaluation of a checkpoint if its weights are gone, or those to come cannot be compared.

        Args:
            saved: What it was chosen by.
        """
        state, lines = self.state, differences(saved, self._best_by())
        best, loaded = state.best_global_step, self.args.load_best_model_at_end
        is_gone = loaded and best is not None and step_of(state.best_model_checkpoint or "") != best
        if not (lines or is_gone) or state.best_metric is None or self._end_step is not None:  # a finished run stays
            return
        if self.args.process_index == 0:
            why = f"the earlier ones cannot be compared with them: {'; '.join(lines)}"
            warnings.warn(
                f"the best policy is chosen among the evaluations after step {state.global_step}, since "
                f"{why if lines else f'checkpoint-{best}, that of the best one before, does not exist'}",
                stacklevel=2,
            )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def _set_results_aside(self, step: int, checkpoint: str | None) -> None:
        at = 0
        if checkpoint is not None:
            at = read_state(os.path.join(checkpoint, STATE_FILE), "rl_step")["rl_step"]
        elif not self.last_reports or self.state.global_step:  # an evaluation before training is not of this run
            step = -1
        move_aside(os.path.join(self.args.output_dir, EPISODES), at)
        move_aside(os.path.join(self.args.output_dir, REPORTS), step)

    def _passes_before(self, saved_passes: int, saved: Mapping[str, Any]) -> int:
        """Returns the number of forward-backward passes that this run would have made up to the checkpoint.

        Args:
            saved_passes: Number of passes made.
            saved: Settings with which they were made.

        Raises:
            InputError: If the passes are divided into RL steps in another way, and the checkpoint is inside an RL step
                with either division.
        """
        args, step = self.args, self.state.global_step
        changed = [
            f"{name}: expected {saved[name]} as in the checkpoint, got {getattr(args, name)}"
            for name in PASSES
            if saved[name] != getattr(args, name)
        ]
        if not changed:
            return saved_passes
        passes = self.rl_step * args.micro_steps_per_rl_step
        if saved_passes % (saved["steps_per_generation"] * saved["num_iterations"]):
            reason = f"optimizer step {step} is inside an RL step, which must end with the settings that it began with"
            fix = "resume from a checkpoint at the end of an RL step"
        elif passes != args.micro_steps(step, len(self.train_dataset)):
            reason = f"the checkpoint's {step} optimizer steps would not be its {self.rl_step} RL steps"
            fix = "keep the number of optimizer steps per RL step"
        else:
            return passes
        raise InputError(f"{'; '.join(changed)}; {reason}. Restore the checkpoint's settings, or {fix}")

    def _batch_state(self) -> dict[str, Any]:
        """Returns the state of the collected batch: TRL's buffer, and sums over the part already used."""
        parts = {"methods": self.methods.batch_state(), "samples": self.samples.state()}
        own = {"inputs": self._buffered_inputs, "update_seconds": self.update_seconds}
        own |= {"collected_at": self.collected_at}
        own |= {"temperature": self.args.temperature, "context": self.args.context}
        return {**own, **parts, "world_size": self.accelerator.num_processes}

    def _load_batch_state(self, state: dict[str, Any]) -> None:
        """Restores the state returned by `_batch_state`."""
        self._buffered_inputs, self.update_seconds = state["inputs"], state["update_seconds"]
        self.collected_at = state.get("collected_at", self._step - self.micro_steps_done)
        self.methods.load_batch_state(state["methods"])
        self.samples.load_state(state["samples"])

    def _save_rank_state(self, folder: str) -> None:
        if self.micro_steps_done:
            torch.save(self._batch_state(), self._batch_path(folder))
        if self.args.should_save:
            torch.save(self.methods.state_dict(), os.path.join(folder, METHODS))
        if self.args.should_save and self.args.sync_ref_model:
            torch.save(self.accelerator.unwrap_model(self.ref_model).state_dict(), os.path.join(folder, REFERENCE))

    def _batch_path(self, folder: str) -> str:
        return os.path.join(folder, f"collected_batch_{self.accelerator.process_index}.pt")

    def _load_tensors(self, path: str) -> dict[str, Any] | None:
        """Loads a file of plain containers of tensors; `None` if a checkpoint of fewer ranks or methods lacks it."""
        device = self.accelerator.device
        # With several processes it is `cpu:0`, to which torch cannot load.
        where = "cpu" if device.type == "cpu" else device
        return torch.load(path, map_location=where, weights_only=True) if os.path.isfile(path) else None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self.methods.load_state_dict(self._load_tensors(os.path.join(checkpoint, METHODS)) or {})
        if self.args.sync_ref_model and (weights := self._load_tensors(os.path.join(checkpoint, REFERENCE))):
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(weights)
        if self.micro_steps_done:
            self._resume_inside_rl_step(checkpoint)

    def _resume_inside_rl_step(self, checkpoint: str) -> None:
        state = self._load_tensors(self._batch_path(checkpoint))
        fits = (
            state is not None
            and state["methods"]["sums"].keys() == self.methods.keys()
            and holds_what_the_loss_reads(self, state["inputs"])
            and state["temperature"] == self.args.temperature  # that of its log-probabilities
            and state.get("context", self.args.context) == self.args.context  # a row's turns are scored by it
            and state["world_size"] == self.accelerator.num_processes  # otherwise it is another part of the batch
        )
        found = torch.tensor(float(fits), device=self.accelerator.device)
        everywhere = bool(self.accelerator.reduce(found, reduction="sum") == self.accelerator.num_processes)
        if state is not None and everywhere:
            self._load_batch_state(state)
        # Otherwise the rest of the RL step uses a newly collected batch.

    def save_between_updates(self) -> str | None:
        """Does as `save_checkpoint`; within an optimizer step it saves nothing and returns `None`. Collective."""
        return None if self._passed_at == self.state.global_step else self.save_checkpoint()

    def _load_best_model(self) -> None:
        """Loads the weights of the best evaluation, and sends them to vLLM before the next generation."""
        super()._load_best_model()
        if os.path.isdir(best := str(self.state.best_model_checkpoint)):  # otherwise the last weights stay
            self.best_step = step_of(best)
        self.player.engine.weights_changed()

    # --- Training -----------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as `LongRun.train` does. A second call starts a new run from the current weights.

        Schedules and histories restart, and the remainder of an interrupted batch is discarded. The optimizer keeps its
        moments, as in transformers; the reference model, PPO's critic and ArCHer's critics, with their replay buffer,
        stay as they are. A run resumed from a checkpoint continues with the state in that checkpoint.

        Raises:
            ValueError: If a field of `args` that the trainer has copied was changed since it was made.
        """
        self.used_settings = check_unchanged(self, self.used_settings)
        if self._has_trained:
            self._restart()
        self._has_trained, self.best_step = True, None
        try:
            output = super().train(*args, **kwargs)
            if not self.preempted:
                self.health.end_run()
            return output
        finally:
            if self.ahead:
                self.ahead.stop()

    def _restart(self) -> None:
        """Resets the state of a run to that of a new trainer. Subclasses reset their own."""
        self.rl_step, self._step, self._passed_at, self._buffered_inputs = 0, 0, -1, None
        self.update_seconds = 0.0
        self._guard = UpdateGuard(self.args.max_skipped_updates, self.args.output_dir)
        new = build_methods(self.args, critic=self.has_critic)
        self.methods.load_state_dict(new.state_dict())
        self.methods.load_batch_state(new.batch_state())
        self.health.load_state_dict(RunHealth(warns=False).state_dict())
        self.samples.load_state(None)
        self._metrics["train"].clear()
        self.entropy_coef, self._last_world_entropy, self._entropy_window_stats = self.args.entropy_coef, math.inf, None
        self._current_train_step_time = 0.0
        self.player.engine.restart()

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `InputError`: TRL would return the loss of one training batch as a result."""
        raise InputError("predict: expected evaluate() for the test lists or play() for episodes, got predict()")

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs one forward-backward pass; records its duration, and its loss for the report of a non-finite update."""
        start = time.perf_counter()
        output = super().training_step(model, inputs, num_items_in_batch)
        self.update_seconds += time.perf_counter() - start
        self._guard.add_loss(output)
        self._passed_at = self.state.global_step
        return output

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Returns the norm of the gradient. A non-finite gradient is not used for an update."""
        norm = super()._get_grad_norm(model, grad_norm)
        finite = math.isfinite(norm)
        if not finite and self.is_deepspeed_enabled:
            check_skipped(float(norm), lambda: self.accelerator.optimizer_step_was_skipped)
        elif not finite and self.accelerator.scaler is None:  # a scaler skips the update itself and needs the gradients
            model.zero_grad(set_to_none=True)
        losses = self._guard.end_update(skipped=not finite)
        self.pending_metrics["guard/skipped_updates"] = [self._guard.skipped]
        if self._guard.exhausted:
            self._guard.stop(
                self.state.global_step, self.accelerator.process_index, float(norm), losses, self._buffered_inputs
            )
        return norm

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

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Restores the trainer's state and advances the order of the tasks to its position.

        Every epoch draws a new order from one generator, which would restart in a resumed run.
        """
        epochs, steps = super()._init_training_state(*args, **kwargs)
        best = os.path.join(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
        if os.path.isdir(best):  # the state has its path at the time, which moves with the folder
            self.state.best_model_checkpoint = best
        for _ in range(epochs):
            next(iter(self._train_sampler))
        return epochs, steps
