"""Which sequences a rank trains on at a step: a pure function of seed, replica and step, so that no rank need ask
another, and a run that goes on at step k takes the very next sequence.

An epoch deals the shuffled sequences of each source to the replicas that read it, one by one. Each replica goes through
its own sequences of all sources in an order of its own and then begins its next epoch: replicas with more of them have
longer epochs, and none waits for another. So in an epoch each sequence is seen by exactly one replica, once. What a
replica takes doesn't depend on how many ranks it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """What a replica has of one source: it is number `reader` of the `readers` that read its `sequences`.

    `place` is the source's number in the manifest.
    """

    place: int
    sequences: int
    reader: int
    readers: int

    @property
    def count(self) -> int:
        """Sequences in each epoch."""
        return len(range(self.reader, self.sequences, self.readers))


@dataclass(frozen=True)
class Split:
    """The sequences of one replica, which takes `batch_size` at every step. There must be at least one."""

    shares: tuple[Share, ...]
    replica: int
    batch_size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        """Sequences in one epoch of this replica."""
        return sum(share.count for share in self.shares)

    def of_replica(self, step: int) -> Indices:
        """What the replica takes at `step` (from 0): rows of (place among its shares, sequence in the source), shape
        (batch_size, 2). An epoch may end and the next one begin within a step."""
        first, stop = step * self.batch_size, (step + 1) * self.batch_size
        parts = []
        while first < stop:
            epoch, place = divmod(first, self.per_epoch)
            taken = min(stop - first, self.per_epoch - place)
            parts.append(_epoch(self, epoch)[place : place + taken])
            first += taken
        return np.concatenate(parts)

    def of_rank(self, step: int, rank: int, ranks: int) -> Indices:
        """The part of `of_replica` that one of the replica's `ranks` takes, shape (batch_size / ranks, 2)."""
        share = self.batch_size // ranks
        return self.of_replica(step)[rank * share : (rank + 1) * share]


@lru_cache(maxsize=2)
def _epoch(split: Split, epoch: int) -> Indices:
    """An epoch of a replica in its order; bit streams of equal seeds are equal everywhere (NEP 19)."""
    parts = []
    for number, share in enumerate(split.shares):
        chosen = _shuffled(share.sequences, split.seed, epoch, share.place)[share.reader :: share.readers]
        parts.append(np.stack([np.full_like(chosen, number), chosen], axis=1))
    if len(parts) == 1:
        return parts[0]
    order = np.random.Generator(np.random.PCG64([split.seed, epoch, _MIXED, split.replica])).permutation(
        split.per_epoch
    )
    return np.concatenate(parts)[order]


_MIXED = 2**31  # no place of a source


def _shuffled(count: int, seed: int, epoch: int, place: int) -> Indices:
    """The order in which a source is dealt, the same for all of its readers, shape (count,)."""
    return np.random.Generator(np.random.PCG64([seed, epoch, place])).permutation(count)


def evaluation_share(sequences: int, limit: int, rank: int, ranks: int) -> Indices:
    """Sequence numbers that `rank` evaluates: at most `limit` in all, spread evenly, the same at every evaluation."""
    count = min(sequences, limit)
    spread = np.arange(count, dtype=np.int64) * sequences // max(count, 1)
    return spread[rank::ranks]
