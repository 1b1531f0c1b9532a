"""The canonical index: where each element of the model lies, whatever ranks and ZeRO stage a replica has.

An element is named by its full-model parameter and its offset in it. Parameters stand in byte order of their
names, a tied one once, so that every replica numbers elements and cells alike. Each parameter is cut into
cells of `CELL_ELEMENTS` elements from its first one, never across parameters; a cell's number is its place in
canonical order.

A rank's shard is a tuple of intervals of parameters. Shards of unlike replicas are cut at unlike places, so
between replicas only whole cells travel: in each replica the rank with a cell's first element is its holder,
which gathers the cell's other parts from its neighbours before encoding. Pure, with no torch.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from crosscloud_trainer.sizes import CELL_ELEMENTS

Ids = NDArray[np.int64]
"""Sorted numbers of cells, without duplicates, unless it is said otherwise."""


class LayoutError(ValueError):
    """Shards that don't cover the model exactly once, or cells that don't exist."""


@dataclass(frozen=True)
class Parameter:
    name: str
    elements: int


@dataclass(frozen=True)
class Interval:
    """Elements `start` to `stop` of parameter number `parameter`, at `offset` of the rank's flat shard."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Index:
    """The parameters of the full model in canonical order, with the numbers of their elements and cells."""

    parameters: tuple[Parameter, ...]

    @staticmethod
    def of(elements: Mapping[str, int]) -> "Index":
        """The index of a model that has these parameters: number of elements by name, tied ones once."""
        for name, count in elements.items():
            if count < 0:
                raise LayoutError(f"parameter {name!r} has {count} elements; it must be 0 or more")
        names = sorted(elements, key=lambda name: name.encode())
        return Index(tuple(Parameter(name, elements[name]) for name in names))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each parameter by name."""
        return {parameter.name: number for number, parameter in enumerate(self.parameters)}

    @cached_property
    def first_elements(self) -> list[int]:
        """Canonical number of each parameter's first element, and the count of all at the end."""
        return list(accumulate((p.elements for p in self.parameters), initial=0))

    @cached_property
    def first_cells(self) -> list[int]:
        """Number of each parameter's first cell, and the count of all at the end."""
        return list(accumulate((-(-p.elements // CELL_ELEMENTS) for p in self.parameters), initial=0))

    @property
    def elements(self) -> int:
        return self.first_elements[-1]

    @property
    def cells(self) -> int:
        return self.first_cells[-1]

    @cached_property
    def cell_lengths(self) -> NDArray[np.int64]:
        """Elements of each cell, shape (cells,)."""
        lengths = np.full(self.cells, CELL_ELEMENTS, dtype=np.int64)
        for parameter, stop in zip(self.parameters, self.first_cells[1:], strict=True):
            rest = parameter.elements % CELL_ELEMENTS
            if rest:
                lengths[stop - 1] = rest
        lengths.flags.writeable = False
        return lengths

    def lengths(self, ids: Ids) -> NDArray[np.int64]:
        """Elements of each of the cells `ids`."""
        return self.cell_lengths[ids]

    def cell(self, number: int) -> tuple[str, int, int]:
        """Parameter name, first element and end of a cell."""
        if not 0 <= number < self.cells:
            raise LayoutError(f"cell {number} does not exist; the model has {self.cells} cells")
        parameter = bisect_right(self.first_cells, number) - 1
        start = (number - self.first_cells[parameter]) * CELL_ELEMENTS
        stop = min(start + CELL_ELEMENTS, self.parameters[parameter].elements)
        return self.parameters[parameter].name, start, stop

    def cell_of(self, parameter: int, element: int) -> int:
        """Number of the cell that contains an element."""
        return self.first_cells[parameter] + element // CELL_ELEMENTS

    def digest(self) -> str:
        """SHA-256 of names and element counts, for handshakes: alike exactly where cells are numbered alike."""
        text = "\n".join(f"{p.name}\t{p.elements}" for p in self.parameters)
        return sha256(text.encode()).hexdigest()


def contiguous_shard(index: Index, order: Sequence[str], size: int, rank: int) -> tuple[Interval, ...]:
    """Shard of a rank under ZeRO 1 and 2: the parameters in `order` laid end to end, cut in pieces of `size`
    elements.

    The last pieces end in padding, or are padding altogether; it belongs to no interval.
    """
    low, high = rank * size, (rank + 1) * size
    intervals = []
    position = 0
    for name in order:
        number = index.numbers[name]
        elements = index.parameters[number].elements
        start, stop = max(low, position), min(high, position + elements)
        if start < stop:
            intervals.append(Interval(number, start - position, stop - position, start - low))
        position += elements
    return tuple(intervals)


def split_shard(index: Index, order: Sequence[str], ranks: int, rank: int) -> tuple[Interval, ...]:
    """Shard of a rank under ZeRO 3: each parameter cut in `ranks` pieces of equal size, each padded at its
    end.
    """
    intervals = []
    offset = 0
    for name in order:
        number = index.numbers[name]
        elements = index.parameters[number].elements
        size = -(-elements // ranks)
        start, stop = min(elements, rank * size), min(elements, (rank + 1) * size)
        if start < stop:
            intervals.append(Interval(number, start, stop, offset))
        offset += size
    return tuple(intervals)


def dealt_shard(index: Index, order: Sequence[str], ranks: int, rank: int) -> tuple[Interval, ...]:
    """Part of a rank under ZeRO 0, where every rank has all parameters in `order`: their cells, dealt evenly.

    Offsets count in the compact vector.
    """
    numbers = [index.numbers[name] for name in order]
    starts = list(accumulate((index.first_cells[n + 1] - index.first_cells[n] for n in numbers), initial=0))
    low, high = (starts[-1] * number // ranks for number in (rank, rank + 1))
    intervals = []
    offset = 0
    for number, first in zip(numbers, starts, strict=False):
        parameter = index.parameters[number]
        start = max(0, low - first) * CELL_ELEMENTS
        stop = min(parameter.elements, max(0, high - first) * CELL_ELEMENTS)
        if start < stop:
            intervals.append(Interval(number, start, stop, offset))
            offset += stop - start
    return tuple(intervals)


@dataclass(frozen=True)
class HolderMap:
    """Which rank of one replica holds each cell."""

    ranks: NDArray[np.int64]

    def held(self, rank: int) -> Ids:
        return np.flatnonzero(self.ranks == rank)

    def runs(self) -> list[tuple[int, int, int]]:
        """The same as (rank, first cell, end) triples in order, small enough for a handshake."""
        if not len(self.ranks):
            return []
        cuts = np.flatnonzero(np.diff(self.ranks)) + 1
        bounds = [0, *cuts.tolist(), len(self.ranks)]
        runs = [(int(self.ranks[first]), first, stop) for first, stop in pairwise(bounds)]
        return [run for run in runs if run[0] >= 0]

    @property
    def whole(self) -> bool:
        """Whether every cell has a holder; one stage of several knows its own cells only."""
        return bool((self.ranks >= 0).all())

    def shifted(self, first_rank: int) -> "HolderMap":
        """The same with ranks counted from `first_rank`."""
        return HolderMap(np.where(self.ranks >= 0, self.ranks + first_rank, -1))

    def joined(self, other: "HolderMap") -> "HolderMap":
        """Both stages' cells; LayoutError where they tell two holders of one cell."""
        both = (self.ranks >= 0) & (other.ranks >= 0) & (self.ranks != other.ranks)
        if both.any():
            raise LayoutError(f"holders: cell {int(np.argmax(both))} has two")
        return HolderMap(np.maximum(self.ranks, other.ranks))

    @staticmethod
    def none(cells: int) -> "HolderMap":
        return HolderMap(np.full(cells, -1, dtype=np.int64))

    @staticmethod
    def from_runs(cells: int, runs: Iterable[tuple[int, int, int]]) -> "HolderMap":
        """Reads what `runs` wrote, from a peer that may be wrong: LayoutError unless it has cells that exist, each
        once. Those of other stages are left out.
        """
        ranks = np.full(cells, -1, dtype=np.int64)
        reached = 0
        for rank, first, stop in runs:
            if rank < 0 or not reached <= first < stop <= cells:
                raise LayoutError(f"holders: cells {first} to {stop} of rank {rank} after cell {reached} of {cells}")
            ranks[first:stop] = rank
            reached = stop
        return HolderMap(ranks)


@dataclass(frozen=True)
class Piece:
    """A part of cells that the rank `source` has and the rank `holder` holds, contiguous on both sides.

    `source_start` counts in the source's compact shard (its intervals end to end, without padding),
    `holder_start` in the values of the cells that the holder holds (in order of their numbers, end to end).
    """

    source: int
    holder: int
    source_start: int
    holder_start: int
    elements: int
    first_cell: int
    within: int
    """Offset of the piece in its first cell."""


@dataclass(frozen=True)
class ReplicaLayout:
    """How the ranks of one replica (or of one of its stages) share its parameters; LayoutError unless they cover each
    element exactly once.
    """

    index: Index
    shards: tuple[tuple[Interval, ...], ...]
    parameters: frozenset[int] | None = None
    """Numbers of the parameters that these ranks share, where other stages have the rest; None: all."""

    def __post_init__(self) -> None:
        spans = sorted(
            (interval.parameter, interval.start, interval.stop) for shard in self.shards for interval in shard
        )
        own = range(len(self.index.parameters)) if self.parameters is None else sorted(self.parameters)
        reached = dict.fromkeys(own, 0)
        for number, start, stop in spans:
            if reached.get(number) != start or start >= stop:
                raise LayoutError(f"shards: elements {start} to {stop} of parameter {number} leave a gap or overlap")
            reached[number] = stop
        for number, stop in reached.items():
            parameter = self.index.parameters[number]
            if stop != parameter.elements:
                raise LayoutError(f"shards: {parameter.name!r} has {parameter.elements} elements; ranks have {stop}")

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @cached_property
    def holders(self) -> HolderMap:
        """The rank with a cell's first element holds the cell."""
        ranks = np.full(self.index.cells, -1, dtype=np.int64)
        for rank, shard in enumerate(self.shards):
            for interval in shard:
                first = self._first_cell_from(interval.parameter, interval.start)
                last = self.index.cell_of(interval.parameter, interval.stop - 1)
                ranks[first : last + 1] = rank
        return HolderMap(ranks)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every element of every rank exactly once, cut by holder: what is gathered before encoding and given
        back after.

        Sorted by (source, source_start): two ranks that walk their common pieces in this order agree on a
        message's layout.
        """
        starts = [self._buffer_starts(rank) for rank in range(self.ranks)]
        pieces = []
        for rank, shard in enumerate(self.shards):
            position = 0
            for interval in shard:
                for start, stop in self._cuts(interval):
                    cell = self.index.cell_of(interval.parameter, start)
                    holder = int(self.holders.ranks[cell])
                    within = start % CELL_ELEMENTS
                    source_start = position + start - interval.start
                    holder_start = int(starts[holder][cell]) + within
                    pieces.append(Piece(rank, holder, source_start, holder_start, stop - start, cell, within))
                position += interval.elements
        return tuple(pieces)

    def foreign_cells(self, rank: int) -> dict[int, Ids]:
        """By holder, the cells that a rank has parts of and another rank holds: it needs their encoded
        result.
        """
        wanted: dict[int, set[int]] = {}
        for piece in self.pieces:
            if piece.source == rank != piece.holder:
                wanted.setdefault(piece.holder, set()).add(piece.first_cell)
        return {holder: np.array(sorted(cells), dtype=np.int64) for holder, cells in sorted(wanted.items())}

    def _first_cell_from(self, parameter: int, element: int) -> int:
        """The first cell that begins at `element` or later."""
        return self.index.first_cells[parameter] - (-element // CELL_ELEMENTS)

    def _cuts(self, interval: Interval) -> list[tuple[int, int]]:
        """An interval as the end of another rank's cell, where it begins with one, and the cells that begin
        in it.
        """
        begin = min(-(-interval.start // CELL_ELEMENTS) * CELL_ELEMENTS, interval.stop)
        parts = [(interval.start, begin), (begin, interval.stop)]
        return [(start, stop) for start, stop in parts if start < stop]

    def _buffer_starts(self, rank: int) -> NDArray[np.int64]:
        """Where each cell begins in the values of the cells that a rank holds; -1 for cells that it doesn't."""
        held = self.holders.held(rank)
        lengths = self.index.lengths(held)
        starts = np.full(self.index.cells, -1, dtype=np.int64)
        starts[held] = np.cumsum(lengths) - lengths
        return starts
