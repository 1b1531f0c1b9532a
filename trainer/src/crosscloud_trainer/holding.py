"""Moves the parts of cells between the ranks of a replica: to the holders before encoding, and decoded
results back.
"""

import numpy as np
import torch

from crosscloud_trainer.compress import Codec, EncodedCells
from crosscloud_trainer.compress.codec import check_payload, sizes_of
from crosscloud_trainer.group import StageGroup
from crosscloud_trainer.layout import Piece, ReplicaLayout


class Holding:
    """The cells that this rank holds, and its parts of cells that other ranks hold."""

    def __init__(self, layout: ReplicaLayout, group: StageGroup, codec: Codec) -> None:
        self._layout = layout
        self._group = group
        self._codec = codec
        rank = group.rank
        self.ids = layout.holders.held(rank)
        self.lengths = layout.index.lengths(self.ids)
        self._own = [piece for piece in layout.pieces if piece.source == piece.holder == rank]
        self._outgoing = _by_rank(layout, [p for p in layout.pieces if p.source == rank != p.holder], "holder")
        self._incoming = _by_rank(layout, [p for p in layout.pieces if p.holder == rank != p.source], "source")
        self._foreign = [layout.foreign_cells(rank).get(r, _NONE) for r in range(layout.ranks)]
        self._wanted = [layout.foreign_cells(r).get(rank, _NONE) for r in range(layout.ranks)]

    def gather(self, compact: torch.Tensor) -> torch.Tensor:
        """Values of the cells that this rank holds, end to end, from all ranks' compact vectors. Collective."""
        outgoing = [_cut(compact, pieces) for pieces in self._outgoing]
        parts = self._group.swap(outgoing, [_elements(pieces) for pieces in self._incoming])
        values = torch.empty(int(self.lengths.sum()), dtype=compact.dtype, device=compact.device)
        for pieces, part in zip(self._incoming, parts, strict=True):
            read = 0
            for piece in pieces:
                target = values[piece.holder_start : piece.holder_start + piece.elements]
                target.copy_(part[read : read + piece.elements])
                read += piece.elements
        for piece in self._own:
            source = compact[piece.source_start : piece.source_start + piece.elements]
            values[piece.holder_start : piece.holder_start + piece.elements].copy_(source)
        return values

    def decode(self, held: EncodedCells, device: torch.device) -> torch.Tensor:
        """Values of the cells that this rank holds, end to end."""
        return self._codec.decode(held.data.to(device), held.lengths)

    def spread(self, held: EncodedCells, own: torch.Tensor) -> torch.Tensor:
        """This rank's compact vector, decoded from the encoded cells that all holders have; `own` is what `decode`
        made of `held`. Collective.

        Each rank decodes its own elements from the same bytes, so that all agree to the bit. Raises
        PayloadError for bytes from another rank that can't be decoded.
        """
        index = self._layout.index
        outgoing = [held.select(ids).data for ids in self._wanted]
        lengths = [index.lengths(ids) for ids in self._foreign]
        sizes = [int(sizes_of(self._codec.spec, part).sum()) for part in lengths]
        parts = self._group.swap(outgoing, sizes)
        compact = torch.empty(self._elements(), device=own.device)
        for piece in self._own:
            source = own[piece.holder_start : piece.holder_start + piece.elements]
            compact[piece.source_start : piece.source_start + piece.elements].copy_(source)
        for rank, data in enumerate(parts):
            check_payload(self._codec, data, lengths[rank])
            values = self._codec.decode(data.to(own.device), lengths[rank])
            starts = np.cumsum(lengths[rank]) - lengths[rank]
            for piece in self._outgoing[rank]:
                start = int(starts[np.searchsorted(self._foreign[rank], piece.first_cell)]) + piece.within
                target = compact[piece.source_start : piece.source_start + piece.elements]
                target.copy_(values[start : start + piece.elements])
        return compact

    def _elements(self) -> int:
        return _elements(self._own) + sum(_elements(pieces) for pieces in self._outgoing)


_NONE = np.empty(0, dtype=np.int64)


def _by_rank(layout: ReplicaLayout, pieces: list[Piece], side: str) -> list[list[Piece]]:
    return [[piece for piece in pieces if getattr(piece, side) == rank] for rank in range(layout.ranks)]


def _cut(compact: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    parts = [compact[piece.source_start : piece.source_start + piece.elements] for piece in pieces]
    return torch.cat([compact[:0], *parts])


def _elements(pieces: list[Piece]) -> int:
    return sum(piece.elements for piece in pieces)
