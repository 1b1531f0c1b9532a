"""What an algorithm asks of the network in a round: the only thing that it knows of links, peers and views."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from crosscloud_trainer.compress import EncodedCells


@dataclass(frozen=True)
class RoundRequest:
    """One rank's part of a round. All ranks of a replica give the same `round`, `weight` and `digest`."""

    round: int
    """From 1."""
    weight: int
    """Tokens that the whole replica trained on in the window; 0 if it has refused its update."""
    payload: EncodedCells | None
    """All cells that this rank holds (perhaps none); None exactly where the weight is 0."""
    digest: int
    """Unsigned 64 bits: the replica's outer state before this round."""
    state: int = 0
    """Unsigned 64 bits that the others are told, and that may differ: the digest of a state that isn't agreed on."""
    exact: bool = False
    """Whether cells travel as fp32 in this round, whatever the codec. All replicas say the same."""


@dataclass(frozen=True)
class RoundResult:
    """The same on all ranks of all replicas of the view, but for `result`."""

    result: EncodedCells | None
    """The result of all cells that this rank holds; None if no replica of the view had a weight."""
    weights: Mapping[int, int]
    """By replica number, the whole view."""
    digests: Mapping[int, int]
    """By replica number, the whole view: each replica's outer state before this round."""
    states: Mapping[int, int] = field(default_factory=dict)
    """By replica number, the whole view: what each has told as `state`."""


@dataclass(frozen=True)
class RoundReport:
    """What a round did, on one rank; all but `payload_bytes` is the same on all ranks of a replica."""

    round: int
    digest: int
    """What was agreed up to this round (`DiLoCo`: the outer state); the same in all replicas."""
    weights: Mapping[int, int]
    """Tokens of the round by replica number; 0 for one that refused its update."""
    payload_bytes: int
    """Encoded bytes of the cells that this rank holds; 0 if nothing was exchanged."""
    refused: bool
    """This replica's update was not finite and is lost."""
    applied: bool
    """Whether the update was applied; if not, all replicas have gone on without it (`DiLoCo`: from the outer weights
    before the round).
    """


class RoundExchange(Protocol):
    """Exchanges cells with the other replicas of the view. Each rank has one; every rank calls it in every
    round.
    """

    @property
    def view(self) -> tuple[int, ...]:
        """Numbers of the replicas in the view, sorted."""
        ...

    @property
    def replica(self) -> int:
        """Number of this replica."""
        ...

    def exchange(self, request: RoundRequest) -> RoundResult:
        """Blocks until the round's result of this rank's cells is here, over broken links too. Raises what ends
        the attempt (a LinkError) if it never will be.
        """
        ...

    def prepared(self, round_number: int) -> None:
        """Told on every rank once all ranks of this replica have all that they need of a round; it can't be
        lost any more here.
        """
        ...
