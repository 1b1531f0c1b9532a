"""Waits for a condition and says, when it doesn't come true, where to look."""

from __future__ import annotations

import time
from collections.abc import Callable

from crosscloud_lab.errors import ComponentError

READY_SECONDS = 180.0
"""Patience for one component: a cold start of three clusters on two busy cores fits several times."""


def wait_until(
    ready: Callable[[], bool],
    what: str,
    hint: Callable[[], str],
    *,
    alive: Callable[[], bool] = lambda: True,
    timeout: float = READY_SECONDS,
) -> None:
    """Polls `ready`; ComponentError when `timeout` seconds pass or `alive` turns false."""
    deadline = time.monotonic() + timeout
    pause = 0.05
    while not ready():
        if not alive():
            raise ComponentError(f"{what} ended: {hint()}")
        if time.monotonic() > deadline:
            raise ComponentError(f"{what} isn't ready after {timeout:.0f} s: {hint()}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
