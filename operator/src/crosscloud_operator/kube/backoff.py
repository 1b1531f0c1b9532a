"""Growing pauses between tries, with jitter so that many clients don't come back at once."""

from __future__ import annotations

import random


class Backoff:
    """Each `next()` is between half and all of a bound that doubles from `first` to `last` seconds."""

    def __init__(self, first: float, last: float, rng: random.Random | None = None) -> None:
        self._first = first
        self._last = last
        self._bound = first
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, protects nothing

    def next(self) -> float:
        """Seconds to wait before the next try."""
        bound = self._bound
        self._bound = min(self._last, bound * 2)
        return bound * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._bound = self._first
