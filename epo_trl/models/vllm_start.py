"""The start of a vLLM in this process."""

from __future__ import annotations

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
