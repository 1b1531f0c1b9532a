"""How a rank meets the others: the ranks of its own replica by torch, those of the other replicas over the link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import torch
import torch.distributed as dist

from crosscloud_trainer import engine
from crosscloud_trainer.compress import Reducer, codec_of
from crosscloud_trainer.contract import Activity, ExitCode
from crosscloud_trainer.environment import Attempt, PodEnvironment, read_attempt
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.group import TorchGroup
from crosscloud_trainer.journal import Journal, Wan, wan_of_vector, wan_vector
from crosscloud_trainer.link import Authority, Link
from crosscloud_trainer.link.traffic import PAYLOAD, RESULT
from crosscloud_trainer.membership.exchange import LinkExchange
from crosscloud_trainer.membership.register import open_view, register_from
from crosscloud_trainer.membership.solo import SoloExchange
from crosscloud_trainer.metrics import package_version
from crosscloud_trainer.reporting import Stall, Status
from crosscloud_trainer.topology import own_cells

# A round may wait for days while a link is cut; a rank that has gone is noticed by its closed connection.
COLLECTIVE_TIMEOUT = timedelta(days=30)

_STALL_SECONDS = 10.0  # a round in which nothing moves for less is no news


@dataclass(frozen=True)
class Place:
    """Where this rank stands."""

    pod: PodEnvironment
    attempt: Attempt
    rank: int
    ranks: int
    local: int

    @property
    def replicas(self) -> list[int]:
        return sorted(item.index for item in self.attempt.run.replicas)

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for its replica."""
        return self.rank == 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place:
        pod = PodEnvironment.read(environ)
        rank, ranks, local = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(pod, read_attempt(pod), rank, ranks, local)


def meet_ranks(place: Place, environ: Mapping[str, str], deadline: float) -> torch.device:
    """Join the ranks of this replica's stage. Raises Failure(PEERS_MISSING) at the start deadline."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    remaining = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its module's list
            host, port, place.ranks, is_master=place.first, timeout=remaining
        )
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT
        )
    except (dist.DistError, RuntimeError) as fault:
        message = (
            f"not all {place.ranks} ranks of replica {place.pod.replica} met at {host}:{port}: {first_line(fault)}"
        )
        raise Failure(ExitCode.PEERS_MISSING, message) from fault
    return engine.init_distributed(COLLECTIVE_TIMEOUT)


class Meeting:
    """This rank's connections to the other replicas of the view; none where the view is one replica."""

    def __init__(self, exchange: LinkExchange | SoloExchange, link: Link | None, reducer: Reducer | None) -> None:
        self.exchange, self.link, self.reducer = exchange, link, reducer

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    def settle(self) -> None:
        """Return when the whole view has prepared the last round: only then may outsiders hear of it."""
        self.exchange.settle(COLLECTIVE_TIMEOUT.total_seconds())


def agree_on_data(place: Place, summary: str) -> None:
    """Raises Failure(INVALID_INPUT) where the nodes of this replica have unlike training files. Collective."""
    told: list[str] = [""] * place.ranks
    dist.all_gather_object(told, summary)
    if other := next((rank for rank, text in enumerate(told) if text != told[0]), None):
        unlike = f"rank 0 and rank {other} of replica {place.pod.replica} differ in data: {told[0]} and {told[other]}"
        raise Failure(ExitCode.INVALID_INPUT, unlike)


def meet_replicas(place: Place, trained: engine.Engine, data: Mapping[str, str], deadline: float) -> Meeting:
    """Open or learn the view and meet the ranks of the other replicas over the link. Raises LinkError.

    `data` says what all replicas must have alike of what they train on, by name: one order of a source's sequences is
    dealt to all that read it.
    """
    run, pod = place.attempt.run, place.pod
    authority = Authority(run.home.number, 0, 0)
    if place.first and pod.register is not None:
        incarnations = {item.index: item.incarnation for item in run.replicas}
        view = open_view(register_from(pod.register), run.home.number, run.attempt, incarnations)
        authority = view.authority
    if len(run.replicas) == 1:
        return Meeting(SoloExchange(pod.replica, authority), None, None)
    codec = codec_of(run.sync.codec_spec)
    holders = trained.layout.holders
    owned = own_cells(trained.index, place.replicas, holders, pod.replica, place.rank)
    reducer = Reducer(codec, trained.index, owned, error_feedback=run.sync.error_feedback)
    agreement = {
        "run document": run.digest(),
        **data,
        "parameters": trained.index.digest(),
        "trainer version": package_version(),
    }
    link = Link(place.local, pod.tls, pod.peers, agreement, authority)
    link.start()
    exchange = LinkExchange(link, run, trained.index, codec, holders, pod.replica, pod.stage, place.rank, reducer)
    exchange.connect(max(1.0, deadline - time.monotonic()))
    return Meeting(exchange, link, reducer)


class Watch:
    """What changes while the training thread waits in a round: seen by the status thread."""

    def __init__(self, meeting: Meeting, journal: Journal) -> None:
        self._meeting, self._journal = meeting, journal
        self._looked = time.monotonic()
        self._stall = Stall(_STALL_SECONDS)

    def live(self, status: Status) -> Status:
        """The status with progress, view and what a round waits for."""
        exchange = self._meeting.exchange
        self._journal.settled(exchange.settled_round)
        progress = self._journal.progress
        now, before = time.monotonic(), self._looked
        self._looked = now
        activity, waiting = status.activity, exchange.waiting()
        if waiting is not None:
            self._journal.waited(now - before)
        stalled = self._stall.since(waiting.since if waiting else None, self._moved() if waiting else 0, time.time())
        if waiting is not None and stalled is not None:
            activity = Activity.WAITING
            since = datetime.fromtimestamp(stalled, UTC).isoformat(timespec="seconds")
            progress = replace(
                progress, waiting_for=tuple(waiting.replicas), waiting_since=since.replace("+00:00", "Z")
            )
        authority = exchange.authority
        return replace(
            status,
            home=authority.home,
            term=authority.term,
            view=authority.view,
            activity=activity,
            progress=progress,
        )

    def _moved(self) -> int:
        """Bytes of rounds that this rank's link has moved, either way; heartbeats go on while a round stands still."""
        peers = self._meeting.link.traffic() if self._meeting.link is not None else []
        return sum(count[kind] for peer in peers for count in (peer.sent, peer.received) for kind in (PAYLOAD, RESULT))


def count_traffic(meeting: Meeting, journal: Journal, group: TorchGroup, place: Place) -> None:
    """Add up the bytes on the links of all ranks. Collective."""
    if meeting.link is None:
        return
    own: dict[int, Wan] = {}
    for peer in meeting.link.traffic():
        if peer.wan:
            before = own.get(peer.peer.replica, Wan())
            own[peer.peer.replica] = Wan(_added(before.sent, peer.sent), _added(before.received, peer.received))
    others = [replica for replica in place.replicas if replica != place.pod.replica]
    journal.traffic(wan_of_vector(group.total(wan_vector(own, others)), others))
    journal.refusals = meeting.link.refusals()


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in {*first, *second}}


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
