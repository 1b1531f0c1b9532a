"""Growing pauses between tries, with jitter so that many clients don't come back at once."""

from __future__ import annotations

import random


class Backoff:
    """Each `next()` is between half and all of a bound that doubles from `first` to `last` seconds."""

    def __init__(self, first: float, last: float) -> None:
        self._first = first
        self._last = last
        self._bound = first

    def next(self) -> float:
        """Seconds to wait before the next try."""
        bound = self._bound
        self._bound = min(self._last, bound * 2)
        return bound * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, protects nothing

    def reset(self) -> None:
        self._bound = self._first
