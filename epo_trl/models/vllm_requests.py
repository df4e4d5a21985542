"""A vLLM in this process, one step at a time: each request is answered when its response is ready; its port."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

    def __init__(self) -> None:
        self._pending: set[str] = set()

    @property
    @abstractmethod
    def llm_engine(self) -> Any:
        """The `llm_engine` of a `vllm.LLM`."""

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
