"""A view of one replica: there is nobody to exchange with."""

from __future__ import annotations

from crosscloud_trainer.exchange import RoundRequest, RoundResult
from crosscloud_trainer.link import Authority


class SoloExchange:
    """The `RoundExchange` of a replica that is alone, with the other calls of LinkExchange."""

    def __init__(self, replica: int, authority: Authority) -> None:
        self.view = (replica,)
        self.replica = replica
        self.authority = authority
        self.settled_round = 0
        self.leaves = False
        self.leaving: tuple[int, ...] = ()
        self.mismatches = 0

    def exchange(self, request: RoundRequest) -> RoundResult:
        """The mean of one replica's update is that update."""
        return RoundResult(request.payload, {self.replica: request.weight}, {self.replica: request.digest})

    def prepared(self, round_number: int) -> None:
        self.settled_round = round_number

    def settle(self, seconds: float) -> None:  # noqa: ARG002 - nobody to wait for
        return

    def waiting(self) -> None:
        return None
