"""Engines without a barrier: each episode of each rank gets its next response as soon as it has asked for it.

Generation in lockstep is needed where it is collective: where the weights are sharded over ranks (ZeRO-3, FSDP) or
vLLM's tensor parallel group must see the same prompts. `make_engine` chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import torch
from requests.adapters import HTTPAdapter
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.utils import WorkloadHints
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.models.utils import unwrap_model_for_generation

from epo_trl.long_runs.run_settings import uses_fsdp
from epo_trl.models.load import get_attention
from epo_trl.models.vllm_requests import VllmRequests
from epo_trl.rollout import ContextBuilder, EngineError, Response
from epo_trl.trainers.generation import PolicyEngine, TurnGenerator, keeping_precision

_LARGEST_POOL = 256  # requests that a rank has at a server at once


def make_engine(trainer: GRPOTrainer) -> PolicyEngine:
    """Returns the engine for a trainer's back end: without a barrier where generation is not collective.

    Raises:
        InputError: If `request_seeds` is set and the back end takes none.
    """
    args = trainer.args
    if trainer.use_vllm:
        vllm = trainer.vllm_generation
        is_constrained = vllm.structured_outputs_regex is not None or "structured_outputs" in vllm.generation_kwargs
        if is_constrained:  # TRL converts these settings
            return TurnGenerator(trainer)
        if args.vllm_mode == "server":
            return VllmServerEngine(trainer)
        return VllmEngine(trainer) if args.vllm_tensor_parallel_size == 1 else TurnGenerator(trainer)
    is_sharded = trainer.is_deepspeed_enabled or uses_fsdp(args)
    if trainer.use_transformers_continuous_batching and not is_sharded:
        return ContinuousBatchingEngine(trainer)
    return TurnGenerator(trainer)


# From transformers 5.24 on a model returns its cache, which accelerate takes for a tensor in half precision.
PagedAttentionCache.float = lambda cache: cache


class ContinuousBatchingEngine(PolicyEngine):
    """transformers' continuous batching, with one manager for the whole rollout.

    Its scheduler runs in this thread and not in its own, so that threads do not decide the order of the samples.
    """

    _manager: Any = None
    _processor: Any = None

    @contextmanager
    def rollout(self, context: ContextBuilder, count: int) -> Iterator[None]:
        """Prepares the cache and the policy, which keeps the precision of the run for the rollout."""
        trainer = self._trainer
        training, precision = trainer.model.training, self._precision
        checkpointing = trainer.args.gradient_checkpointing_kwargs
        with (
            self.around(),
            keeping_precision(trainer.model),
            unwrap_model_for_generation(
                trainer.model_wrapped, trainer.accelerator, gradient_checkpointing_kwargs=checkpointing
            ) as policy,
        ):
            policy.to(precision)
            if trainer.args.cast_lm_head_to_fp32:
                policy.lm_head.float()
            attention = get_attention(policy)
            config = copy.deepcopy(trainer.continuous_batching_config)
            config.use_async_batching = False
            self._manager = policy.init_continuous_batching(
                trainer.generation_config, config, WorkloadHints(num_requests=count)
            )
            try:
                self._manager.warmup()
                self._processor = self._manager.batch_processor
                yield
            finally:
                self._manager.destroy()
                self._manager = self._processor = None
                policy.set_attn_implementation(attention)
        trainer.model.train(training)

    @property
    def _precision(self) -> torch.dtype | None:
        args = self._trainer.args
        return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None

    def submit(self, number: int, prompt_ids: list[int]) -> None:
        """Adds the request to the manager's queue."""
        config = self._trainer.generation_config
        self._manager.add_request(
            prompt_ids, str(number), max_new_tokens=config.max_new_tokens, eos_token_id=config.eos_token_id
        )

    def collect(self, seconds: float | None) -> list[Response]:
        """Runs one step of the scheduler, or as many as it takes until a response is ready.

        Raises:
            EngineError: If the cache is too small for a sequence.
        """
        while True:
            self._step()
            results = []
            while (result := self._manager.get_result(timeout=0.0)) is not None:
                results.append(result)
            if results or seconds is not None:
                return [Response(int(one.request_id), one.generated_tokens, error=one.error or "") for one in results]

    def _step(self) -> None:
        try:
            if self._processor.prepare_next_batch():
                self._processor._generation_step(self._manager.model)
                self._processor.update_batch()
        except RuntimeError as error:
            if "scheduled" not in str(error):
                raise
            raise EngineError(
                "transformers_continuous_batching_config: expected a cache that holds the longest sequence, got "
                f"{self._processor.cache.num_blocks} blocks of {self._manager.continuous_batching_config.page_size} "
                f"tokens ({error}). Raise num_blocks"
            ) from error


class VllmEngine(VllmRequests, PolicyEngine):
    """A vLLM in the process of each rank."""

    takes_seeds = True

    def __init__(self, trainer: GRPOTrainer):
        VllmRequests.__init__(self)
        PolicyEngine.__init__(self, trainer)

    @contextmanager
    def rollout(self, context: ContextBuilder, count: int) -> Iterator[None]:
        """Keeps vLLM awake, and drops the requests that an error leaves behind."""
        with self.around(), self.keeping_vllm_awake():
            self._begin_requests()
            self._settings = sampling_settings(self._trainer)
            try:
                yield
            finally:
                self.drop_requests()

    @property
    def llm_engine(self) -> Any:
        """The engine of TRL's vLLM."""
        return self._trainer.vllm_generation.llm.llm_engine

    def make_params(self, number: int) -> Any:
        """Returns the parameters of the next request of an episode."""
        from vllm import SamplingParams

        return SamplingParams(**{**self._settings, **self._request_settings(number)})


class VllmServerEngine(PolicyEngine):
    """A vLLM server that every rank asks by itself. Only rank 0 sends weights, between rollouts.

    Attributes:
        stopped: Whether to refuse requests, so that a rollout in the background ends.
    """

    shares_devices = False
    takes_seeds = True
    stopped = False
    _is_ahead = False
    _client: VLLMClient | None = None
    _pool: ThreadPoolExecutor

    @contextmanager
    def rollout(self, context: ContextBuilder, count: int) -> Iterator[None]:
        """Sends the weights, unless the rollout runs ahead."""
        if not self._is_ahead:
            self.send_weights()
        self._begin_requests()
        self._settings = sampling_settings(self._trainer)
        self._responses: SimpleQueue[Response] = SimpleQueue()
        self._client = self._client or self._connect()
        self._pool = ThreadPoolExecutor(max(1, min(count, _LARGEST_POOL)))
        try:
            yield
        finally:
            self._pool.shutdown(cancel_futures=True)  # after an error there are requests left

    def send_weights(self) -> None:
        """Sends the weights, and waits until the server has them before any rank asks. Collective."""
        self.load_weights()
        self._trainer.accelerator.wait_for_everyone()

    @contextmanager
    def ahead(self, rl_step: int) -> Iterator[None]:
        """Marks the rollouts of the block as those of a later RL step, which run in another thread."""
        with self.playing_for(str(rl_step)):
            self._is_ahead = True
            try:
                yield
            finally:
                self._is_ahead = False

    def _connect(self) -> VLLMClient:
        vllm = self._trainer.vllm_generation
        url = vllm.server_base_url or f"http://{vllm.server_host}:{vllm.server_port}"
        client = VLLMClient(base_url=url, connection_timeout=vllm.server_timeout)
        for scheme in ("http://", "https://"):
            retries = client.session.get_adapter(scheme).max_retries.new(read=0)  # a late answer is not asked for again
            client.session.mount(
                scheme, _WithTimeout(vllm.server_timeout, max_retries=retries, pool_maxsize=_LARGEST_POOL)
            )
        return client

    def submit(self, number: int, prompt_ids: list[int]) -> None:
        """Sends the request from a thread.

        Raises:
            EngineError: If the rollout was stopped.
        """
        if self.stopped:
            raise EngineError("the rollout was stopped")
        self._pool.submit(self._ask, number, prompt_ids, self._request_settings(number))

    def _ask(self, number: int, prompt_ids: list[int], further: dict[str, Any]) -> None:
        assert self._client is not None
        try:
            answer = self._client.generate([prompt_ids], n=1, **self._settings, generation_kwargs=further)
            logprobs = [token[0] for token in answer["logprobs"][0]]
            self._responses.put(Response(number, list(answer["completion_ids"][0]), logprobs))
        except Exception as error:
            self._responses.put(Response(number, [], None, f"the vLLM server at {self._client.base_url}: {error}"))

    def collect(self, seconds: float | None) -> list[Response]:
        """Returns the responses that the server has sent."""
        responses = []
        try:
            responses.append(self._responses.get(timeout=seconds))
            while True:
                responses.append(self._responses.get_nowait())
        except Empty:
            return responses


class _WithTimeout(HTTPAdapter):
    """Ends a request that takes longer than `seconds`."""

    def __init__(self, seconds: float, **kwargs: Any):
        self._seconds = seconds
        super().__init__(**kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """Sends a request with the time limit, unless it has one."""
        return super().send(*args, **{**kwargs, "timeout": kwargs.get("timeout") or self._seconds})


def sampling_settings(trainer: GRPOTrainer) -> dict[str, Any]:
    """Returns the trainer's settings by the names of vLLM's `SamplingParams`; `generation_kwargs` override them."""
    vllm = trainer.vllm_generation
    return {
        "repetition_penalty": vllm.repetition_penalty,
        "temperature": vllm.temperature,
        "top_p": vllm.top_p,
        "top_k": vllm.top_k,
        "min_p": vllm.min_p or 0.0,
        "max_tokens": vllm.max_completion_length,
        "logprobs": vllm.logprobs,
    }
