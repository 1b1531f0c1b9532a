"""Waiting for what will be: by looking, with a limit that slow machines keep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


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


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """The same for tests without a loop; AssertionError after the limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.05)
