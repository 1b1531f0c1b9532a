"""One rank's part of the fp32 weights, and the digest of such parts."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from crosscloud_trainer.layout import Index, Interval

DIGEST_BITS = 64
_CHUNK = 1 << 18
_ROW = 4096


class Shard:
    """One rank's part of a full-model fp32 vector, by intervals; compact: end to end, without padding.

    Of the weights, or of a gradient. Padding is never read or written; under ZeRO 3 it is uninitialised memory.
    """

    def __init__(self, index: Index, intervals: tuple[Interval, ...], parts: Sequence[torch.Tensor]) -> None:
        """`parts` are views of the live memory: flat fp32, one for each interval, of equal length."""
        self.index = index
        self.intervals = intervals
        self.parts = tuple(parts)
        self._starts = list(accumulate((interval.elements for interval in intervals), initial=0))
        self.elements = self._starts.pop()
        self.device = parts[0].device if parts else torch.device("cpu")
        self._whole: torch.Tensor | None = None

    @staticmethod
    def of_flat(index: Index, intervals: tuple[Interval, ...], values: torch.Tensor) -> "Shard":
        """The intervals at their offsets in one flat tensor."""
        shard = Shard(index, intervals, [values[i.offset : i.offset + i.elements] for i in intervals])
        shard.device = values.device
        ends = accumulate((i.elements for i in intervals), initial=0)
        if all(i.offset == end for i, end in zip(intervals, ends, strict=False)):
            shard._whole = values[: shard.elements]
        return shard

    def read(self) -> torch.Tensor:
        """The compact values, flat fp32; a view where the intervals lie end to end, else a copy. Not to be
        written to.
        """
        if self._whole is not None:
            return self._whole
        return torch.cat(self.parts) if self.parts else torch.empty(0, device=self.device)

    def copy(self) -> torch.Tensor:
        """A copy of the compact values, flat fp32."""
        copied = torch.empty(self.elements, device=self.device)
        for start, stop in self.pieces():
            copied[start:stop].copy_(self.elements_at(start, stop))
        return copied

    def elements_at(self, start: int, stop: int) -> torch.Tensor:
        """The live values of these places in the compact vector, which lie in one interval."""
        number = bisect_right(self._starts, start) - 1
        first = self._starts[number]
        return self.parts[number][start - first : stop - first]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The compact vector as pieces of little memory, each in one interval: first place and end."""
        for first, interval in zip(self._starts, self.intervals, strict=True):
            for start, stop in _chunks(interval.elements):
                yield first + start, first + stop

    def digest(self) -> int:
        """See `digest`."""
        found = Digest(self.index, self.intervals)
        for start, stop in self.pieces():
            found.add(0, start, self.elements_at(start, stop))
        return found.value

    def write(self, compact: torch.Tensor) -> None:
        """Overwrites the live memory by compact values."""
        position = 0
        for part in self.parts:
            part.copy_(compact[position : position + part.numel()])
            position += part.numel()


def digest(index: Index, intervals: tuple[Interval, ...], vectors: list[torch.Tensor]) -> int:
    """Digest of one rank's parts of one or more full-model vectors; unsigned 64 bits.

    `vectors` are compact flat fp32 tensors. The digest is the sum modulo 2**64, over all elements, of the element's
    bits times an odd key of its canonical number (the k-th vector's numbers follow the ones of the vector before). So
    the sum over the ranks of a replica doesn't depend on how the elements are shared, and a single bit or a swap of two
    values shows.
    """
    found = Digest(index, intervals)
    for number, vector in enumerate(vectors):
        start = 0
        for interval in intervals:
            found.add(number, start, vector[start : start + interval.elements])
            start += interval.elements
    return found.value


class Digest:
    """A digest that is made piece by piece, in any order."""

    def __init__(self, index: Index, intervals: tuple[Interval, ...]) -> None:
        self._index, self._intervals = index, intervals
        self._starts = list(accumulate((interval.elements for interval in intervals), initial=0))
        self._sum: torch.Tensor | None = None

    def add(self, number: int, start: int, values: torch.Tensor) -> None:
        """The values from place `start` on of the compact vector `number`; they lie in one interval."""
        place = bisect_right(self._starts, start) - 1
        interval = self._intervals[place]
        first = number * self._index.elements + self._index.first_elements[interval.parameter] + interval.start
        first += start - self._starts[place]
        bits = values.view(torch.int32)
        for low, high in _chunks(values.numel()):
            part = _keyed_sum(bits[low:high], first + low)
            self._sum = part if self._sum is None else self._sum.add_(part)

    @property
    def value(self) -> int:
        return 0 if self._sum is None else int(self._sum) % (1 << DIGEST_BITS)


def _keyed_sum(bits: torch.Tensor, first: int) -> torch.Tensor:
    """Sum of 32-bit values, numbered from `first`, times their keys.

    A number's key is that of its row of `_ROW` numbers times that of its place in it, so that most keys are made once.
    int64 arithmetic wraps round, which makes it the unsigned arithmetic that is meant.
    """
    row, place = divmod(first, _ROW)
    rows = -(-(place + bits.numel()) // _ROW)
    values = torch.zeros(rows * _ROW, dtype=torch.int64, device=bits.device)
    values[place : place + bits.numel()] = bits
    sums = values.view(rows, _ROW).mul_(_place_keys(bits.device)).sum(dim=1)
    return sums.mul_(_keys(_ROW + row, rows, bits.device)).sum()


@cache
def _place_keys(device: torch.device) -> torch.Tensor:
    return _keys(0, _ROW, device)


def _keys(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers `first` to `first + count` of SplitMix64 (Steele et al. 2014) from seed 0, each made odd."""
    state = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    state.mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state.bitwise_xor_(_shifted(state, shift)).mul_(_signed(factor))
    return state.bitwise_xor_(_shifted(state, 31)).bitwise_or_(1)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """As of unsigned numbers: a shift of signed ones copies the sign."""
    return (state >> bits).bitwise_and_((1 << (DIGEST_BITS - bits)) - 1)


def _signed(number: int) -> int:
    return int(np.uint64(number).astype(np.int64))


def _chunks(elements: int) -> Iterator[tuple[int, int]]:
    """Bounds of pieces that keep the int64 temporaries of a digest small, and in the caches of a CPU."""
    for start in range(0, elements, _CHUNK):
        yield start, min(start + _CHUNK, elements)
