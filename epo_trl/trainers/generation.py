"""Engines over the policy of a trainer; TRL's generation, one turn of all running episodes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from trl import GRPOTrainer

from epo_trl.changed import changed
from epo_trl.devices import seeded
from epo_trl.models.adapters import keeping_base
from epo_trl.models.generate import UNCHANGED, decoding, narrowing, without_own_settings
from epo_trl.models.prefix_cache import can_reuse, reusing_prefixes
from epo_trl.models.vllm import RequestSeeds
from epo_trl.rollout import ContextBuilder, Engine, InStep, Response


class PolicyEngine(Engine):
    """An engine that samples from the policy of a trainer, at the trainer's settings."""

    part = ""  # of the run that a rollout is for, if it is not the trainer's RL step
    is_evaluating = False

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self._seeds = RequestSeeds()

    def rollout(self, context: ContextBuilder, count: int) -> AbstractContextManager[Any]:
        """Returns the context manager of one rollout. Collective.

        Args:
            context: Builder of the prompts.
            count: Number of this rank's episodes.
        """
        return nullcontext()

    def load_weights(self) -> None:
        """Sends the weights to vLLM, unless it has those of this optimizer step. Collective."""
        trainer, step = self._trainer, self._trainer.state.global_step
        sleeps = trainer.vllm_mode == "colocate" and trainer.vllm_generation._llm_weights_sleeping
        if trainer._last_loaded_step != step or sleeps:
            with keeping_base(trainer.model):
                trainer.vllm_generation.sync_weights()  # also wakes the weights
            trainer._last_loaded_step = step

    def weights_changed(self) -> None:
        """Makes the next rollout send the weights to vLLM: otherwise they are sent if the optimizer step changed."""
        self._trainer._last_loaded_step = -1

    def _begin_requests(self) -> None:
        args = self._trainer.args
        self._seeds.begin(f"{args.seed}, rank {args.process_index}, {self.part or self._trainer.rl_step}")

    def _request_settings(self, number: int) -> dict[str, Any]:
        """Returns the settings of a request to vLLM that TRL does not name: `generation_kwargs`, and its seed."""
        seed = {"seed": self._seeds.draw(number)} if self._trainer.args.request_seeds else {}
        return {**self._trainer.vllm_generation.generation_kwargs, **seed}

    @contextmanager
    def keeping_vllm_awake(self) -> Iterator[None]:
        """Lets a colocated vLLM sleep only between rollouts.

        TRL puts it to sleep after every generation call. vLLM then drops its weights and its prefix cache, and TRL
        sends the weights again at the next call: once per turn.
        """
        vllm = self._trainer.vllm_generation
        self.load_weights()
        if self._trainer.vllm_mode != "colocate" or not vllm.enable_sleep_mode:  # a server never sleeps
            yield
            return
        vllm.llm.wake_up(tags=["kv_cache"])
        vllm.enable_sleep_mode = False
        try:
            yield
        finally:
            vllm.enable_sleep_mode = True
            vllm.llm.sleep(level=2)
            vllm._llm_weights_sleeping = True

    @contextmanager
    def sampling(self, temperature: float, seed: int) -> Iterator[None]:
        """Samples from the full distribution at another temperature, greedily at 0, from a separate random stream."""
        trainer = self._trainer
        given = trainer.args.generation_kwargs or {}
        others = narrowing(given)
        holder: Any = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
        changes = decoding(temperature) | dict.fromkeys(others)
        if trainer.use_vllm:
            kept = {name: value for name, value in given.items() if name not in others}
            changes = {**UNCHANGED, "min_p": 0.0, "temperature": temperature}
            changes |= {"generation_kwargs": kept, "structured_outputs_regex": None}
        # Plain generation also reads the changes from here; with vLLM there is no such dictionary.
        kwargs: dict[str, Any] = {} if trainer.use_vllm else trainer.generation_kwargs
        before, part = dict(kwargs), f"evaluation {seed}"
        own = changed(self, part=part, is_evaluating=True, _seeds=RequestSeeds())
        with seeded(seed, trainer.accelerator.device), own, changed(holder, **changes):
            kwargs.update(changes)
            try:
                yield
            finally:
                kwargs.update(before)


class TurnGenerator(InStep, PolicyEngine):
    """TRL's generation: one turn of all running episodes of all ranks per call, on each of its back ends."""

    def __init__(self, trainer: GRPOTrainer):
        InStep.__init__(self, self._generate_turn)
        PolicyEngine.__init__(self, trainer)

    def collect(self, seconds: float | None) -> list[Response] | None:
        """Generates for this rank's prompts, and for dummies where other ranks still have some. Collective."""
        dummies = self.prompts_needed(len(self._prompts)) - len(self._prompts)
        self._prompts |= {-1 - i: [self._trainer.processing_class.eos_token_id] for i in range(dummies)}
        responses = super().collect(seconds)
        return None if responses is None else [response for response in responses if response.number >= 0]

    def _generate_turn(self, prompt_ids: list[list[int]]) -> Any:
        """Generates a response to each prompt.

        Autocast keeps its bf16 copies of fp32 weights until its outermost block ends. Around the call, they are made
        once per turn instead of once per token.
        """
        trainer = self._trainer
        with nullcontext() if trainer.use_vllm else trainer.accelerator.autocast():
            return trainer._generate_single_turn(prompt_ids, None, {}, 1)

    def prompts_needed(self, running: int) -> int:
        """Returns the number of prompts this rank must generate for, given its number of running episodes. Collective.

        Generation is collective, so all ranks continue until the last episode of any rank has ended.
        """
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return running
        counts = accelerator.gather(torch.tensor([running], device=accelerator.device)).tolist()
        if not any(counts):
            return 0
        # vLLM's tensor parallel ranks join their prompts and split the responses by rank.
        return max(counts) if self._trainer.use_vllm else max(running, 1)

    @contextmanager
    def rollout(self, context: ContextBuilder, count: int) -> Iterator[None]:
        """Reuses the key-value cache of the previous turn; vLLM does so itself.

        Hides the checkpoint's own generation settings: `generate` would take those that TRL leaves unset, such as min_p
        and suppress_tokens, and the loss assumes the full distribution.
        """
        trainer = self._trainer
        if trainer.use_vllm:
            with self.keeping_vllm_awake():
                yield
            return
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        with without_own_settings(model):
            reuses = can_reuse(model, trainer.generation_config)
            with reusing_prefixes(model, not context.is_windowed) if reuses else nullcontext():
                yield
