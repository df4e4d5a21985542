"""vLLM in this process: requests, one step at a time, a policy outside a trainer, and its port."""

from __future__ import annotations

import copy
import os
import random
import socket
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl import ModelConfig

from epo_trl.errors import InputError
from epo_trl.models.load import end_ids_of, load_tokenizer
from epo_trl.rollout import Engine, Response


def request_params(**settings: Any) -> Any:
    """Creates the `vllm.SamplingParams` of a request that gets one output, when its response is complete.

    By default vLLM decodes each token's text, and creates an output and objects of log-probabilities at each step.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    lean = {"detokenize": False, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**{**lean, **settings})


class VllmRequests(Engine):
    """Asks a vLLM in this process: each step of its scheduler adds a token to all running responses."""

    def __init__(self, llm_engine: Any) -> None:
        self.llm_engine = llm_engine  # of a `vllm.LLM`
        self._pending: set[str] = set()

    @abstractmethod
    def make_params(self, number: int) -> Any:
        """Returns the parameters of the next request of an episode, from `request_params`."""

    def submit(self, number: int, prompt_ids: list[int]) -> None:
        """Adds the request to vLLM's scheduler."""
        self._pending.add(str(number))
        self.llm_engine.add_request(str(number), {"prompt_token_ids": prompt_ids}, self.make_params(number))

    def collect(self, seconds: float | None) -> list[Response]:
        """Runs one step of vLLM, or as many as it takes until a response is ready."""
        while True:
            finished = [output for output in self.llm_engine.step() if output.finished]
            if finished or seconds is not None:
                break
        self._pending -= {output.request_id for output in finished}
        return [
            Response(int(output.request_id), list(output.outputs[0].token_ids), _sampled(output.outputs[0].logprobs))
            for output in finished
        ]

    def drop_requests(self) -> None:
        """Drops the requests that an error has left behind."""
        self.llm_engine.abort_request(list(self._pending))
        self._pending.clear()


class RequestSeeds:
    """Seeds of requests, which depend on the run, its RL step and the rollout in it, the episode and the turn."""

    def __init__(self, rollout: str = "") -> None:
        self._rollouts: Counter[str] = Counter()  # of each part so far
        self._rollout = rollout
        self._turns: Counter[int] = Counter()

    def begin(self, part: str) -> None:
        """Begins a rollout for a part of the run: an RL step of a rank, or an evaluation."""
        self._rollout = f"{part}, {self._rollouts[part]}"
        self._rollouts[part] += 1
        self._turns.clear()

    def draw(self, number: int) -> int:
        """Returns the seed of the next request of an episode, a non-negative integer of 62 bits."""
        self._turns[number] += 1
        return random.Random(f"{self._rollout}, {number}, {self._turns[number]}").randrange(2**62)


def _sampled(flat: Any) -> list[float] | None:
    """Returns the log-probabilities of the sampled tokens, the first at each position of vLLM's `FlatLogprobs`."""
    return None if flat is None else [flat.logprobs[start] for start in flat.start_indices]


@contextmanager
def own_port() -> Iterator[None]:
    """Sets `MASTER_PORT` to a port that nobody else gets in the block, unless a launcher has set it.

    TRL would take 29500 if nobody listens there, and its process group listens seconds later: a second run that starts
    in between takes it too. Both sockets allow reuse, so on Linux the group can listen on the port that is held here.
    """
    with socket.socket() as held:
        if not os.environ.get("MASTER_PORT"):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            os.environ["MASTER_PORT"] = str(held.getsockname()[1])
        yield


class VllmPolicy(VllmRequests):
    """Samples responses with a `vllm.LLM`, an engine without a barrier. `eos_ids` end a response, which has them."""

    def __init__(self, llm: Any, eos_ids: list[int], *, max_new_tokens: int, temperature: float):
        super().__init__(llm.llm_engine)
        self.llm = llm
        self.eos_ids = eos_ids
        self._sampling = {"stop_token_ids": eos_ids, "max_tokens": max_new_tokens, "temperature": temperature}
        self._seeds = RequestSeeds("0")
        self._episodes: Sequence[int] | None = None

    def seeded(self, seed: int, episodes: Sequence[int] | None = None) -> VllmPolicy:
        """Returns a copy of the policy with its own seeds: that of a request depends on its episode and turn alone.

        `episodes` are numbers that tell the episodes of a rollout apart, by default their indices.
        """
        other = copy.copy(self)
        other._seeds, other._episodes = RequestSeeds(str(seed)), episodes
        return other

    def make_params(self, number: int) -> Any:
        """Returns the parameters of the next request of an episode."""
        episode = number if self._episodes is None else self._episodes[number]
        return request_params(seed=self._seeds.draw(episode), **self._sampling)  # vLLM's filters are off by default


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

    `several_processes` tells whether a launcher has started one for each GPU.

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
    return VllmPolicy(llm, ends, max_new_tokens=max_new_tokens, temperature=temperature), tokenizer
