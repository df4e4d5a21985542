"""Lets waiting CPU threads sleep instead of spin. Every program of this package imports it before torch.

OpenMP threads synchronize at the end of each piece of work. By default they spin there for some milliseconds. On an
idle machine that saves a wake-up; on a shared one the spinning thread occupies the core that another thread needs. The
runtime reads its settings once, when torch is loaded. A setting made by the user is kept. See docs/performance.md.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# The OpenMP standard's variable, GNU's (torch's Linux builds), LLVM's and Intel's.
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def sleep_while_waiting(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes waiting threads sleep, unless the environment already sets their wait policy."""
    if not any(name in environ for name in SETTINGS):
        environ["OMP_WAIT_POLICY"] = "passive"


sleep_while_waiting()
