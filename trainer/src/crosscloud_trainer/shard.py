"""One rank's part of the fp32 weights, and the digest of such parts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from crosscloud_trainer.layout import Index, Interval

DIGEST_BITS = 64
_CHUNK = 1 << 20


class Shard:
    """One rank's part of a full-model fp32 vector, by intervals; compact: end to end, without padding.

    Of the weights, or of a gradient. Padding is never read or written; under ZeRO 3 it is uninitialised memory.
    """

    def __init__(self, index: Index, intervals: tuple[Interval, ...], parts: Sequence[torch.Tensor]) -> None:
        """`parts` are views of the live memory: flat fp32, one for each interval, of equal length."""
        self.index = index
        self.intervals = intervals
        self.parts = tuple(parts)
        self.elements = sum(interval.elements for interval in intervals)
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

    def write(self, compact: torch.Tensor) -> None:
        """Overwrites the live memory by compact values."""
        position = 0
        for part in self.parts:
            part.copy_(compact[position : position + part.numel()])
            position += part.numel()


def digest(index: Index, intervals: tuple[Interval, ...], vectors: list[torch.Tensor]) -> int:
    """Digest of one rank's parts of one or more full-model vectors; unsigned 64 bits.

    `vectors` are compact flat fp32 tensors. The digest is the sum modulo 2**64, over all elements, of a mix
    of the element's bits with its canonical number (the k-th vector's numbers follow the ones of the vector
    before). So the sum over the ranks of a replica doesn't depend on how the elements are shared, and a swap
    of two values shows.
    """
    total = 0
    for number, vector in enumerate(vectors):
        bits = vector.view(torch.int32)
        position = 0
        for interval in intervals:
            first = number * index.elements + index.first_elements[interval.parameter] + interval.start
            for start, stop in _chunks(interval.elements):
                part = bits[position + start : position + stop]
                total += int(_mixed(part, first + start).sum())
            position += interval.elements
    return total % (1 << DIGEST_BITS)


def _mixed(bits: torch.Tensor, first: int) -> torch.Tensor:
    """64-bit mixes of 32-bit values with their numbers from `first`: the finaliser of SplitMix64 (Steele et
    al. 2014).

    int64 arithmetic wraps round, which makes it the unsigned arithmetic of the source; shifts need a mask, as
    they copy the sign.
    """
    numbers = torch.arange(first, first + bits.numel(), dtype=torch.int64, device=bits.device)
    state = numbers.mul_(_signed(0x9E3779B97F4A7C15)).add_(bits.to(torch.int64).mul_(_signed(0xD1B54A32D192ED03)))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state.bitwise_xor_(_shifted(state, shift)).mul_(_signed(factor))
    return state.bitwise_xor_(_shifted(state, 31))


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits).bitwise_and_((1 << (DIGEST_BITS - bits)) - 1)


def _signed(number: int) -> int:
    return int(np.uint64(number).astype(np.int64))


def _chunks(elements: int) -> Iterator[tuple[int, int]]:
    """Bounds of pieces that keep the int64 temporaries of a digest small."""
    for start in range(0, elements, _CHUNK):
        yield start, min(start + _CHUNK, elements)
