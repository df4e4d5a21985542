"""A rollout that runs ahead: an engine on other devices plays the next batch while the trainer updates.

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

    rl_step: int
    tasks: list[str]  # of this rank
    played: Future[Played]


class RolloutAhead:
    """Plays the batch of the next RL step in the background, with the weights from the start of this one.

    The main thread sends weights, and makes all collective calls. Where it needs the engine or the environments itself
    (evaluation, groups that are replaced), it first waits until the background has ended its rollout.

    Args:
        trainer: An `EPOTrainer` whose engine is on other devices.

    Raises:
        InputError: If the engine shares the trainer's devices.
    """

    def __init__(self, trainer: Any):
        self._trainer, self._engine = trainer, trainer.engine
        if not isinstance(self._engine, VllmServerEngine):
            raise InputError(
                "rollout_ahead: expected false with an engine that shares the trainer's devices or generates in "
                "lockstep, got true. Use a vLLM server without constrained sampling: use_vllm true, vllm_mode server"
            )
        # The main thread encodes prompts too; a tokenizer is for one thread at a time.
        self._context = copy.deepcopy(trainer.rules.context)
        self._next: Flight | None = None
        self._last: Future[Played] | None = None  # the rollout that began last
        self._ended: float | None = None  # time at which it ended
        self._tasks: Iterator[tuple[int, list[str]]] | None = None
        self._lag = 0  # age in RL steps of the weights that played this batch
        self._orders: SimpleQueue[Flight] = SimpleQueue()
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
        flight, self._next = self._next, None
        played = flight.played.result() if flight is not None else None
        if all(self._trainer.ranks.gather([flight is not None and flight.tasks == list(tasks)])):
            self._lag = 1
            return played
        self.wait()  # the first batch of a run, or of one that was resumed
        self._tasks, self._lag, self._ended = None, 0, None
        return None

    def start_next(self, waited: float) -> dict[str, float]:
        """Sends the weights, starts to play the next batch, and returns the metrics of this one. Collective.

        Args:
            waited: Seconds that the trainer has waited for its episodes.
        """
        following = self._trainer.rl_step + 1
        self._engine.send_weights()
        idle = 0.0 if self._ended is None else time.perf_counter() - self._ended
        if following < self._trainer.total_rl_steps:
            self._next = Flight(following, self._tasks_of(following), Future())
            self._last = self._next.played
            self._orders.put(self._next)
        return {"lag/rl_steps": float(self._lag), "time/wait_for_rollout": waited, "time/wait_for_update": idle}

    def _play_all(self) -> None:
        while True:
            rl_step, tasks, future = self._orders.get()
            played = Played()
            try:
                with self._engine.ahead(rl_step):
                    self._trainer.collector.play(tasks, partial(self._trainer.play, context=self._context), played)
            except BaseException as error:
                self._ended = time.perf_counter()
                future.set_exception(error)
            else:
                self._ended = time.perf_counter()
                future.set_result(played)

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
        """Drops the batch that nobody has taken, and lets one in progress end at its next request."""
        self._engine.stopped = True
        if self._last is not None:
            wait_for([self._last], _SECONDS_TO_STOP)
        self._engine.stopped = self.is_playing
        self._next = None
