"""Rounds on one machine: an exchange over a torch store (of threads or of processes), and a replica whose
ranks are threads.
"""

import io
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import Store

from crosscloud_trainer.compress import Codec, EncodedCells, Reducer
from crosscloud_trainer.compress.none import NoneCodec
from crosscloud_trainer.exchange import RoundRequest, RoundResult
from crosscloud_trainer.group import ReplicaTotals
from crosscloud_trainer.layout import HolderMap, Ids, Index, Interval, ReplicaLayout
from crosscloud_trainer.membership.errors import Diverged
from crosscloud_trainer.membership.rounds import divergence
from crosscloud_trainer.pipeline import StageTotals
from crosscloud_trainer.topology import own_cells, peers


class StoreExchange:
    """The exchange of one rank; each message is one key of a store that all ranks of all replicas share."""

    def __init__(
        self,
        store: Store,
        index: Index,
        holders: Mapping[int, HolderMap],
        replica: int,
        rank: int,
        codec: Codec,
        *,
        error_feedback: bool = True,
    ) -> None:
        self.view = tuple(sorted(holders))
        self.replica = replica
        self.rank = rank
        self.prepared_rounds: list[int] = []
        self._store = store
        self._index = index
        self._codec = codec
        self._peers = peers(index, self.view, holders, replica, rank)
        owned = own_cells(index, self.view, holders[replica], replica, rank)
        self._reducer = Reducer(codec, index, owned, error_feedback=error_feedback)
        self._exact = Reducer(NoneCodec(), index, owned, error_feedback=False)

    def exchange(self, request: RoundRequest) -> RoundResult:
        number, payload = request.round, request.payload
        header = {"weight": request.weight, "digest": request.digest, "state": request.state}
        self._store.set(f"{number}/head/{self.replica}/{self.rank}", json.dumps(header))
        heads = {replica: json.loads(self._store.get(f"{number}/head/{replica}/0")) for replica in self.view}
        weights = {replica: head["weight"] for replica, head in heads.items()}
        digests = {replica: head["digest"] for replica, head in heads.items()}
        states = {replica: head["state"] for replica, head in heads.items()}
        if text := divergence(number, digests):
            raise Diverged(text)
        if not any(weights.values()):
            return RoundResult(None, weights, digests, states)
        codec = NoneCodec() if request.exact else self._codec
        if payload is not None:
            for peer, cells in self._peers.items():
                self._send(number, "payload", peer, payload.select(cells.send))
        owned = self._reduce(codec, number, weights, payload)
        for peer, cells in self._peers.items():
            self._send(number, "result", peer, owned.select(cells.receive))
        parts = [self._receive(codec, number, "result", peer, cells.send) for peer, cells in self._peers.items()]
        return RoundResult(EncodedCells.merged([owned, *parts]), weights, digests, states)

    def prepared(self, round_number: int) -> None:
        self.prepared_rounds.append(round_number)

    def _reduce(
        self, codec: Codec, number: int, weights: Mapping[int, int], payload: EncodedCells | None
    ) -> EncodedCells:
        payloads: dict[int, EncodedCells | None] = dict.fromkeys(self.view)
        if payload is not None:
            payloads[self.replica] = payload.select(self._reducer.owned)
        for replica in self.view:
            if replica != self.replica and weights[replica]:
                parts = [
                    self._receive(codec, number, "payload", peer, cells.receive)
                    for peer, cells in self._peers.items()
                    if peer[0] == replica
                ]
                empty = self._index.lengths(self._reducer.owned[:0])
                nothing = EncodedCells(codec, self._reducer.owned[:0], empty, torch.empty(0, dtype=torch.uint8))
                payloads[replica] = EncodedCells.merged([nothing, *parts])
        return (self._reducer if codec is self._codec else self._exact).reduce(payloads, weights)

    def _send(self, number: int, kind: str, peer: tuple[int, int], cells: EncodedCells) -> None:
        self._store.set(f"{number}/{kind}/{self.replica}/{self.rank}/{peer}", bytes(cells.buffer()))

    def _receive(self, codec: Codec, number: int, kind: str, peer: tuple[int, int], ids: Ids) -> EncodedCells:
        sender = f"{peer[0]}/{peer[1]}"
        buffer = self._store.get(f"{number}/{kind}/{sender}/{(self.replica, self.rank)}")
        return EncodedCells.received(codec, self._index, ids, buffer)


class ThreadGroup:
    """One rank of a replica whose ranks are threads of this process."""

    def __init__(self, rank: int, slots: list[list[torch.Tensor]], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.ranks = len(slots)
        self._slots = slots
        self._barrier = barrier

    @staticmethod
    def of(ranks: int) -> "list[ThreadGroup]":
        slots: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        barrier = threading.Barrier(ranks, timeout=60)
        return [ThreadGroup(rank, slots, barrier) for rank in range(ranks)]

    def abort(self) -> None:
        """Lets the other ranks fail at once instead of waiting for this one."""
        self._barrier.abort()

    def total(self, counts: Sequence[int]) -> list[int]:
        parts = self.swap([torch.tensor(list(counts))] * self.ranks, [len(counts)] * self.ranks)
        return [int(count) for count in torch.stack(parts).sum(0).tolist()]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.swap([values] * self.ranks, [values.numel()] * self.ranks)).sum(0)

    def swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[int]) -> list[torch.Tensor]:
        self._slots[self.rank] = list(outgoing)
        self._barrier.wait()
        received = [slot[self.rank].clone() for slot in self._slots]
        self._barrier.wait()
        assert [part.numel() for part in received] == list(incoming)
        return received


@dataclass(frozen=True)
class Seat:
    """One rank of a replica whose ranks are threads: its number in the replica, its stage and its place in both."""

    number: int
    stage: int
    layout: ReplicaLayout
    group: ThreadGroup
    replica: ReplicaTotals
    groups: Sequence[ThreadGroup]
    """All that this rank may wait in."""

    @staticmethod
    def of(layouts: Sequence[ReplicaLayout]) -> "list[Seat]":
        """All seats of a replica with these stages."""
        seats: list[Seat] = []
        for stage, (layout, leader) in enumerate(zip(layouts, ThreadGroup.of(len(layouts)), strict=True)):
            for group in ThreadGroup.of(layout.ranks):
                replica: ReplicaTotals = group
                if len(layouts) > 1:
                    replica = StageTotals(group, leader if group.rank == 0 else None)
                seats.append(Seat(len(seats), stage, layout, group, replica, (group, leader)))
        return seats

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """What this rank has of the model."""
        return self.layout.shards[self.group.rank]

    def abort(self) -> None:
        """Lets the other ranks fail at once instead of waiting for this one."""
        for group in self.groups:
            group.abort()


class StoreNeighbours:
    """Activations and gradients between the stages of a replica, by keys of a store."""

    def __init__(self, store: Store, stage: int, rank: int) -> None:
        self._store, self._stage, self._rank = store, stage, rank
        self._passes: dict[tuple[str, int, int], int] = {}

    def send_activation(self, micro_batch: int, values: torch.Tensor) -> None:
        self._send("activation", self._stage, micro_batch, values)

    def receive_activation(self, micro_batch: int) -> torch.Tensor:
        return self._receive("activation", self._stage - 1, micro_batch)

    def send_gradient(self, micro_batch: int, values: torch.Tensor) -> None:
        self._send("gradient", self._stage - 1, micro_batch, values)

    def receive_gradient(self, micro_batch: int) -> torch.Tensor:
        return self._receive("gradient", self._stage, micro_batch)

    def _send(self, kind: str, boundary: int, micro_batch: int, values: torch.Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(values, buffer)
        self._store.set(self._key(kind, boundary, micro_batch), buffer.getvalue())

    def _receive(self, kind: str, boundary: int, micro_batch: int) -> torch.Tensor:
        key = self._key(kind, boundary, micro_batch)
        values: torch.Tensor = torch.load(io.BytesIO(self._store.get(key)))
        self._store.delete_key(key)
        return values

    def _key(self, kind: str, boundary: int, micro_batch: int) -> str:
        """Of the next time that this goes over the boundary."""
        place = (kind, boundary, micro_batch)
        self._passes[place] = self._passes.get(place, 0) + 1
        return f"{kind}/{boundary}/{micro_batch}/{self._rank}/{self._passes[place]}"


class StoreLeaders:
    """Sums over the stages of a replica, by keys of a store."""

    def __init__(self, store: Store, stage: int, count: int) -> None:
        self._store, self._stage, self._count = store, stage, count
        self._calls = 0

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        self._store.set(f"sums/{self._calls}/{self._stage}", json.dumps(values.tolist()))
        parts = [json.loads(self._store.get(f"sums/{self._calls}/{stage}")) for stage in range(self._count)]
        total = torch.zeros_like(values)
        for part in parts:
            total += torch.tensor(part, dtype=values.dtype)
        return total
