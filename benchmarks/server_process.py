"""Starts a server in its own process and waits until it accepts connections. The tests use it too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


def free_port() -> int:
    """Returns a port that nobody uses."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start_program(words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `python WORDS...`."""
    return subprocess.Popen([sys.executable, *words], env=env)


@contextmanager
def running_server(
    command: Callable[[int], Sequence[str]], start: Callable[..., Any] = start_program
) -> Iterator[tuple[str, int]]:
    """Yields the server's URL and process id.

    Args:
        command: Function from the port to the words of the command, after `python`.
        start: Starts a process with the words, and with variables of the environment.
    """
    port = free_port()
    server = start(command(port), {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
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


def served(*words: str, **options: Any) -> AbstractContextManager[tuple[str, int]]:
    """Runs `epo-trl serve` with these words, see `running_server`."""
    return running_server(lambda port: ["-m", "epo_trl.cli", "serve", *words, "--port", str(port)], **options)
