"""Which sequences a rank trains on at a step: a pure function, so that no rank need ask another.

An epoch deals the shuffled sequences to steps, a step's to replicas, a replica's to ranks. The replica's share doesn't
depend on how many ranks it has. What is left of an epoch when no whole step fits any more is left out of that epoch, so
that a step never sees one sequence twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """How `sequences` are dealt to `replicas` replicas that take `batch_size` sequences each at every step."""

    sequences: int
    replicas: int
    batch_size: int
    seed: int

    @property
    def per_step(self) -> int:
        return self.replicas * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self.sequences // self.per_step

    def of_replica(self, step: int, replica: int) -> Indices:
        """Sequence numbers of one replica's batch at `step` (from 0), shape (batch_size,)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.per_step + replica * self.batch_size
        return shuffled(self.sequences, self.seed, epoch)[first : first + self.batch_size]

    def of_rank(self, step: int, replica: int, rank: int, ranks: int) -> Indices:
        """The part of `of_replica` that one of the replica's `ranks` takes, shape (batch_size / ranks,)."""
        share = self.batch_size // ranks
        return self.of_replica(step, replica)[rank * share : (rank + 1) * share]


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch, shape (count,); equal wherever seed and epoch are (bit streams: NEP 19)."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def evaluation_share(sequences: int, limit: int, rank: int, ranks: int) -> Indices:
    """Sequence numbers that `rank` evaluates: at most `limit` in all, spread evenly, the same at every evaluation."""
    count = min(sequences, limit)
    spread = np.arange(count, dtype=np.int64) * sequences // max(count, 1)
    return spread[rank::ranks]
