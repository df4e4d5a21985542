"""Engines without a barrier: each episode of each rank gets its next response as soon as it has asked for it.

vLLM has them, unless its tensor parallel group must see the same prompts. transformers' generation is in lockstep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from tqdm.auto import tqdm
from transformers import set_seed
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from epo_trl.changed import changed
from epo_trl.errors import InputError
from epo_trl.models.vllm import VllmRequests, own_port, request_params
from epo_trl.rollout import ContextBuilder, EngineError, Response
from epo_trl.trainers.config import EPOConfig
from epo_trl.trainers.generation import PolicyEngine, TurnGenerator

_LARGEST_POOL = 256  # requests that a rank has at a server at once


def make_engine(trainer: GRPOTrainer) -> PolicyEngine:
    """Returns the engine for a trainer's back end: without a barrier with vLLM where it is not collective.

    Raises:
        InputError: If `request_seeds` is set and the back end takes none.
    """
    args = trainer.args
    if trainer.use_vllm:
        vllm = trainer.vllm_generation
        # TRL converts the settings of constrained sampling.
        is_constrained = vllm.structured_outputs_regex is not None or "structured_outputs" in vllm.generation_kwargs
        if args.vllm_mode == "server" and not is_constrained:
            return VllmServerEngine(trainer)
        if args.vllm_mode == "colocate" and not is_constrained and args.vllm_tensor_parallel_size == 1:
            return VllmEngine(trainer)
    if args.request_seeds:
        raise InputError(
            "request_seeds: expected False, except with vLLM where it does not generate in lockstep, got True. In "
            "lockstep, samples are drawn in the same order in every run"
        )
    return TurnGenerator(trainer)


@contextmanager
def starting(args: EPOConfig) -> Iterator[None]:
    """Gives the vLLM that TRL starts in the block, if it does, a port of its own, and announces it.

    Raises:
        InputError: If vLLM is wanted and cannot be imported.
    """
    in_process = args.use_vllm and args.vllm_mode == "colocate"
    start = time.monotonic()
    with own_port() if in_process else nullcontext():
        if in_process and args.process_index == 0:  # it takes a minute or more
            tqdm.write("loading the model and starting vLLM in the process ...", file=sys.stderr)
        try:
            yield
        except ImportError as error:
            if not args.use_vllm:
                raise
            raise InputError(f"use_vllm: expected vLLM, got {error}; pip install 'epo-trl[vllm]'") from error
    if in_process and args.process_index == 0:
        tqdm.write(f"vLLM is ready after {time.monotonic() - start:.0f} s", file=sys.stderr)
    if args.use_vllm:
        # A colocated vLLM has seeded this process with its own seed. The ranks of one engine draw the same.
        set_seed(args.seed + args.process_index // args.vllm_tensor_parallel_size)


class VllmEngine(VllmRequests, PolicyEngine):
    """A vLLM in the process of each rank."""

    def __init__(self, trainer: GRPOTrainer):
        VllmRequests.__init__(self, trainer.vllm_generation.llm.llm_engine)
        PolicyEngine.__init__(self, trainer)

    @contextmanager
    def rollout(self, context: ContextBuilder, count: int) -> Iterator[None]:
        """Keeps vLLM awake, and drops the requests that an error leaves behind."""
        with self.keeping_vllm_awake():
            self._begin_requests()
            self._settings = sampling_settings(self._trainer, self.is_evaluating)
            try:
                yield
            finally:
                self.drop_requests()

    def make_params(self, number: int) -> Any:
        """Returns the parameters of the next request of an episode."""
        return request_params(**{**self._settings, **self._request_settings(number)})


class VllmServerEngine(PolicyEngine):
    """A vLLM server that every rank asks by itself. Only rank 0 sends weights, between rollouts.

    Attributes:
        stopped: Whether to refuse requests, so that a rollout in the background ends.
    """

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
        self._settings = sampling_settings(self._trainer, self.is_evaluating)
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

    def ahead(self, rl_step: int) -> AbstractContextManager[None]:
        """Marks the rollouts of the block as those of a later RL step, which run in another thread."""
        return changed(self, part=str(rl_step), _is_ahead=True)

    def _connect(self) -> VLLMClient:
        vllm = self._trainer.vllm_generation
        url = vllm.server_base_url or f"http://{vllm.server_host}:{vllm.server_port}"
        client = VLLMClient(base_url=url, connection_timeout=vllm.server_timeout)
        limit_requests(client.session, vllm.server_timeout)
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
            found = answer["logprobs"]
            logprobs = None if found is None else [token[0] for token in found[0]]
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


def limit_requests(session: requests.Session, seconds: float) -> None:
    """Ends requests that take longer, and does not send them again; keeps a connection for each thread."""
    session.request = partial(session.request, timeout=seconds)  # type: ignore[method-assign]
    for scheme in ("http://", "https://"):
        retries = session.get_adapter(f"{scheme}any").max_retries.new(read=0)  # type: ignore[attr-defined]
        session.mount(scheme, HTTPAdapter(max_retries=retries, pool_maxsize=_LARGEST_POOL))


def sampling_settings(trainer: GRPOTrainer, is_evaluating: bool) -> dict[str, Any]:
    """Returns the trainer's settings by the names of vLLM's `SamplingParams`; `generation_kwargs` override them.

    Log-probabilities are among them only where TRL's loss reads them: its correction for vLLM, or its off-policy mask.
    """
    vllm = trainer.vllm_generation
    is_read = trainer.vllm_importance_sampling_correction or trainer.off_policy_mask_threshold is not None
    return {
        "repetition_penalty": vllm.repetition_penalty,
        "temperature": vllm.temperature,
        "top_p": vllm.top_p,
        "top_k": vllm.top_k,
        "min_p": vllm.min_p or 0.0,
        "max_tokens": vllm.max_completion_length,
        "logprobs": vllm.logprobs if is_read and not is_evaluating else None,
    }
