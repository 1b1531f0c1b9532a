"""From a rank's elements to the payload of the cells that it holds, and from the agreed result back to its elements.

Parts of cells move between the ranks of a replica: to the holders before encoding, and encoded results back. All is
worked on stretch by stretch, so that nothing as long as the rank's shard is made on the way.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from crosscloud_trainer.compress import Codec, EncodedCells, ErrorFeedback
from crosscloud_trainer.compress.codec import Stretch, check_payload, sizes_of
from crosscloud_trainer.compress.feedback import ValuesOf
from crosscloud_trainer.group import StageGroup
from crosscloud_trainer.layout import Piece, ReplicaLayout

Elements = Callable[[int, int], torch.Tensor]
"""The values from the first to the second place in this rank's compact vector, which lie in one of its intervals."""

Seen = Callable[[Stretch, torch.Tensor], None]
"""Is shown the agreed values of a stretch of the cells that this rank holds."""


@dataclass(frozen=True)
class _Place:
    """Where values of held cells come from: `elements` of what `rank` has given, from `first` on, are those of the held
    cells from `start` on.
    """

    start: int
    elements: int
    rank: int
    first: int

    @property
    def stop(self) -> int:
        return self.start + self.elements

    def within(self, stretch: Stretch) -> "_Place":
        """The part of it that lies in a stretch, counted from the stretch's first element."""
        start, stop = max(self.start, stretch.values.start), min(self.stop, stretch.values.stop)
        return _Place(start - stretch.values.start, stop - start, self.rank, self.first + start - self.start)


class Holding:
    """The cells that this rank holds, with what encoding has lost of them, and its parts of cells that others hold."""

    def __init__(
        self, layout: ReplicaLayout, group: StageGroup, codec: Codec, device: torch.device, *, error_feedback: bool
    ) -> None:
        rank = self._rank = group.rank
        self._layout, self._group, self._codec, self._device = layout, group, codec, device
        self._ids = layout.holders.held(rank)
        self._lengths = layout.index.lengths(self._ids)
        self._feedback = ErrorFeedback(codec, self._lengths, device, enabled=error_feedback)
        self._outgoing = _by_rank(layout, [p for p in layout.pieces if p.source == rank != p.holder], "holder")
        incoming = _by_rank(layout, [p for p in layout.pieces if p.holder == rank != p.source], "source")
        self._incoming = [sum(piece.elements for piece in pieces) for pieces in incoming]
        own = [piece for piece in layout.pieces if piece.source == piece.holder == rank]
        places = [_Place(piece.holder_start, piece.elements, rank, piece.source_start) for piece in own]
        for source, pieces in enumerate(incoming):
            first = 0
            for piece in pieces:
                places.append(_Place(piece.holder_start, piece.elements, source, first))
                first += piece.elements
        self._places = sorted(places, key=lambda place: place.start)
        self._stops = [place.stop for place in self._places]
        self._foreign = [layout.foreign_cells(rank).get(r, _NONE) for r in range(layout.ranks)]
        self._wanted = [layout.foreign_cells(r).get(rank, _NONE) for r in range(layout.ranks)]

    @property
    def residual(self) -> torch.Tensor:
        """Flat fp32 over the held cells; empty without error feedback."""
        return self._feedback.residual

    def gather(self, elements: Elements) -> ValuesOf:
        """Values of the cells that this rank holds, from all ranks' elements. Collective.

        `elements` is asked again for each stretch, so that what it reads must stay as it is.
        """
        outgoing = [self._cut(elements, pieces) for pieces in self._outgoing]
        parts = self._group.swap(outgoing, self._incoming)

        def values_of(stretch: Stretch) -> torch.Tensor:
            values = torch.empty(stretch.elements, device=self._device)
            for place in self._in(stretch):
                stop = place.first + place.elements
                own = place.rank == self._rank
                part = elements(place.first, stop) if own else parts[place.rank][place.first : stop]
                values[place.start : place.stop].copy_(part)
            return values

        return values_of

    def encode(self, values: ValuesOf) -> EncodedCells:
        """The payload of gathered values, all of which must be encodable; keeps what was lost."""
        return EncodedCells(self._codec, self._ids, self._lengths, self._feedback.encode(values))

    def take_back(self, values: ValuesOf, payload: EncodedCells) -> None:
        """Undoes `encode`, where all replicas go on without the payload."""
        self._feedback.take_back(values, payload.data)

    def spread(self, result: EncodedCells) -> "Agreed":
        """The agreed values of this rank's elements, from the encoded cells that all holders have. Collective.

        Each rank decodes its own elements from the same bytes, so that all agree to the bit. Raises PayloadError for
        bytes from another rank that can't be decoded.
        """
        outgoing = [result.select(ids).data for ids in self._wanted]
        lengths = [self._layout.index.lengths(ids) for ids in self._foreign]
        sizes = [int(sizes_of(self._codec.spec, part).sum()) for part in lengths]
        foreign = []
        for part, data in zip(lengths, self._group.swap(outgoing, sizes), strict=True):
            check_payload(self._codec, data, part)
            foreign.append(data)
        return Agreed(self, result, foreign)

    def own_elements(self, stretch: Stretch, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first place in this rank's compact vector, values) of its own elements among the values of a stretch."""
        for place in self._in(stretch):
            if place.rank == self._rank:
                yield place.first, values[place.start : place.stop]

    def decode(self, data: torch.Tensor, stretch: Stretch) -> torch.Tensor:
        return self._codec.decode(data[stretch.data].to(self._device), stretch.lengths)

    def foreign_elements(self, rank: int, data: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The same of the cells that another rank holds, from their bytes."""
        ids = self._foreign[rank]
        lengths = self._layout.index.lengths(ids)
        values = self._codec.decode(data.to(self._device), lengths)
        starts = np.cumsum(lengths) - lengths
        for piece in self._outgoing[rank]:
            start = int(starts[np.searchsorted(ids, piece.first_cell)]) + piece.within
            yield piece.source_start, values[start : start + piece.elements]

    def _in(self, stretch: Stretch) -> Iterator[_Place]:
        for number in range(bisect_right(self._stops, stretch.values.start), len(self._places)):
            if self._places[number].start >= stretch.values.stop:
                return
            yield self._places[number].within(stretch)

    def _cut(self, elements: Elements, pieces: list[Piece]) -> torch.Tensor:
        parts = [elements(piece.source_start, piece.source_start + piece.elements) for piece in pieces]
        return torch.cat([torch.empty(0, device=self._device), *parts])


class Agreed:
    """What a round has agreed on for one rank's elements, still encoded: decoded anew each time it is asked for."""

    def __init__(self, holding: Holding, result: EncodedCells, foreign: list[torch.Tensor]) -> None:
        self._holding, self._result, self._foreign = holding, result, foreign

    def parts(self, seen: Seen | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Each element of the rank once: (first place in its compact vector, values), in one of its intervals."""
        for stretch in self._result.stretches:
            values = self._holding.decode(self._result.data, stretch)
            if seen is not None:
                seen(stretch, values)
            yield from self._holding.own_elements(stretch, values)
        for rank, data in enumerate(self._foreign):
            yield from self._holding.foreign_elements(rank, data)


_NONE = np.empty(0, dtype=np.int64)


def _by_rank(layout: ReplicaLayout, pieces: list[Piece], side: str) -> list[list[Piece]]:
    return [[piece for piece in pieces if getattr(piece, side) == rank] for rank in range(layout.ranks)]
