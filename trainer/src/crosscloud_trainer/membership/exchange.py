"""Rounds over the link: the `RoundExchange` of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from crosscloud_trainer.compress import Codec, EncodedCells, Reducer
from crosscloud_trainer.compress.codec import PayloadError, sizes_of
from crosscloud_trainer.compress.none import NoneCodec
from crosscloud_trainer.contract import Algorithm, RunDocument
from crosscloud_trainer.exchange import RoundRequest, RoundResult
from crosscloud_trainer.layout import HolderMap, Ids, Index, LayoutError
from crosscloud_trainer.link import (
    Authority,
    Link,
    Message,
    MessageType,
    Obeyed,
    PeersMissing,
    RankId,
    Received,
    Restarted,
)
from crosscloud_trainer.link.mail import Mail
from crosscloud_trainer.membership.errors import Diverged, PeerLost, RoundFailed
from crosscloud_trainer.membership.numbering import Numbering, Peer
from crosscloud_trainer.membership.rounds import Buffer, Rounds, Share, divergence, named
from crosscloud_trainer.topology import PeerCells, peers

_GOODBYE_SECONDS = 30.0
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Waiting:
    """Replicas whose word is missing, and since when (seconds since 1970)."""

    replicas: tuple[int, ...]
    since: float


class LinkExchange:
    """One rank's end of all rounds. `holders` is the layout of its own replica, `reducer` adds the cells that it owns.

    `waiting`, `authority`, `settled_round` and `mismatches` may be asked from any thread; all else belongs to the
    training thread.
    Every call that waits raises the LinkError that ended the link.
    """

    def __init__(
        self,
        link: Link,
        run: RunDocument,
        index: Index,
        codec: Codec,
        holders: HolderMap,
        replica: int,
        rank: int,
        reducer: Reducer,
        mail: Mail | None = None,
    ) -> None:
        """`rank` is counted over all stages of the replica; `holders` tells of this rank's own stage."""
        self.view = tuple(sorted(plan.index for plan in run.replicas))
        self.replica = replica
        self._link = link
        self._index = index
        self._codec = codec
        self._reducer = reducer
        self._rank = rank
        self._mail = mail or Mail(link)
        self._numbers = Numbering(run.replicas)
        self._leads = self._numbers.leads((replica, rank))
        self.leaves = False
        """Set once this replica was told to end: the next round says so to the others."""
        self.leaving: tuple[int, ...] = ()
        """Replicas that said so in the last round: all stop after it."""
        self.mismatches = 0
        """Rounds before which the outer states were found to differ; the first one ends the attempt."""
        self._attempt = run.attempt
        self._holders = {replica: holders}
        self._cells: dict[Peer, PeerCells] = {}
        self._exact = Reducer(NoneCodec(), index, reducer.owned, error_feedback=False)
        self._rounds = Rounds((replica, rank), self.view, {}, run.attempt, link.authority)
        self._met = False  # whether all layouts are known
        self._early: list[Received] = []  # words of peers that knew them sooner
        self._waiting: Waiting | None = None
        specs = [codec.spec, *([NoneCodec.spec] if run.sync.algorithm is Algorithm.ALL_REDUCE else [])]
        link.allow(max(int(sizes_of(spec, index.cell_lengths).sum()) for spec in specs))

    # meeting

    def connect(self, seconds: float) -> None:
        """Meets all ranks that this one will talk to and learns their layouts. Raises PeersMissing."""
        deadline = time.monotonic() + seconds
        contacts = self._contacts()
        for peer in contacts:
            self._link.connect(self._address(peer))
            if self._leads:
                self._send_layout(peer)
        self._pump(self._without_layout, deadline)
        self._cells = peers(self._index, self.view, self._holders, self.replica, self._rank)
        sizes = sizes_of(self._codec.spec, self._index.cell_lengths)
        exact = sizes_of(NoneCodec.spec, self._index.cell_lengths)
        shares = dict.fromkeys(contacts, Share())
        for peer, cells in self._cells.items():
            found = [int(of[ids].sum()) for of in (sizes, exact) for ids in (cells.send, cells.receive)]
            shares[peer] = Share(*found)
            self._link.connect(self._address(peer))
        self._rounds = Rounds((self.replica, self._rank), self.view, shares, self._attempt, self._link.authority)
        self._met = True
        early, self._early = self._early, []
        for event in early:
            self._rounds.received(self._peer(event.peer), event.message)
        self._await_connections(list(shares), deadline)

    def _contacts(self) -> list[Peer]:
        """The first rank of each stage of each other replica, whose layout and announcements this rank needs whatever
        the layout; for such a rank, all.
        """
        others = [replica for replica in self.view if replica != self.replica]
        if self._leads:
            return [(replica, rank) for replica in others for rank in range(self._numbers.ranks(replica))]
        return [leader for replica in others for leader in self._numbers.leaders(replica)]

    def _send_layout(self, peer: Peer) -> None:
        runs = np.array(self._holders[self.replica].runs(), dtype=">i8")
        self._link.send(self._address(peer), Message(MessageType.LAYOUT, b"", runs.tobytes()))

    def _take_layout(self, peer: Peer, body: Buffer) -> None:
        if not self._numbers.leads(peer) or len(body) % 24:
            raise RoundFailed(
                f"{named(peer)} sent a layout of {len(body)} bytes; a stage's first rank sends triples of 24"
            )
        runs = np.frombuffer(body, dtype=">i8").reshape(-1, 3).tolist()
        known = self._holders.get(peer[0], HolderMap.none(self._index.cells))
        try:
            told = HolderMap.from_runs(self._index.cells, [(a, b, c) for a, b, c in runs])
            self._holders[peer[0]] = known.joined(told)
        except LayoutError as fault:
            raise RoundFailed(f"{named(peer)}: {fault}") from fault
        if any(run[0] not in self._numbers.stage_ranks(peer) for run in runs):
            raise RoundFailed(f"{named(peer)} has a layout for other ranks than its stage's")

    def _without_layout(self) -> set[int]:
        known = {replica for replica, holders in self._holders.items() if replica == self.replica or holders.whole}
        return set(self.view) - known

    def _await_connections(self, wanted: list[Peer], deadline: float) -> None:
        def unmet() -> set[int]:
            states = self._link.states()
            addresses = {peer: self._address(peer) for peer in wanted}
            return {p[0] for p, a in addresses.items() if a not in states or not states[a].connections}

        self._pump(unmet, deadline, poll=0.1)

    # rounds

    def exchange(self, request: RoundRequest) -> RoundResult:
        """See RoundExchange. Raises Diverged if the outer states before the round differ, RoundFailed, or LinkError."""
        payload, rounds = request.payload, self._rounds
        bodies: dict[Peer, Buffer] = {}
        if payload is not None:
            bodies = {peer: payload.select(cells.send).buffer() for peer, cells in self._cells.items()}
        said = (request.round, request.weight, request.digest)
        rounds.begin(*said, bodies, leaves=self.leaves, state=request.state, exact=request.exact)
        self._pump(rounds.awaited_payloads)
        self.leaving = rounds.leaving
        announced = rounds.announced
        if unlike := [replica for replica, said in announced.items() if said.exact != request.exact]:
            found = "updates" if request.exact else "its state"
            raise RoundFailed(
                f"round {request.round}: replica {unlike[0]} sends {found}, and replica {self.replica} not"
            )
        different = divergence(request.round, rounds.digests)
        if different:
            self.mismatches += 1
            raise Diverged(different)
        weights, digests = rounds.weights, rounds.digests
        states = {replica: said.state for replica, said in announced.items()}
        if not any(weights.values()):
            return RoundResult(None, weights, digests, states)
        reducer, codec = (self._exact, NoneCodec()) if request.exact else (self._reducer, self._codec)
        owned = self._reduce(reducer, codec, payload, weights)
        receiving = {peer: cells.receive for peer, cells in self._cells.items() if len(cells.receive)}
        rounds.reduced({peer: owned.select(ids).buffer() for peer, ids in receiving.items()})
        self._pump(rounds.awaited_results)
        sending = {peer: cells.send for peer, cells in self._cells.items() if len(cells.send)}
        results = rounds.take_results()
        parts = [self._checked(codec, peer, ids, results[peer]) for peer, ids in sending.items()]
        return RoundResult(EncodedCells.merged([owned, *parts]), weights, digests, states)

    def prepared(self, round_number: int) -> None:
        """See RoundExchange."""
        self._rounds.prepared(round_number)

    def settle(self, seconds: float) -> None:
        """At the end: returns once the whole view has prepared the last round and has all that it needs of us.

        Raises PeerLost if that takes longer.
        """
        self._rounds.settle()
        try:
            self._pump(self._rounds.unsettled, time.monotonic() + seconds)
        except PeersMissing as fault:
            raise PeerLost(f"after round {self._rounds.number}: {fault}") from fault
        self._link.flush(min(seconds, _GOODBYE_SECONDS))

    def _reduce(
        self, reducer: Reducer, codec: Codec, payload: EncodedCells | None, weights: dict[int, int]
    ) -> EncodedCells:
        owned = reducer.owned
        payloads: dict[int, EncodedCells | None] = dict.fromkeys(self.view)
        for replica in self.view:
            if not weights[replica]:
                continue
            if replica == self.replica:
                payloads[replica] = payload.select(owned) if payload else None
                continue
            parts = [
                self._checked(codec, peer, cells.receive, self._rounds.payloads[peer])
                for peer, cells in self._cells.items()
                if peer[0] == replica and len(cells.receive)
            ]
            payloads[replica] = EncodedCells.merged([self._nothing(codec), *parts])
        return reducer.reduce(payloads, weights)

    def _nothing(self, codec: Codec) -> EncodedCells:
        lengths = self._index.lengths(_NONE)
        return EncodedCells(codec, _NONE, lengths, torch.empty(0, dtype=torch.uint8))

    def _checked(self, codec: Codec, peer: Peer, ids: Ids, body: Buffer) -> EncodedCells:
        try:
            return EncodedCells.received(codec, self._index, ids, body)
        except PayloadError as fault:
            raise RoundFailed(f"round {self._rounds.number}: {named(peer)}: {fault}") from fault

    # what is known

    @property
    def authority(self) -> Authority:
        return max(self._link.authority, self._rounds.authority)

    @property
    def settled_round(self) -> int:
        """The last round that the whole view is known to have prepared; 0 is none."""
        return self._rounds.settled

    def waiting(self) -> Waiting | None:
        """Whom the present call waits for; None while this rank waits for nobody."""
        return self._waiting

    # between link and protocol

    def _pump(self, awaited: Callable[[], set[int]], deadline: float | None = None, poll: float | None = None) -> None:
        """Carries messages both ways until nobody is awaited. Raises PeersMissing after the deadline."""
        since = time.time()
        try:
            self._send_all()
            while missing := awaited():
                self._waiting = Waiting(tuple(sorted(missing)), since)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise PeersMissing(self._explain(missing))
                event = self._mail.receive(left if poll is None else min(poll, left or poll))
                if event is not None:
                    self._handle(event)
                self._send_all()
        finally:
            self._waiting = None

    def _handle(self, event: Received | Restarted | Obeyed) -> None:
        if isinstance(event, Obeyed):
            self._rounds.obey(event.authority)
        elif isinstance(event, Restarted):
            peer = self._peer(event.peer)
            if self._leads:
                self._send_layout(peer)
            self._rounds.resend(peer)
        elif event.message.type is MessageType.LAYOUT:
            self._take_layout(self._peer(event.peer), event.message.body)
        elif self._met:
            self._rounds.received(self._peer(event.peer), event.message)
        else:
            self._early.append(event)

    def _send_all(self) -> None:
        for send in self._rounds.take():
            self._link.send(self._address(send.peer), send.message)
        self._link.obey(self._rounds.authority)

    def _address(self, peer: Peer) -> RankId:
        return self._numbers.address(peer)

    def _peer(self, address: RankId) -> Peer:
        return self._numbers.peer(address)

    def _explain(self, missing: set[int]) -> str:
        states = self._link.states()
        faults = sorted(
            f"{address}: {state.last_fault}"
            for address, state in states.items()
            if address.replica in missing and not state.connected
        )
        names = ", ".join(str(replica) for replica in sorted(missing))
        return f"no answer in time from replica {names}" + (f" ({'; '.join(faults[:4])})" if faults else "")
