"""The run document (what an attempt runs) and the peer table (who is reachable where).

The operator writes one run document per attempt and never changes it; the peer table may change during a run. Private
keys are in neither. A document of a newer version ends the trainer with `ExitCode.CONTRACT_TOO_NEW`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crosscloud_trainer.contract.checkpoint import MAX_REMEMBERED, CheckpointPolicy, StoredCheckpoint
from crosscloud_trainer.contract.manifest import MAX_STAGES, Script, Training
from crosscloud_trainer.contract.reading import Fault, InvalidDocument, Problem, dump_json, parse_json, read, rule
from crosscloud_trainer.contract.sync import Activations, Sync

RUN_VERSION = "run.crosscloud.dev/v1"
LINK_PORT = 7400  # the rank with local number k of a pod listens on LINK_PORT + k
MASTER_PORT = 29400  # torch's rendezvous on node 0 of a stage
METRICS_PORT = 9400


class ContractTooNew(Exception):
    """A document of a version that this trainer doesn't know."""

    def __init__(self, found: str) -> None:
        super().__init__(f"apiVersion: found {found!r}; this trainer reads {RUN_VERSION}; use a newer trainer image")


@dataclass(frozen=True)
class JobRef:
    namespace: str = rule()
    name: str = rule()
    uid: str = rule()


@dataclass(frozen=True)
class Home:
    """The member whose API server keeps the view; its number grows when it moves."""

    number: int = rule(minimum=1)
    member: str = rule()


@dataclass(frozen=True)
class StagePlan:
    """One stage of a replica: `nodes` pods of `gpus_per_node` ranks each, in one member."""

    index: int = rule(minimum=0)
    member: str = rule()
    nodes: int = rule(minimum=1)
    gpus_per_node: int = rule(minimum=1)

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class ReplicaPlan:
    """`stages` in their order, as many ranks in each; their members may differ."""

    index: int = rule(minimum=0)
    incarnation: int = rule(minimum=1)
    zero_stage: int = rule(minimum=0, maximum=3)
    stages: tuple[StagePlan, ...] = rule(min_items=1, max_items=MAX_STAGES)

    @property
    def boundaries(self) -> int:
        """How many neighbouring stages lie in different members."""
        return sum(before.member != after.member for before, after in itertools.pairwise(self.stages))

    def check(self) -> Iterator[Fault]:
        indexes = [stage.index for stage in self.stages]
        if indexes != list(range(len(indexes))):
            yield "stages", indexes, "must be numbered from 0, in their order"
        ranks = [stage.ranks for stage in self.stages]
        if len(set(ranks)) > 1:
            yield "stages", ranks, "must have as many ranks each"


@dataclass(frozen=True)
class RunDocument:
    """All that the pods of one attempt must agree on.

    Exactly one of `training` and `script` is given, the other one is None. Without `activations` values cross stage
    boundaries as they are. `resume_from` has the job's checkpoints, newest first: training goes on from the first that
    is whole.
    """

    api_version: str = rule()
    job: JobRef = rule()
    attempt: int = rule(minimum=1)
    home: Home = rule()
    replicas: tuple[ReplicaPlan, ...] = rule(min_items=1, unique="index")
    sync: Sync = rule()
    storage_uri: str = rule()
    activations: Activations | None = rule(None)
    training: Training = rule(None)
    script: Script | None = rule(None)
    checkpoint: CheckpointPolicy = rule(factory=CheckpointPolicy)
    resume_from: tuple[StoredCheckpoint, ...] = rule((), max_items=MAX_REMEMBERED)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON text: handshakes compare it."""
        return hashlib.sha256(dump_json(self).encode()).hexdigest()

    @property
    def members(self) -> list[set[str]]:
        """The members in which each replica runs, in the order of their numbers."""
        return [{stage.member for stage in item.stages} for item in sorted(self.replicas, key=lambda item: item.index)]

    def position(self, index: int) -> int:
        """Where a replica stands in that order."""
        return sorted(item.index for item in self.replicas).index(index)

    def replica(self, index: int) -> ReplicaPlan:
        return next(item for item in self.replicas if item.index == index)


@dataclass(frozen=True)
class Peer:
    """One pod. `direct` is its address inside its own member, `gateway` the address and port for the others.

    `server_name` is what its certificate says; the rank with local number k answers to the TLS name
    `k{k}.{server_name}`, by which the gateway finds it.
    """

    replica: int = rule(minimum=0)
    stage: int = rule(minimum=0)
    node: int = rule(minimum=0)
    incarnation: int = rule(minimum=1)
    member: str = rule()
    server_name: str = rule()
    direct: str = rule()
    link_port: int = rule(LINK_PORT, minimum=1, maximum=65535)
    gateway: str | None = rule(None, pattern=r"^.+:[0-9]+$")


@dataclass(frozen=True)
class PeerTable:
    api_version: str = rule()
    attempt: int = rule(minimum=1)
    peers: tuple[Peer, ...] = rule(min_items=1)

    def check(self) -> Iterator[Fault]:
        seen: set[tuple[int, int, int]] = set()
        for number, peer in enumerate(self.peers):
            key = (peer.replica, peer.stage, peer.node)
            if key in seen:
                yield f"peers[{number}]", list(key), "replica, stage and node must be unique"
            seen.add(key)

    def peer(self, replica: int, stage: int, node: int) -> Peer:
        return next(p for p in self.peers if (p.replica, p.stage, p.node) == (replica, stage, node))


def read_run_document(text: str | bytes) -> RunDocument:
    """Raises ContractTooNew for another apiVersion, InvalidDocument for anything else that is wrong."""
    return read(RunDocument, _of_this_version(text))


def read_peer_table(text: str | bytes) -> PeerTable:
    """Raises ContractTooNew for another apiVersion, InvalidDocument for anything else that is wrong."""
    return read(PeerTable, _of_this_version(text))


def _of_this_version(text: str | bytes) -> Any:
    """The document's plain data, once its apiVersion is known."""
    data = parse_json(text)
    version = data.get("apiVersion") if isinstance(data, dict) else None
    if isinstance(version, str) and version.startswith("run.crosscloud.dev/") and version != RUN_VERSION:
        raise ContractTooNew(version)
    if version != RUN_VERSION:
        raise InvalidDocument([Problem("apiVersion", version, f"must be {RUN_VERSION}")])
    return data
