"""Waiting for what will be: by looking, with a limit that slow machines keep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def until(condition: Callable[[], object | Awaitable[object]], seconds: float = 30) -> None:
    """Return when the condition holds; TimeoutError after the limit."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)


def eventually(check: Callable[[], Any], what: str, seconds: float = 90.0, every: float = 0.1) -> Any:
    """The first true answer of `check`; AssertionError with the last one after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, f"{what}: still {answer!r} after {seconds:g} s"
        time.sleep(every)
    return answer


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """The same for tests without a loop; AssertionError after the limit."""
    eventually(condition, "what is waited for", seconds, 0.05)
