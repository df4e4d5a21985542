"""Starts a server in its own process and waits until it accepts connections. The tests use it too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def free_port() -> int:
    """Returns a port that nobody uses."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def running_server(command: Callable[[int], Sequence[str]]) -> Iterator[tuple[str, int]]:
    """Yields the server's URL and process id.

    Args:
        command: Function from the port to the words of the command.
    """
    port = free_port()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    server = subprocess.Popen(command(port), env=env)
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the server did not start"
            time.sleep(0.2)
        else:
            raise TimeoutError("the server accepts no connection")
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        server.kill()
        server.wait()


def served(*words: str) -> AbstractContextManager[tuple[str, int]]:
    """Runs `epo-trl serve` with these words, see `running_server`."""
    return running_server(lambda port: [sys.executable, "-m", "epo_trl.cli", "serve", *words, "--port", str(port)])
