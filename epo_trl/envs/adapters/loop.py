"""One event loop of this process, in a thread of its own, for environments that are asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Returns what a coroutine will return; it runs beside the caller."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="epo_trl environments", daemon=True).start()
    return loop
