"""Lets the threads of a CPU run sleep while they wait for each other. Every program of ours imports it before torch.

OpenMP's threads meet at the end of each piece of work. By default they spin there, some milliseconds at a time: alone
that saves a wake-up, but beside another program the one that spins takes the core that the one it waits for needs. The
runtime reads its settings once, when torch is loaded; a setting of the user's own stays. See docs/performance.md.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Of the standard, of GNU's runtime (in torch's builds for Linux), of LLVM's and Intel's.
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def sleep_while_waiting(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes waiting threads sleep, unless the environment says how they wait."""
    if not any(name in environ for name in SETTINGS):
        environ["OMP_WAIT_POLICY"] = "passive"


sleep_while_waiting()
