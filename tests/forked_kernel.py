"""`forked_kernel.py -f FILE`: the kernel of a notebook, for a process that has made its imports already."""

import asyncio
import sys
from functools import partialmethod

from ipykernel.kernelapp import launch_new_instance
from tqdm import tqdm

tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # TQDM_DISABLE, which is read at the import
for name in [name for name in sys.modules if name.partition(".")[0] in ("matplotlib", "mpl_toolkits")]:
    del sys.modules[name]  # IPython shows the plots of a matplotlib that is imported in its notebook
asyncio.set_event_loop(asyncio.new_event_loop())  # the other belongs to the parent
launch_new_instance()
