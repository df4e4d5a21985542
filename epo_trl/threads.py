"""Lets waiting CPU threads sleep instead of spin. `import epo_trl` is enough, before torch or after it.

OpenMP threads synchronize at the end of each piece of work. By default they spin there for some milliseconds. On an
idle machine that saves a wake-up; on a shared one the spinning thread occupies the core that another thread needs. The
runtime reads its settings once, when torch is loaded; after that, see `outnumber_cpus`. A setting made by the user is
kept. See docs/performance.md.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path

# The OpenMP standard's variable, GNU's (torch's Linux builds), LLVM's and Intel's.
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def outnumber_cpus() -> None:
    """Makes the threads of a loaded torch sleep while they wait, by threads that have nothing to do.

    GNU's runtime counts its threads, idle ones too. If there are more than CPUs, a waiting thread looks 100 times
    before it sleeps, not 300,000 times (`do_spin` and `initialize_env` in libgomp). Other runtimes get a warning.
    """
    torch = sys.modules["torch"]
    threads, cpus = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if not 1 < threads <= cpus:
        return
    if "libgomp" not in Path("/proc/self/maps").read_text():
        warnings.warn(
            "torch was loaded before epo_trl, so its waiting threads may spin, which is slow beside other programs. "
            "Import epo_trl first, or set OMP_WAIT_POLICY=passive before the program starts.",
            stacklevel=2,
        )
        return
    started = threading.Event()

    def idle() -> None:
        torch.set_num_threads(cpus - threads + 2)  # of this thread, and of those that start now
        torch.zeros(2**18).add_(1)  # starts them
        started.set()
        threading.Event().wait()

    threading.Thread(target=idle, name="epo_trl idle", daemon=True).start()
    started.wait()
    torch.set_num_threads(threads)


if not any(name in os.environ for name in SETTINGS):
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if "torch" in sys.modules:
        outnumber_cpus()
