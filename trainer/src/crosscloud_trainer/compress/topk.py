"""The largest values of each cell only, in few bits each: sparsification with error feedback as in Deep Gradient
Compression (Lin et al. 2018, arXiv:1712.01887), cell by cell.

Of a whole cell the `keep` values of largest magnitude are sent, of equal ones those that come first. Each is a sign and
a level of its magnitude. With 2 bits there are two levels, the pair from which the kept magnitudes differ least in the
sense of least squares: the quantiser of Lloyd (1957, printed 1982) and Max (1960) for the cell's own values. In one
dimension the best pair is found without iterating, since each of its two groups is a run of the sorted magnitudes: all
cuts are tried. With 4 and 8 bits the levels lie evenly between the smallest and the largest kept magnitude, as in QSGD
(Alistarh et al. 2017, arXiv:1610.02132), but a value takes the nearest one: error feedback makes up for the bias.

Residuals decay by 5 % from round to round, as in SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706): under DiLoCo each
window starts from the agreed weights and learns again what has not been sent yet, so that a residual holds the same
step many times. It does the work of outer momentum too, which should be 0 then.

A cell of fewer than 4,096 elements goes through `Int8`: these are norms, biases and the ends of parameters, a small
part of a model's bytes, and norms and biases stand sparsification badly. That depends on a cell's length only, so it is
the same in every layout.

The bytes of a whole cell: low and high level (bf16), positions of the kept values (`sizes.TopKParts`), then for each in
order of positions its code, which has the sign in the lowest bit and the number of its level above it. All arithmetic
is done by single IEEE operations in a fixed order, so that every machine makes the same bytes. Magnitudes below 2**-100
are sent as zero: above it no product or difference here is subnormal, where machines may differ.
"""

from collections.abc import Iterator

import numpy as np
import torch

from crosscloud_trainer.compress.bits import pack, unpack
from crosscloud_trainer.compress.codec import MAX_MAGNITUDE, NOT_FINITE, Lengths, check_values, runs, sizes_of
from crosscloud_trainer.compress.int8 import Int8Codec
from crosscloud_trainer.sizes import CELL_ELEMENTS, CodecSpec, cell_bytes, top_k_parts

SMALLEST_MAGNITUDE = 2.0**-100
INDEX_BITS = CELL_ELEMENTS.bit_length() - 1

SHORT = Int8Codec()
"""For cells of fewer than `CELL_ELEMENTS` elements."""


class TopKCodec:
    lossless = False
    decay = 0.95

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec
        self._parts = top_k_parts(spec)
        self._top_level = (1 << (spec.bits - 1)) - 1

    def encode(self, values: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        check_values(values)
        data = torch.empty(int(sizes_of(self.spec, lengths).sum()), dtype=torch.uint8, device=values.device)
        for part, cells, bytes_ in self._runs(lengths):
            if _whole(part):
                data[bytes_] = self._encoded(values[cells].view(len(part), CELL_ELEMENTS)).flatten()
            else:
                data[bytes_] = SHORT.encode(values[cells], part)
        return data

    def decode(self, data: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        values = torch.zeros(int(lengths.sum()), dtype=torch.float32, device=data.device)
        for part, cells, bytes_ in self._runs(lengths):
            if _whole(part):
                target = values[cells].view(len(part), CELL_ELEMENTS)
                rows = data[bytes_].view(len(part), self._parts.total)
                target.scatter_(1, self._positions(rows), self._kept(rows))
            else:
                values[cells] = SHORT.decode(data[bytes_], part)
        return values

    def fault(self, data: torch.Tensor, lengths: Lengths) -> str:
        for part, _, bytes_ in self._runs(lengths):
            if _whole(part):
                fault = self._fault(data[bytes_].view(len(part), self._parts.total))
            else:
                fault = SHORT.fault(data[bytes_], part)
            if fault:
                return fault
        return ""

    def _runs(self, lengths: Lengths) -> Iterator[tuple[Lengths, slice, slice]]:
        """Lengths of neighbouring cells that are equally long, where their values lie, and where their bytes."""
        read = written = 0
        for cells, length in runs(lengths):
            size = cell_bytes(self.spec, length)
            part = np.full(cells, length, dtype=np.int64)
            yield part, slice(read, read + cells * length), slice(written, written + cells * size)
            read += cells * length
            written += cells * size

    def _encoded(self, values: torch.Tensor) -> torch.Tensor:
        """Whole cells, shape (cells, 4096), as their bytes, shape (cells, bytes)."""
        positions, magnitudes = _largest(values, self.spec.keep)
        levels = _two_levels(magnitudes) if self.spec.bits == 2 else magnitudes[:, [-1, 0]]
        levels = torch.where(levels >= SMALLEST_MAGNITUDE, levels, 0.0).to(torch.bfloat16)

        positions, order = positions.sort(dim=1)
        magnitudes = magnitudes.gather(1, order)
        low, high = levels.to(torch.float32).unsqueeze(-1).unbind(1)
        spread = torch.where(high > low, high - low, torch.inf)
        numbers = ((magnitudes - low) / spread * self._top_level).round_().clamp_(0, self._top_level)
        negative = values.gather(1, positions) < 0
        codes = (numbers.to(torch.int64) << 1) | negative

        return torch.cat(
            [levels.view(torch.uint8), self._position_bytes(positions), pack(codes, self.spec.bits)], dim=1
        )

    def _position_bytes(self, positions: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        places = (positions >> parts.low_bits) + torch.arange(self.spec.keep, device=positions.device)
        bitmap = torch.zeros((len(positions), parts.places), dtype=torch.uint8, device=positions.device)
        bitmap.scatter_(1, places, 1)
        lows = positions & ((1 << parts.low_bits) - 1)
        return torch.cat([pack(bitmap, 1), pack(lows, parts.low_bits)], dim=1)

    def _positions(self, rows: torch.Tensor) -> torch.Tensor:
        """Positions of the kept values, shape (cells, keep), from cells whose bitmaps are right."""
        parts = self._parts
        places = self._bitmap(rows).nonzero()[:, 1].view(len(rows), self.spec.keep)
        highs = places - torch.arange(self.spec.keep, device=rows.device)
        start = parts.levels + parts.bitmap
        lows = unpack(rows[:, start : start + parts.lows], parts.low_bits, self.spec.keep)
        return (highs << parts.low_bits) | lows

    def _bitmap(self, rows: torch.Tensor) -> torch.Tensor:
        start = self._parts.levels
        return unpack(rows[:, start : start + self._parts.bitmap], 1, self._parts.places)

    def _levels(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Low and high level of each cell, shape (cells, 1)."""
        # A copy, since bytes can be seen as numbers only where they are aligned.
        levels = rows[:, : self._parts.levels].flatten().clone().view(torch.bfloat16).to(torch.float32)
        low, high = levels.view(len(rows), 2, 1).unbind(1)
        return low, high

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        """The kept values, shape (cells, keep), in order of their positions."""
        low, high = self._levels(rows)
        codes = unpack(rows[:, self._parts.total - self._parts.codes :], self.spec.bits, self.spec.keep)
        share = (codes >> 1).to(torch.float32) / torch.tensor(float(self._top_level), device=rows.device)
        # The rounding of the shares may lead beyond the high level by a last bit.
        magnitudes = torch.minimum(low * (1 - share) + high * share, high)
        return torch.where((codes & 1).bool(), -magnitudes, magnitudes)

    def _fault(self, rows: torch.Tensor) -> str:
        low, high = self._levels(rows)
        if not bool(((low >= 0) & (low <= high) & (high <= MAX_MAGNITUDE)).all()):
            return NOT_FINITE
        if not bool((self._bitmap(rows).sum(dim=1) == self.spec.keep).all()):
            return f"does not name {self.spec.keep} elements of each cell"
        if not bool((self._positions(rows).diff(dim=1) > 0).all()):
            return "names an element of a cell twice"
        return ""


def _whole(lengths: Lengths) -> bool:
    return bool(lengths[0] == CELL_ELEMENTS)


def _largest(values: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and magnitudes of the largest values of each row, largest first, of equal ones the first first.

    `topk` gives no promise about equal values, so it is shown numbers that all differ: the bits of the magnitude, which
    are ordered as the magnitudes are, and below them the position counted from the end.
    """
    from_end = torch.arange(CELL_ELEMENTS - 1, -1, -1, device=values.device)
    keys = (values.abs().view(torch.int32).to(torch.int64) << INDEX_BITS) | from_end
    largest = keys.topk(keep, dim=1).values
    positions = (CELL_ELEMENTS - 1) - (largest & (CELL_ELEMENTS - 1))
    magnitudes = (largest >> INDEX_BITS).to(torch.int32).view(torch.float32)
    return positions, torch.where(magnitudes >= SMALLEST_MAGNITUDE, magnitudes, 0.0)


def _two_levels(magnitudes: torch.Tensor) -> torch.Tensor:
    """The two numbers, smaller one first, from which sorted magnitudes (largest first) differ least; (cells, 2) fp32.

    The magnitudes above the cut go to their mean, those below it to theirs. The sum of squares that is left is the
    smaller, the larger count * mean**2 of both groups together is. Of equally good cuts the one with the smaller upper
    group is taken.
    """
    keep = magnitudes.shape[1]
    columns = magnitudes.to(torch.float64).t().contiguous()
    # Added one by one: `cumsum` has no fixed order on GPUs.
    for number in range(1, keep):
        columns[number] += columns[number - 1]
    above = columns.t()
    below = above[:, -1:] - above
    count = torch.arange(1, keep + 1, dtype=torch.float64, device=magnitudes.device)
    rest = (keep - count).clamp_(min=1)
    cut = (above * above / count + below * below / rest).argmax(dim=1, keepdim=True)
    low, high = (below / rest).gather(1, cut), (above / count).gather(1, cut)
    return torch.cat([low, high], dim=1).to(torch.float32)
