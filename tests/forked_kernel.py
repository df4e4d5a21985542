"""`forked_kernel.py -f FILE`: the kernel of a notebook, for a process that has made its imports already."""

import asyncio
from functools import partialmethod

from ipykernel.kernelapp import launch_new_instance
from tqdm import tqdm

tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # TQDM_DISABLE, which is read at the import
asyncio.set_event_loop(asyncio.new_event_loop())  # the other belongs to the parent
launch_new_instance()
