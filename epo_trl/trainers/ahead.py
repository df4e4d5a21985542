"""Rollouts that run ahead: an engine on other devices plays the next batches while the trainer updates.

The same idea as in AReaL (arXiv 2505.24298) and TRL's experimental asynchronous GRPO, here with whole batches: weights
are sent only between rollouts, so each batch has one behaviour policy. TRL's truncated importance weights correct for
its age, from the log-probabilities that the engine returns.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from epo_trl.errors import InputError
from epo_trl.trainers.collection import Played
from epo_trl.trainers.lag import check_correction

_SECONDS_TO_STOP = 10.0  # until a rollout that is no longer needed is left to itself


class Flight(threading.Thread):
    """A batch that is played in the background.

    Args:
        rl_step: Index of the RL step that will train on it.
        tasks: Tasks of this rank.
        weights: Index of the RL step at whose start the engine got the weights.
        play: Plays the batch.
        previous: Batch that the engine plays first.

    Attributes:
        ended: Time at which the rollout ended, in seconds of `time.perf_counter`.
    """

    def __init__(
        self, rl_step: int, tasks: list[str], weights: int, play: Callable[[Played], Any], previous: Flight | None
    ):
        super().__init__(name=f"rollout of RL step {rl_step}", daemon=True)
        self.rl_step, self.tasks, self.weights = rl_step, tasks, weights
        self._play, self._previous = play, previous
        self._played, self._error = Played(), None  # type: tuple[Played, BaseException | None]
        self.ended = 0.0

    def run(self) -> None:
        """Plays the batch; an exception is kept for `result`."""
        if self._previous is not None:
            self._previous.join()
            self._previous = None
        try:
            self._play(self._played)
        except BaseException as error:
            self._error = error
        self.ended = time.perf_counter()

    def result(self) -> Played:
        """Waits for the end of the rollout, and returns its episodes or raises its exception."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._played


class RolloutAhead:
    """Plays the batches of the next RL steps in the background.

    The main thread sends weights, and makes all collective calls. Where it needs the engine or the environments itself
    (evaluation, groups that are replaced), it first waits until the background has ended its rollouts.

    Args:
        trainer: An `EPOTrainer` whose engine is on other devices.

    Attributes:
        steps: Largest number of RL steps between the weights that play a batch and those that train on it.
    """

    def __init__(self, trainer: Any):
        self.steps: int = trainer.args.rollout_ahead
        self._trainer, self._engine = trainer, trainer.player.engine
        # The main thread encodes prompts too; a tokenizer is for one thread at a time.
        self._context = copy.deepcopy(trainer.rules.context)
        self._flights: dict[int, Flight] = {}  # by RL step
        self._last: Flight | None = None  # the one started last
        self._weights = 0  # RL step at whose start the engine got its weights
        self._tasks: Iterator[tuple[int, list[str]]] | None = None
        self._lag = 0  # age in RL steps of the weights that played this batch

    def take(self, tasks: Sequence[str]) -> Played | None:
        """Returns the batch of this RL step, or `None` if it has to be played now. Collective.

        Args:
            tasks: Tasks of this rank, as TRL has drawn them.
        """
        rl_step = self._trainer.rl_step
        flight = self._flights.pop(rl_step, None)
        played = flight.result() if flight is not None else None
        if self._weights < rl_step - 1:  # the engine kept its weights in the last RL step
            self._engine.weights_changed()
        fits = flight is not None and flight.tasks == list(tasks)
        if all(self._trainer.ranks.gather([fits])):
            assert flight is not None
            self._lag = rl_step - flight.weights
            return played
        self.wait()  # the first batch of a run, or of one that was resumed
        self._flights.clear()
        self._tasks, self._lag = None, 0
        return None

    def start_next(self, waited: float) -> dict[str, float]:
        """Starts to play the next batches, and returns the metrics of this one. Collective.

        First sends the weights, unless the engine already plays a later batch.

        Args:
            waited: Seconds that the trainer has waited for its episodes.
        """
        trainer, first = self._trainer, self._trainer.rl_step + 1
        if all(trainer.ranks.gather([not any(flight.is_alive() for flight in self._flights.values())])):
            self._engine.send_weights()
            self._weights = trainer.rl_step
        else:
            self._engine.keep_weights()
        idle = time.perf_counter() - self._last.ended if self._last is not None and not self._last.is_alive() else 0.0
        last = min(self._weights + self.steps, trainer.total_rl_steps - 1)
        for rl_step in range(max(self._flights, default=first - 1) + 1, last + 1):
            tasks = self._tasks_of(rl_step)
            play = partial(trainer.collector.play, tasks, partial(self._play, rl_step))
            self._last = Flight(rl_step, tasks, self._weights, play, self._last)
            self._flights[rl_step] = self._last
            self._last.start()
        return {"lag/rl_steps": float(self._lag), "time/wait_for_rollout": waited, "time/wait_for_update": idle}

    def _play(self, rl_step: int, *args: Any, **kwargs: Any) -> Any:
        with self._engine.ahead(rl_step):
            return self._trainer.play(*args, context=self._context, **kwargs)

    def _tasks_of(self, rl_step: int) -> list[str]:
        self._tasks = self._tasks or enumerate(self._trainer.tasks_of_rl_steps())
        return next(tasks for number, tasks in self._tasks if number == rl_step)

    def wait(self) -> None:
        """Waits until no rank's engine plays a batch. Collective; does nothing in the background itself."""
        if self._last is not None and not isinstance(threading.current_thread(), Flight):
            self._last.join()
            self._engine.stopped = False
            self._trainer.accelerator.wait_for_everyone()

    def stop(self) -> None:
        """Drops the batches that nobody has taken, and lets those in progress end at their next request."""
        self._engine.stopped = True
        if self._last is not None:
            self._last.join(_SECONDS_TO_STOP)
        self._engine.stopped = self._last is not None and self._last.is_alive()
        self._flights.clear()
        self._tasks = None


def make_rollout_ahead(trainer: Any) -> RolloutAhead:
    """Returns what plays ahead for a trainer with `rollout_ahead`.

    Raises:
        InputError: If the engine shares the trainer's devices, the lag is simulated, or TRL corrects for it in another
            way than `lag_correction`.
    """
    args = trainer.args
    if trainer.player.engine.shares_devices:
        raise InputError(
            f"rollout_ahead: expected 0 with an engine that shares the trainer's devices or generates in step, got "
            f"{args.rollout_ahead}. Use a vLLM server without constrained sampling: use_vllm true, vllm_mode server"
        )
    if args.simulated_lag:
        raise InputError(
            f"rollout_ahead: expected 0 with simulated_lag {args.simulated_lag}, got {args.rollout_ahead}. Either lags"
        )
    check_correction(args)
    return RolloutAhead(trainer)
