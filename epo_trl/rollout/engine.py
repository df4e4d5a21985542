"""Engines: what samples the responses of a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from epo_trl.errors import EpoTrlError

# Maps token ids of prompts to token ids of responses, and their log-probabilities if the generator returns them.
Generate = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]] | None]]


class EngineError(EpoTrlError, RuntimeError):
    """An engine could not respond to a prompt."""


@dataclass(frozen=True, slots=True)
class Response:
    """A sampled response."""

    number: int  # of the request
    ids: list[int]  # up to and including the token that ends the response
    logprobs: list[float] | None = None  # in nats, if the engine returns them
    error: str = ""  # reason why there is no response; the episode is aborted


class Engine(ABC):
    """Samples a response to each prompt. The rollout submits the next prompt of an episode when it is known."""

    # Whether `collect` generates for all submitted prompts in one call, so that the rollout first submits those of all
    # running episodes. Otherwise each episode goes on as soon as its own response is there.
    in_step = False

    @abstractmethod
    def submit(self, number: int, prompt_ids: list[int]) -> None:
        """Requests a response of an episode, which has at most one request at a time.

        `prompt_ids` are the token ids of everything that the policy sees.
        """

    @abstractmethod
    def collect(self, seconds: float | None) -> list[Response] | None:
        """Returns the responses that are ready, in any order.

        Waits so many seconds for the first one; with `None` until there is one. An engine that is `in_step` returns
        `None` to end the rollout: no process has a request.
        """


class InStep(Engine):
    """Responds to all running episodes in one call per turn."""

    in_step = True

    def __init__(self, generate: Generate):
        self._generate = generate
        self._prompts: dict[int, list[int]] = {}

    def submit(self, number: int, prompt_ids: list[int]) -> None:
        """Keeps the prompt for the next call."""
        self._prompts[number] = prompt_ids

    def collect(self, seconds: float | None) -> list[Response] | None:
        """Generates for all prompts; `None` without any."""
        prompts, self._prompts = self._prompts, {}
        if not prompts:
            return None
        ids, logprobs = self._generate([*prompts.values()])
        return [Response(number, ids[i], logprobs[i] if logprobs else None) for i, number in enumerate(prompts)]
