"""The start of a vLLM in this process."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm


@contextmanager
def starting_vllm(*, quiet: bool = False) -> Iterator[None]:
    """Says that the block loads the model and starts vLLM, which takes a minute or more on a GPU, and how long it took.

    Args:
        quiet: Whether to say nothing, as on all ranks but the first.
    """
    start = time.monotonic()
    if not quiet:
        tqdm.write("loading the model and starting vLLM in the process ...", file=sys.stderr)
    yield
    if not quiet:
        tqdm.write(f"vLLM is ready after {time.monotonic() - start:.0f} s", file=sys.stderr)


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
