"""What every codec does, and what is common to all: runs of equal cells, and the refusal of values that
aren't finite.

A batch of cells is a flat fp32 tensor, the cells' values end to end, and the cells' lengths. Its encoding is
the cells' encodings end to end, each a function of that cell's values only: a cell has the same bytes
whatever batch, rank or machine encodes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from crosscloud_trainer.layout import Ids
from crosscloud_trainer.sizes import CodecSpec, cell_bytes

Lengths = NDArray[np.int64]

MAX_MAGNITUDE = 2.0**127
"""Largest absolute value that is encoded: what a decoder makes of it, and the sum of weighted ones, can't
overflow fp32.
"""


STRETCH_ELEMENTS = 1 << 19
"""Elements that are worked on together: what a round needs of memory beside its payloads is some ten times as much."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring cells of a batch."""

    cells: slice
    """Where they stand in the batch."""
    lengths: Lengths
    values: slice
    """Where their elements lie in the batch's."""
    data: slice
    """Where their bytes lie in the batch's encoding."""

    @property
    def elements(self) -> int:
        return int(self.values.stop - self.values.start)


class NonFiniteError(ValueError):
    """Values to encode that are NaN, infinite or beyond `MAX_MAGNITUDE`; nothing was encoded."""


class PayloadError(ValueError):
    """Bytes that aren't the encoding of the cells that they are said to be."""


class Codec(Protocol):
    """Turns cells into bytes and back; one object serves all ranks and threads, it keeps no state."""

    @property
    def spec(self) -> CodecSpec:
        """Name and settings."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very bits, so that error feedback has nothing to do."""
        ...

    @property
    def decay(self) -> float:
        """Factor of what is left of a residual when it is added to the next values; 1 leaves all of it."""
        ...

    def encode(self, values: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        """Bytes (uint8, on the device of `values`) of cells whose values (fp32) lie end to end.

        Raises NonFiniteError, before it encodes anything, for values that no decoder could give back.
        """
        ...

    def decode(self, data: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        """The values (fp32, on the device of `data`) that these bytes stand for; exact, no rounding but the
        codec's own.
        """
        ...

    def fault(self, data: torch.Tensor, lengths: Lengths) -> str:
        """What forbids to decode bytes of the right number, or "" where nothing does: then every value that they
        stand for is finite and within `MAX_MAGNITUDE`.
        """
        ...


NOT_FINITE = "has values that are not finite"


def sizes_of(spec: CodecSpec, lengths: Lengths) -> Lengths:
    """Bytes of each cell of the given lengths."""
    result = np.empty_like(lengths)
    for length in np.unique(lengths).tolist():
        result[lengths == length] = cell_bytes(spec, length)
    return result


def stretches(spec: CodecSpec, lengths: Lengths) -> list[Stretch]:
    """A batch of cells as stretches of about `STRETCH_ELEMENTS`, more by less than a cell; none of no cells."""
    if not len(lengths):
        return []
    ends, bytes_ = np.cumsum(lengths), np.cumsum(sizes_of(spec, lengths))
    cuts = np.flatnonzero(np.diff((ends - 1) // STRETCH_ELEMENTS)) + 1
    found, read, written = [], 0, 0
    for first, stop in pairwise([0, *cuts.tolist(), len(lengths)]):
        end, byte = int(ends[stop - 1]), int(bytes_[stop - 1])
        found.append(Stretch(slice(first, stop), lengths[first:stop], slice(read, end), slice(written, byte)))
        read, written = end, byte
    return found


def check_payload(codec: Codec, data: torch.Tensor, lengths: Lengths) -> None:
    """Raises PayloadError unless `data` may be decoded: right size, values that a codec may give
    back. For everything that was received.
    """
    name = codec.spec.name
    expected = int(sizes_of(codec.spec, lengths).sum())
    if data.numel() != expected:
        raise PayloadError(f"payload has {data.numel()} bytes; {len(lengths)} cells in {name} have {expected}")
    for stretch in stretches(codec.spec, lengths):
        fault = codec.fault(data[stretch.data], stretch.lengths)
        if fault:
            raise PayloadError(f"payload of {len(lengths)} cells in {name} {fault}")


def encodable(values: torch.Tensor) -> bool:
    """Whether all values are finite and within `MAX_MAGNITUDE`."""
    return not values.numel() or bool((values.abs() <= MAX_MAGNITUDE).all())


def check_values(values: torch.Tensor) -> None:
    """Raises NonFiniteError unless all values are `encodable`."""
    if not encodable(values):
        raise NonFiniteError("values to encode are NaN, infinite or larger than 2**127")


def take(data: torch.Tensor, widths: Lengths, positions: Ids) -> torch.Tensor:
    """The rows at `positions` (sorted) of rows of unlike widths that lie end to end in `data`, end to end
    again.
    """
    result = torch.empty(int(widths[positions].sum()), dtype=data.dtype, device=data.device)
    written = 0
    for block, rows in _selected(data, widths, positions):
        target = result[written : written + rows.numel() * block.shape[1]].view(rows.numel(), block.shape[1])
        torch.index_select(block, 0, rows, out=target)
        written += target.numel()
    return result


def put(data: torch.Tensor, widths: Lengths, positions: Ids, rows_data: torch.Tensor) -> None:
    """Overwrites the rows at `positions` (sorted) by the ones that lie end to end in `rows_data`: the inverse
    of `take`.
    """
    read = 0
    for block, rows in _selected(data, widths, positions):
        source = rows_data[read : read + rows.numel() * block.shape[1]].view(rows.numel(), block.shape[1])
        block.index_copy_(0, rows, source)
        read += source.numel()


def _selected(data: torch.Tensor, widths: Lengths, positions: Ids) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows, width) views of `data` for each run of equal widths, with the wanted rows of each that has some."""
    first = start = 0
    for rows, width in runs(widths):
        low, high = np.searchsorted(positions, [first, first + rows])
        if low < high:
            wanted = torch.from_numpy(positions[low:high] - first).to(data.device)
            yield data[start : start + rows * width].view(rows, width), wanted
        first += rows
        start += rows * width


def runs(lengths: Lengths) -> Iterator[tuple[int, int]]:
    """(cells, length) of each run of neighbouring cells that are equally long: the units that tensor
    operations work on.

    A parameter is one run of whole cells and one last cell, so there are a few runs per parameter, not one
    per cell.
    """
    if not len(lengths):
        return
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for first, stop in pairwise(bounds):
        yield stop - first, int(lengths[first])
