"""Lets waiting CPU threads sleep instead of spin. `import epo_trl` is enough, before torch.

OpenMP threads synchronize at the end of each piece of work. By default they spin there for some milliseconds. On an
idle machine that saves a wake-up; on a shared one the spinning thread occupies the core that another thread needs. The
runtime reads its settings once, when torch is loaded. A setting made by the user is kept. See docs/performance.md.
"""

import os

# The OpenMP standard's variable, GNU's (torch's Linux builds), LLVM's and Intel's.
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")

if not any(name in os.environ for name in SETTINGS):
    os.environ["OMP_WAIT_POLICY"] = "passive"
