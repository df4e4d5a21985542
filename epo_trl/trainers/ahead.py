"""Rollouts that run ahead: an engine on other devices plays the next batches while the trainer updates.

The same idea as in AReaL (arXiv 2505.24298) and TRL's experimental asynchronous GRPO, here with whole batches: weights
are sent only between rollouts, so each batch has one behaviour policy. TRL's truncated importance weights correct for
its age, from the log-probabilities that the engine returns.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from epo_trl.errors import InputError
from epo_trl.trainers.collection import Played
from epo_trl.trainers.engines import VllmServerEngine

_SECONDS_TO_STOP = 10.0  # until a rollout that is no longer needed is left to itself


class Flight(NamedTuple):
    """A batch that is played in the background."""

    tasks: list[str]  # of this rank
    weights: int  # index of the RL step at whose start the engine got the weights
    played: Future[Played]


class RolloutAhead:
    """Plays the batches of the next RL steps in the background, one after the other.

    The main thread sends weights, and makes all collective calls. Where it needs the engine or the environments itself
    (evaluation, groups that are replaced), it first waits until the background has ended its rollouts.

    Args:
        trainer: An `EPOTrainer` whose engine is on other devices.

    Attributes:
        steps: Largest number of RL steps between the weights that play a batch and those that train on it.

    Raises:
        InputError: If the engine shares the trainer's devices.
    """

    def __init__(self, trainer: Any):
        self._trainer, self._engine, self.steps = trainer, trainer.engine, trainer.args.rollout_ahead
        if not isinstance(self._engine, VllmServerEngine):
            raise InputError(
                f"rollout_ahead: expected 0 with an engine that shares the trainer's devices or generates in lockstep, "
                f"got {self.steps}. Use a vLLM server without constrained sampling: use_vllm true, vllm_mode server"
            )
        # The main thread encodes prompts too; a tokenizer is for one thread at a time.
        self._context = copy.deepcopy(trainer.rules.context)
        self._flights: dict[int, Flight] = {}  # by RL step
        self._last: Future[Played] | None = None  # the rollout that ends last
        self._ended: float | None = None  # time at which the last rollout in the background ended
        self._weights = 0  # RL step at whose start the engine got its weights
        self._tasks: Iterator[tuple[int, list[str]]] | None = None
        self._lag = 0  # age in RL steps of the weights that played this batch
        self._orders: SimpleQueue[tuple[int, Flight]] = SimpleQueue()
        # A daemon, since an environment that hangs must not keep the program alive.
        self._thread = threading.Thread(target=self._play_all, name="rollout ahead", daemon=True)
        self._thread.start()

    @property
    def is_playing(self) -> bool:
        """Whether a rollout has not ended yet."""
        return self._last is not None and not self._last.done()

    def take(self, tasks: Sequence[str]) -> Played | None:
        """Returns the batch of this RL step, or `None` if it has to be played now. Collective.

        Args:
            tasks: Tasks of this rank, as TRL has drawn them.
        """
        rl_step = self._trainer.rl_step
        flight = self._flights.pop(rl_step, None)
        played = flight.played.result() if flight is not None else None
        if self._weights < rl_step - 1:  # the engine kept its weights in the last RL step
            self._engine.weights_changed()
        fits = flight is not None and flight.tasks == list(tasks)
        if all(self._trainer.ranks.gather([fits])):
            assert flight is not None
            self._lag = rl_step - flight.weights
            return played
        self.wait()  # the first batch of a run, or of one that was resumed
        self._flights.clear()
        self._tasks, self._lag, self._ended = None, 0, None
        return None

    def start_next(self, waited: float) -> dict[str, float]:
        """Starts to play the next batches, and returns the metrics of this one. Collective.

        First sends the weights, unless the engine already plays a later batch.

        Args:
            waited: Seconds that the trainer has waited for its episodes.
        """
        trainer, first = self._trainer, self._trainer.rl_step + 1
        if all(trainer.ranks.gather([not self.is_playing])):
            self._engine.send_weights()
            self._weights = trainer.rl_step
        else:
            self._engine.keep_weights()
        idle = 0.0 if self._ended is None or self.is_playing else time.perf_counter() - self._ended
        last = min(self._weights + self.steps, trainer.total_rl_steps - 1)
        for rl_step in range(max(self._flights, default=first - 1) + 1, last + 1):
            flight = Flight(self._tasks_of(rl_step), self._weights, Future())
            self._flights[rl_step], self._last = flight, flight.played
            self._orders.put((rl_step, flight))
        return {"lag/rl_steps": float(self._lag), "time/wait_for_rollout": waited, "time/wait_for_update": idle}

    def _play_all(self) -> None:
        while True:
            rl_step, flight = self._orders.get()
            played = Played()
            try:
                with self._engine.ahead(rl_step):
                    play = partial(self._trainer.play, context=self._context)
                    self._trainer.collector.play(flight.tasks, play, played)
            except BaseException as error:
                self._ended = time.perf_counter()
                flight.played.set_exception(error)
            else:
                self._ended = time.perf_counter()
                flight.played.set_result(played)

    def _tasks_of(self, rl_step: int) -> list[str]:
        self._tasks = self._tasks or enumerate(self._trainer.tasks_of_rl_steps())
        return next(tasks for number, tasks in self._tasks if number == rl_step)

    def wait(self) -> None:
        """Waits until no rank's engine plays a batch. Collective; does nothing in the background itself."""
        if self._last is not None and threading.current_thread() is not self._thread:
            wait_for([self._last])
            self._engine.stopped = False
            self._trainer.accelerator.wait_for_everyone()

    def stop(self) -> None:
        """Drops the batches that nobody has taken, and lets those in progress end at their next request."""
        self._engine.stopped = True
        if self._last is not None:
            wait_for([self._last], _SECONDS_TO_STOP)
        self._engine.stopped = self.is_playing
        self._flights.clear()
