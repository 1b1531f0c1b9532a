"""What the pods of an attempt are told: the run document and the peer table, from the plan in the job's status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosscloud_operator.domain import names
from crosscloud_operator.domain.names import PodId
from crosscloud_operator.domain.record import Home, PlacedStage
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.domain.spec import Job
from crosscloud_trainer import contract
from crosscloud_trainer.contract import Peer, PeerTable, ReplicaPlan, RunDocument, StagePlan, StoredCheckpoint
from crosscloud_trainer.pki import PodIdentity


@dataclass(frozen=True)
class PlannedPod:
    """A pod of the plan: who it is, where it goes, and its derived names."""

    id: PodId
    name: str
    member: str
    node: str
    gpus: int

    @property
    def reports(self) -> bool:
        """Whether rank 0 of the replica is in it: it writes the report and, in the home, opens the view."""
        return self.id.stage == 0 and self.id.node == 0

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.member}/{self.name}"


def planned_pods(job: str, attempt: int, plan: Sequence[PlacedStage]) -> tuple[PlannedPod, ...]:
    found = []
    for stage in plan:
        for number, node in enumerate(stage.nodes):
            pod_id = PodId(attempt, stage.replica, stage.incarnation, stage.stage, number)
            found.append(PlannedPod(pod_id, names.pod(job, pod_id), stage.member, node.name, node.gpus))
    return tuple(found)


def identity(job_uid: str, pod: PodId) -> PodIdentity:
    return PodIdentity(job_uid, pod.attempt, pod.replica, pod.stage, pod.node, pod.incarnation)


def choose_home(plan: Sequence[PlacedStage], hub_member: str | None) -> str:
    """The member with most replicas, each counted where its first stage is, since that writes into the register; then
    the one with the lowest of them; the hub's own cluster last.
    """
    first = {stage.replica: stage.member for stage in plan if stage.stage == 0}
    number = Counter(first.values())
    lowest = {name: min(replica for replica, member in first.items() if member == name) for name in number}
    return min(lowest, key=lambda name: (name == hub_member, -number[name], lowest[name]))


def run_document(
    job: Job, attempt: int, home: Home, plan: Sequence[PlacedStage], checkpoints: tuple[StoredCheckpoint, ...] = ()
) -> RunDocument:
    replicas = []
    for index in sorted({stage.replica for stage in plan}):
        stages = sorted((stage for stage in plan if stage.replica == index), key=lambda stage: stage.stage)
        replicas.append(
            ReplicaPlan(
                index=index,
                incarnation=stages[0].incarnation,
                zero_stage=stages[0].zero_stage,
                stages=tuple(
                    StagePlan(stage.stage, stage.member, len(stage.nodes), stage.nodes[0].gpus) for stage in stages
                ),
            )
        )
    return RunDocument(
        api_version=contract.RUN_VERSION,
        job=contract.JobRef(job.id.namespace, job.id.name, job.id.uid),
        attempt=attempt,
        home=contract.Home(home.number, home.member),
        replicas=tuple(replicas),
        sync=job.spec.sync,
        activations=job.spec.activations,
        training=job.spec.training,
        script=job.spec.script,
        storage_uri=job.spec.storage.uri,
        checkpoint=job.spec.checkpoint,
        resume_from=checkpoints,
    )


def peer_table(
    job: Job, attempt: int, plan: Sequence[PlacedStage], gateways: Mapping[str, str], settings: JobSettings
) -> PeerTable:
    """`gateways`: host:port by member; empty where all pods lie in one member."""
    peers = []
    for pod in planned_pods(job.id.name, attempt, plan):
        peers.append(
            Peer(
                replica=pod.id.replica,
                stage=pod.id.stage,
                node=pod.id.node,
                incarnation=pod.id.incarnation,
                member=pod.member,
                server_name=identity(job.id.uid, pod.id).server_name,
                direct=names.host(job.id.name, pod.id, job.id.namespace, settings.cluster_domain),
                gateway=gateways.get(pod.member),
            )
        )
    return PeerTable(contract.RUN_VERSION, attempt, tuple(peers))
