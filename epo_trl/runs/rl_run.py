"""A resumable run of RL steps with TRL's GRPO trainer: exact also inside an RL step, guarded against NaN."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from trl import GRPOTrainer

from epo_trl.errors import InputError
from epo_trl.runs.guards import UpdateGuard, check_skipped
from epo_trl.runs.long_run import LongRun

# Fields that decide which forward-backward passes make an RL step.
PASSES = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")


class RLRun(LongRun, GRPOTrainer):
    """Counts RL steps and the passes over their batches, and saves and restores both.

    A subclass increases `rl_step`, resets `update_seconds`, and extends what is saved: `_run_state`, and for the batch
    in use `_batch_state`, with their counterparts.

    Attributes:
        rl_step: Number of completed RL steps.
        update_seconds: Duration of the RL step in progress, without its rollout.
    """

    def __init__(self, *, args: Any, **kwargs: Any) -> None:
        super().__init__(args=args, **kwargs)
        self.rl_step, self.update_seconds = 0, 0.0
        self._guard = UpdateGuard(args.max_skipped_updates, args.output_dir)
        self._train_sampler: Any = None
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

    # --- The position inside an RL step -------------------------------------------------------------------------

    @property
    def micro_steps_done(self) -> int:
        """Number of forward-backward passes made on the collected batch; 0 at the start of an RL step."""
        return self._step % self.args.micro_steps_per_rl_step

    @property
    def pending_metrics(self) -> dict[str, list[float]]:
        """Metrics whose means TRL logs at the next logging step, for the model's current mode."""
        return self._metrics["train" if self.model.training else "eval"]

    def _keep_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to TRL's, which logs their means at the next logging step."""
        for name, value in metrics.items():
            self.pending_metrics[name].append(value)

    # --- The order of the tasks ---------------------------------------------------------------------------------

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
        for _ in range(epochs):
            next(iter(self._train_sampler))
        return epochs, steps

    # --- Checkpoints --------------------------------------------------------------------------------------------

    def _run_state(self) -> dict[str, Any]:
        own = {"micro_step": self._step, "rl_step": self.rl_step, "skipped_updates": self._guard.skipped}
        pending = {name: [float(value) for value in values] for name, values in self._metrics["train"].items()}
        return {**super()._run_state(), **own, "pending_metrics": pending}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        super()._load_run_state(state)
        self._guard.skipped, self.rl_step = state["skipped_updates"], state["rl_step"]
        self._step = self._passes_before(state["micro_step"], state["settings"])
        self._metrics["train"].update(state["pending_metrics"])

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

    def _batch_state(self) -> dict[str, Any]:
        """Returns the state of the batch in use, beside TRL's tensors, as plain containers of tensors."""
        return {}

    def _batch_fits(self, state: Mapping[str, Any]) -> bool:
        """Returns whether this run can use a saved batch. `state["inputs"]` holds TRL's tensors."""
        return True

    def _load_batch_state(self, state: dict[str, Any]) -> None:
        """Restores the state returned by `_batch_state`."""

    def _whole_batch(self) -> dict[str, Any]:
        """Returns the batch in use: TRL's tensors, and the state of a subclass."""
        own = {"inputs": self._buffered_inputs, "world_size": self.accelerator.num_processes}
        return own | {"update_seconds": self.update_seconds} | self._batch_state()

    def _batch_file(self, folder: str) -> str:
        return os.path.join(folder, f"collected_batch_{self.accelerator.process_index}.pt")

    def _save_rank_state(self, folder: str) -> None:
        super()._save_rank_state(folder)
        if self.micro_steps_done:
            torch.save(self._whole_batch(), self._batch_file(folder))

    def _load_rank_state(self, folder: str) -> None:
        """Restores the batch in use, unless a rank cannot use its part: then the RL step goes on with a new batch."""
        super()._load_rank_state(folder)
        if not self.micro_steps_done:
            return
        world_size, state = self.accelerator.num_processes, self._load_tensors(self._batch_file(folder))
        fits = state is not None and state["world_size"] == world_size and self._batch_fits(state)
        ranks = torch.tensor(float(fits), device=self.accelerator.device)
        if self.accelerator.reduce(ranks, reduction="sum") == world_size and state is not None:
            self._buffered_inputs, self.update_seconds = state["inputs"], state["update_seconds"]
            self._load_batch_state(state)

    def save_between_updates(self) -> str | None:
        """Like `save_checkpoint`, but a no-op inside an optimizer step, which returns `None`. Collective."""
        return None if self._passed_at == self.state.global_step else self.save_checkpoint()

    # --- Updates ------------------------------------------------------------------------------------------------

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
        rank = self.accelerator.process_index
        self._guard.end_update(float(norm), self.state.global_step, rank, self._whole_batch)
        self.pending_metrics["guard/skipped_updates"] = [self._guard.skipped]
        return norm
