"""The worker process: `python -m epo_trl.envs.pool_program FD`. The other end is `epo_trl.envs.pool`.

A separate thread reads the requests, so the pool never blocks when it sends one. The process exits when the pipe
closes. So it ends with the pool's process, however that ended and whatever a game is doing, and so do the games' own
processes.
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
from epo_trl.envs.border import error_text


def answer(suite: TaskSuite, envs: dict[int, TextEnv], seat: int, what: str, arguments: tuple[Any, ...]) -> Any:
    """Runs `"reset"`, `"step"`, `"reseed"` or `"close"` on the seat's environment and returns the result."""
    if what == "close":
        return envs.pop(seat).close() if seat in envs else None
    if seat not in envs:
        envs[seat] = suite.make_env()
    if what == "reset":
        seed, options = arguments
        return envs[seat].reset(seed=seed, options=options)
    return getattr(envs[seat], what)(*arguments)


def main() -> None:
    """Answers requests in the order of their arrival until the pipe closes."""
    connection = Connection(int(sys.argv[1]))
    os.register_at_fork(after_in_child=connection.close)  # else a game's child would keep our end of the pipe open
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    sys.path[:], python_path, pickled = requests.get()
    del os.environ["PYTHONPATH"]
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path
    suite: TaskSuite | None = None
    envs: dict[int, TextEnv] = {}
    while True:
        request = requests.get()
        try:
            suite = suite or pickle.loads(pickled)
            message = pickle.dumps((True, answer(suite, envs, *request)))
        except BaseException as error:  # Ctrl-C does not arrive here: the process leads its own session
            message = pickle.dumps((False, str(error) if isinstance(error, EnvError) else error_text(error)))
        connection.send_bytes(message)


def _read(connection: Connection, requests: SimpleQueue[Any]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
