"""Refusals are counted all and logged some: an attacker must not be able to fill the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Refusals:
    """Counts by reason; at most one line per reason and `quiet_seconds`, which says how many it stands for."""

    def __init__(self, quiet_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts: Counter[str] = Counter()
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._unlogged: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def add(self, reason: str, address: str, message: str) -> None:
        self._counts[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, -self._quiet_seconds) < self._quiet_seconds:
            self._unlogged[reason] += 1
            return
        more = self._unlogged.pop(reason, 0)
        self._logged_at[reason] = now
        line = " ".join(message.split())[:500]
        _log.warning("refused %s (%s): %s%s", address, reason, line, f"; {more} more before" if more else "")

    def counts(self) -> dict[str, int]:
        return dict(self._counts)
