"""A policy outside a trainer that samples responses with vLLM."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl import ModelConfig

from epo_trl.errors import InputError
from epo_trl.models.load import end_ids_of, load_tokenizer
from epo_trl.models.vllm_requests import VllmRequests, request_params


class VllmPolicy(VllmRequests):
    """Samples responses with vLLM, an engine without a barrier.

    Args:
        llm: `vllm.LLM` engine.
        make_params: Function from settings to the parameters of a request.
        eos_ids: Ids of the tokens that end a response; the response includes them.
        max_new_tokens: Maximum length of a response.
        temperature: Sampling temperature; 0 is greedy decoding.
    """

    def __init__(
        self, llm: Any, make_params: Any, eos_ids: list[int], *, max_new_tokens: int, temperature: float = 1.0
    ):
        super().__init__()
        self.llm = llm
        self._params = make_params
        self.eos_ids = eos_ids
        self._sampling = {"stop_token_ids": eos_ids, "max_tokens": max_new_tokens, "temperature": temperature}
        self._begin(0, None)

    def _begin(self, seed: int, episodes: Sequence[int] | None) -> None:
        self._seed, self._episodes = seed, episodes
        self._turns: Counter[int] = Counter()

    def seeded(self, seed: int, episodes: Sequence[int] | None = None) -> VllmPolicy:
        """Returns a copy of the policy with its own seeds.

        Args:
            seed: Seed of all of them. That of a request depends on its episode and turn alone.
            episodes: Numbers that tell the episodes of a rollout apart; by default their indices.
        """
        other = copy.copy(self)
        other._begin(seed, episodes)
        return other

    @property
    def llm_engine(self) -> Any:
        """The engine of `llm`."""
        return self.llm.llm_engine

    def make_params(self, number: int) -> Any:
        """Returns the parameters of the next request of an episode."""
        self._turns[number] += 1
        episode = number if self._episodes is None else self._episodes[number]
        seed = random.Random(f"{self._seed}, {episode}, {self._turns[number]}").randrange(2**62)
        return self._params(seed=seed, **self._sampling)  # vLLM's sampling filters are off by default


def load_vllm_policy(
    model_args: ModelConfig,
    *,
    max_new_tokens: int,
    temperature: float,
    max_model_len: int | None = None,
    gpu_share: float = 0.9,
    several_processes: bool = False,
    trust_remote_code: bool = False,
) -> tuple[VllmPolicy, Any]:
    """Loads the policy into a new vLLM engine and returns it with its tokenizer.

    Args:
        model_args: Model settings. `model_name_or_path` is a Hub id or the folder of a plain checkpoint.
        max_new_tokens: Maximum length of a response.
        temperature: Sampling temperature.
        max_model_len: Maximum sequence length in tokens; by default the model's.
        gpu_share: Fraction of a GPU's memory for the engine.
        several_processes: Whether a launcher has started a process for each GPU.
        trust_remote_code: Whether custom code from the Hub may run.

    Raises:
        InputError: If the model is an adapter or quantized.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    if (Path(str(name)) / "adapter_config.json").is_file():
        raise InputError(
            f"model_name_or_path: got {name!r}, an adapter, with backend='vllm'; merge it into its base first: "
            f"epo-trl merge {name} --out DIR"
        )
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise InputError("load_in_4bit, load_in_8bit: expected backend='transformers', got True with backend='vllm'")
    from vllm import LLM

    llm = LLM(
        model=name,
        revision=revision,
        tokenizer_revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=model_args.dtype or "auto",
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_share,
        # As in TRL's colocated mode: the launcher started the processes, and each one is a full engine.
        **({"distributed_executor_backend": "external_launcher"} if several_processes else {}),
    )
    tokenizer = load_tokenizer(str(name), revision=revision, trust_remote_code=trust_remote_code)
    ends = end_ids_of(model_args, tokenizer, trust_remote_code)
    return VllmPolicy(llm, request_params, ends, max_new_tokens=max_new_tokens, temperature=temperature), tokenizer
