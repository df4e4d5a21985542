"""What a worker process runs: `python -m epo_trl.envs.pool.program FD`. The other end is `epo_trl.envs.pool.worker`.

A thread of its own reads what is asked, so that the pool never waits to ask, and the process ends with the pipe: when
the pool's process is gone, however it ended and whatever a game is doing here, so is this one, and what games started.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from epo_trl.envs.base import EnvError, TaskSuite, TextEnv
from epo_trl.envs.border import error_text, shown


class Games:
    """The environments of a worker, by seat.

    Args:
        suite: Makes them.
    """

    def __init__(self, suite: TaskSuite) -> None:
        self._suite = suite
        self._envs: dict[int, TextEnv] = {}

    def answer(self, seat: int, what: str, arguments: tuple[Any, ...]) -> Any:
        """Returns what the seat's environment answers to `"reset"`, `"step"` or `"close"`."""
        if what == "close":
            return self._envs.pop(seat).close() if seat in self._envs else None
        if seat not in self._envs:
            self._envs[seat] = self._suite.make_env()
        if what == "reset":
            seed, options = arguments
            return self._envs[seat].reset(seed=seed, options=options)
        return self._envs[seat].step(*arguments)


def main() -> None:
    """Answers requests, in the order in which they come, until the pipe ends."""
    connection = Connection(int(sys.argv[1]))
    os.register_at_fork(after_in_child=connection.close)  # or our end would go unnoticed while a game's child lives
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    sys.path[:], suite = requests.get()
    games: Games | None = None
    while True:
        request = requests.get()
        try:
            games = games or Games(pickle.loads(suite))
            answer = pickle.dumps((True, games.answer(*request)))
        except BaseException as error:  # Ctrl-C does not come here: the process has a session of its own
            answer = pickle.dumps((False, shown(error) if isinstance(error, EnvError) else error_text(error)))
        connection.send_bytes(answer)


def _read(connection: Connection, requests: SimpleQueue[Any]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
