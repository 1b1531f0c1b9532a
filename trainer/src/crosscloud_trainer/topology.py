"""Who exchanges what with whom between the replicas of a view. Pure.

Each cell has one owner in a view: the replica that adds the others' updates of it. In each replica one rank
holds it. So a cell crosses the WAN between two ranks only: its holder in some replica and its holder in the
owning replica. Both ends compute the same lists of cells from the view and the holders, so that no cell
numbers travel, only bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosscloud_trainer.layout import HolderMap, Ids, Index, LayoutError


@dataclass(frozen=True)
class PeerCells:
    """Cells that this rank exchanges with one rank of another replica."""

    send: Ids
    """Held here and owned there: the payload goes out, the result of the same cells comes back."""
    receive: Ids
    """Held and owned here, held there: the payload comes in, the result of the same cells goes out."""


def owners(index: Index, view: Sequence[int]) -> NDArray[np.int64]:
    """Replica number that owns each cell, shape (cells,): a function of the view's numbers and the model
    alone.

    Cells are dealt round in order of size, then of number, so that the elements of two replicas differ by one
    cell at most and each rank's cells are spread over all owners.
    """
    numbers = np.array(sorted(set(view)), dtype=np.int64)
    if not len(numbers) or len(numbers) != len(view):
        raise LayoutError(f"view: replicas {list(view)}; it needs one number or more, each once")
    order = np.argsort(-index.cell_lengths, kind="stable")
    result = np.empty(index.cells, dtype=np.int64)
    result[order] = numbers[np.arange(index.cells) % len(numbers)]
    return result


def own_cells(index: Index, view: Sequence[int], holders: HolderMap, replica: int, rank: int) -> Ids:
    """Cells that a rank holds and its replica owns: the ones it adds for the whole view."""
    return np.flatnonzero((holders.ranks == rank) & (owners(index, view) == replica))


def peers(
    index: Index, view: Sequence[int], holders: Mapping[int, HolderMap], replica: int, rank: int
) -> dict[tuple[int, int], PeerCells]:
    """By (replica, rank) of the other end, the cells that a rank exchanges; ends without common cells are
    left out.

    `holders` gives the holders of every replica of the view by its number.
    """
    owner = owners(index, view)
    mine = holders[replica].ranks == rank
    result = {}
    for other in sorted(view):
        if other == replica:
            continue
        theirs = holders[other].ranks
        outgoing, incoming = mine & (owner == other), mine & (owner == replica)
        for peer in np.unique(theirs[outgoing | incoming]).tolist():
            same = theirs == peer
            result[(other, peer)] = PeerCells(np.flatnonzero(outgoing & same), np.flatnonzero(incoming & same))
    return result
