"""One event loop per process, in its own thread, for asynchronous environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Runs a coroutine in the background and returns the future of its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="epo_trl environments", daemon=True).start()
    return loop
