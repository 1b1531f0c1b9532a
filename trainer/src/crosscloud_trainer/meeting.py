"""How a rank meets the others: the ranks of its own replica by torch, those of the other replicas over the link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from crosscloud_trainer import engine
from crosscloud_trainer.compress import Codec, Reducer, codec_of
from crosscloud_trainer.contract import ActivationCodec, Activity, ExitCode
from crosscloud_trainer.contract.report import timestamp
from crosscloud_trainer.environment import Attempt, PodEnvironment, read_attempt
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.group import ReplicaTotals, TorchGroup
from crosscloud_trainer.journal import Journal, Wan, wan_of_vector, wan_vector
from crosscloud_trainer.link import Authority, Link
from crosscloud_trainer.link.mail import Mail
from crosscloud_trainer.link.traffic import PAYLOAD, RESULT
from crosscloud_trainer.membership.exchange import LinkExchange
from crosscloud_trainer.membership.numbering import Numbering
from crosscloud_trainer.membership.register import open_view, register_from
from crosscloud_trainer.membership.solo import SoloExchange
from crosscloud_trainer.metrics import package_version
from crosscloud_trainer.pipeline import Position, StageTotals
from crosscloud_trainer.reporting import Stall, Status
from crosscloud_trainer.sizes import FP32_BYTES
from crosscloud_trainer.stage_link import Boundary, StageLeaders, StageLink
from crosscloud_trainer.topology import own_cells

# A round may wait for days while a link is cut; a rank that has gone is noticed by its closed connection.
COLLECTIVE_TIMEOUT = timedelta(days=30)

_GOODBYE_SECONDS = 30.0
_STALL_SECONDS = 10.0  # a round in which nothing moves for less is no news


@dataclass(frozen=True)
class Place:
    """Where this rank stands; `rank` of `ranks` in its stage, `local` in its pod."""

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
        return self.rank == 0 and self.pod.stage == 0

    @property
    def stages(self) -> int:
        """Of this replica."""
        return len(self.attempt.plan.stages)

    @property
    def position(self) -> Position:
        """Of this rank's stage."""
        return Position(self.pod.stage, self.stages)

    @property
    def numbering(self) -> Numbering:
        return Numbering(self.attempt.run.replicas)

    @property
    def micro_batch(self) -> int:
        """Sequences that this rank takes at a time."""
        return self.attempt.run.training.micro_batch(self.ranks, self.stages)

    @property
    def micro_batches(self) -> int:
        """Of this rank in an inner step."""
        return self.attempt.run.training.batch_size // self.ranks // self.micro_batch

    @property
    def number(self) -> int:
        """Of this rank in its replica, over all stages."""
        return self.numbering.number(self.pod.replica, self.pod.stage, self.rank)

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
            host, port, place.ranks, is_master=place.rank == 0, timeout=remaining
        )
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT
        )
    except (dist.DistError, RuntimeError) as fault:
        who = f"replica {place.pod.replica} stage {place.pod.stage}"
        message = f"not all {place.ranks} ranks of {who} met at {host}:{port}: {first_line(fault)}"
        raise Failure(ExitCode.PEERS_MISSING, message) from fault
    return engine.init_distributed(COLLECTIVE_TIMEOUT)


class Meeting:
    """This rank's connections: to the other replicas of the view, and to the other stages of its own; a replica of one
    stage that is alone has none.
    """

    def __init__(
        self,
        exchange: LinkExchange | SoloExchange,
        link: Link | None = None,
        reducer: Reducer | None = None,
        stages: StageLink | None = None,
        leaders: StageLeaders | None = None,
    ) -> None:
        self.exchange, self.link, self.reducer = exchange, link, reducer
        self.stages, self.leaders = stages, leaders

    def lost_stages(self) -> tuple[int, ...]:
        """Stages of this replica that this rank has met and has no connection to now; any thread may ask."""
        if self.link is None:
            return ()
        own = self.link.me.rank.replica
        lost = (peer for peer, state in self.link.states().items() if not state.connected)
        return tuple(sorted({peer.stage for peer in lost if peer.replica == own}))

    def totals(self, device: torch.device) -> ReplicaTotals:
        """Sums over all ranks of this replica."""
        group = TorchGroup(device)
        return group if self.stages is None else StageTotals(group, self.leaders)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.link is not None:
            self.link.flush(_GOODBYE_SECONDS)  # others may not have heard the last word yet
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


def meet_replicas(
    place: Place, trained: engine.Engine, data: Mapping[str, str], deadline: float, width: int = 0
) -> Meeting:
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
    if len(run.replicas) == 1 and place.stages == 1:
        return Meeting(SoloExchange(pod.replica, authority))
    agreement = {
        "run document": run.digest(),
        **data,
        "parameters": trained.index.digest(),
        "trainer version": package_version(),
    }
    link = Link(place.local, pod.tls, pod.peers, agreement, authority)
    link.start()
    mail = Mail(link)
    stages, leaders = meet_stages(place, link, mail, width) if place.stages > 1 else (None, None)
    if len(run.replicas) == 1:
        return Meeting(SoloExchange(pod.replica, authority), link, None, stages, leaders)
    codec = codec_of(run.sync.codec_spec)
    first = place.numbering.stage_ranks((pod.replica, place.number))[0]
    holders = trained.layout.holders.shifted(first)
    owned = own_cells(trained.index, place.replicas, holders, pod.replica, place.number)
    reducer = Reducer(codec, trained.index, owned, error_feedback=run.sync.error_feedback)
    exchange = LinkExchange(link, run, trained.index, codec, holders, pod.replica, place.number, reducer, mail)
    exchange.connect(max(1.0, deadline - time.monotonic()))
    return Meeting(exchange, link, reducer, stages, leaders)


def activation_codec(place: Place) -> Codec | None:
    """How values cross a stage boundary between members; None: as they are."""
    activations = place.attempt.run.activations
    if activations is None or activations.codec is ActivationCodec.NONE:
        return None
    return codec_of(activations.codec_spec)


def meet_stages(place: Place, link: Link, mail: Mail, width: int) -> tuple[StageLink, StageLeaders | None]:
    """The ranks with this one's number in the stages before and after, and the first ranks of all stages. Hidden states
    are `width` wide.
    """
    pod, plans, numbering = place.pod, place.attempt.plan.stages, place.numbering

    def boundary(stage: int) -> Boundary | None:
        if not 0 <= stage < place.stages:
            return None
        peer = numbering.address((pod.replica, numbering.number(pod.replica, stage, place.rank)))
        return Boundary(peer, None if plans[stage].member == plans[pod.stage].member else activation_codec(place))

    leaders = None
    if place.rank == 0:
        leaders = StageLeaders(link, mail, [numbering.address(peer) for peer in numbering.leaders(pod.replica)])
    largest = place.micro_batch * place.attempt.run.training.sequence_length
    link.allow(largest * width * FP32_BYTES)
    return StageLink(link, mail, boundary(pod.stage - 1), boundary(pod.stage + 1)), leaders


class Watch:
    """What changes while the training thread waits in a round: seen by the status thread."""

    def __init__(self, meeting: Meeting, journal: Journal) -> None:
        self._meeting, self._journal = meeting, journal
        self._looked = time.monotonic()
        self._stall = Stall(_STALL_SECONDS)

    def live(self, status: Status) -> Status:
        """The status with progress, view and what a round, or a step in stages, waits for."""
        exchange = self._meeting.exchange
        self._journal.settled(exchange.settled_round)
        self._journal.mismatches = exchange.mismatches
        progress = self._journal.progress
        now, before = time.monotonic(), self._looked
        self._looked = now
        activity, waiting = status.activity, exchange.waiting()
        if waiting is not None:
            self._journal.waited(now - before)
        stalled = self._stall.since(waiting.since if waiting else None, self._moved() if waiting else 0, time.time())
        if waiting is not None and stalled is not None:
            activity = Activity.WAITING
            progress = replace(progress, waiting_for=tuple(waiting.replicas), waiting_since=timestamp(stalled))
        since = self._meeting.stages.awaited_since if self._meeting.stages is not None else None
        if since is not None and (lost := self._meeting.lost_stages()):
            activity = Activity.WAITING
            progress = replace(progress, waiting_for_stages=lost, waiting_since=timestamp(since))
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


def count_traffic(meeting: Meeting, journal: Journal, replica: ReplicaTotals, place: Place) -> None:
    """Add up the bytes on the links of all ranks of the replica. Collective."""
    if meeting.link is None:
        return
    own: dict[int, Wan] = {}
    for peer in meeting.link.traffic():
        if peer.wan:
            before = own.get(peer.peer.replica, Wan())
            own[peer.peer.replica] = Wan(_added(before.sent, peer.sent), _added(before.received, peer.received))
    others = [number for number in place.replicas if number != place.pod.replica or place.stages > 1]
    journal.traffic(wan_of_vector(replica.total(wan_vector(own, others)), others))
    journal.refusals = meeting.link.refusals()


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in {*first, *second}}


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
