"""Python time per step of a vLLM in the process, outside of its engine core: requests as TRL makes them, and ours.

    .venv-vllm/bin/python benchmarks/vllm_python.py            # on vLLM's CPU build; `make test-vllm` makes .venv-vllm

Between two steps of the engine core, vLLM makes outputs of its results (`process_outputs`), and we read those that are
complete. The ways take turns on the same engine with the same random numbers: samples and log-probabilities must be
equal. Measured is the main thread's time on the CPU, in which other load on the machine counts little.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import vllm_barrier  # sets vLLM's environment
from harness import parser, table, write
from trl.generation.vllm_generation import extract_logprobs

from epo_trl.envs.toy import ToySuite
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.models.vllm import VllmRequests, request_params
from epo_trl.rollout import Response

BEFORE, NOW, WITHOUT = "SamplingParams as TRL makes them", "request_params", "request_params, no log-probabilities"


class Requests(VllmRequests):
    """Asks with parameters made by a function."""

    def __init__(self, engine: Any, make: Callable[[], Any]) -> None:
        super().__init__(engine)
        self._make = make

    def make_params(self, number: int) -> Any:
        """Returns the parameters of a request."""
        return self._make()


class RequestsAsBefore(Requests):
    """Reads the log-probabilities with TRL's `extract_logprobs`."""

    def collect(self, seconds: float | None) -> list[Response]:
        """Runs steps of vLLM until a response is ready."""
        while not (finished := [output for output in self.llm_engine.step() if output.finished]):
            pass
        self._pending -= {output.request_id for output in finished}
        logprobs, _ = extract_logprobs(finished)
        return [
            Response(int(output.request_id), list(output.outputs[0].token_ids), [token[0] for token in logprobs[i]])
            for i, output in enumerate(finished)
        ]


class Clock:
    """Adds up the CPU time of a function, and counts its calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self.calls, self._call = 0.0, 0, getattr(owner, name)
        setattr(owner, name, self._timed)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return self._call(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - start
            self.calls += 1


def play(requests: Requests, prompts: list[list[int]]) -> dict[int, Response]:
    """Returns the responses to all prompts, which are asked at once."""
    torch.manual_seed(0)
    for number, ids in enumerate(prompts):
        requests.submit(number, ids)
    found: dict[int, Response] = {}
    while len(found) < len(prompts):
        found |= {response.number: response for response in requests.collect(None)}
    return found


def make_engine(given: Any) -> Any:
    """Starts vLLM on a small model with random weights."""
    from vllm import LLM

    tokenizer = build_tokenizer(corpus(ToySuite(), "compact"))
    with tempfile.TemporaryDirectory() as folder:
        build_model(tokenizer, family="llama", hidden_size=64, heads=2, max_position_embeddings=1024).save_pretrained(
            folder
        )
        tokenizer.save_pretrained(folder)
        llm = LLM(folder, max_model_len=1024, max_num_seqs=given.requests, logprobs_mode="processed_logprobs")
    return llm.llm_engine


def main() -> None:
    """Measures the ways and prints a table."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=256, help="requests at once")
    options.add_argument("--tokens", type=int, default=64, help="length of the prompts and the responses")
    given = options.parse_args()
    engine = make_engine(given)
    from vllm import SamplingParams

    settings = {"temperature": 1.0, "max_tokens": given.tokens, "ignore_eos": True}
    ways = {
        BEFORE: RequestsAsBefore(engine, lambda: SamplingParams(logprobs=0, **settings)),
        NOW: Requests(engine, lambda: request_params(logprobs=0, **settings)),
        WITHOUT: Requests(engine, lambda: request_params(logprobs=None, **settings)),
    }
    prompts = [[5 + (7 * i + k) % 40 for k in range(given.tokens)] for i in range(given.requests)]
    core, outputs = Clock(engine.engine_core, "get_output"), Clock(engine.output_processor, "process_outputs")
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    answers: dict[str, dict[int, Response]] = {}
    for number in range(-1, given.rounds):
        for way, requests in ways.items():
            start, core.seconds, core.calls, outputs.seconds = time.thread_time(), 0.0, 0, 0.0
            answers[way] = play(requests, prompts)
            all_seconds = time.thread_time() - start - core.seconds
            if number >= 0:
                rows[way].append((1e3 * all_seconds / core.calls, 1e3 * outputs.seconds / core.calls))
        assert answers[NOW] == answers[BEFORE]
        assert all(answers[WITHOUT][i].ids == response.ids for i, response in answers[BEFORE].items())
    report(rows, given)
    os._exit(0)  # vLLM's threads outlive the main one


def report(rows: dict[str, list[tuple[float, float]]], given: Any) -> None:
    """Prints and writes what was measured."""
    both = {way: [statistics.median(column) for column in zip(*rounds, strict=True)] for way, rounds in rows.items()}
    cells = [(way, f"{ms:.2f}", f"{part:.2f}", f"{ms / both[BEFORE][0]:.2f}") for way, (ms, part) in both.items()]
    print(table(("requests", "ms per step", "of it process_outputs", "ratio"), cells), flush=True)
    write(given.json, requests=given.requests, tokens=given.tokens, results=rows, vllm=vllm_barrier.SETTINGS)


if __name__ == "__main__":
    main()
