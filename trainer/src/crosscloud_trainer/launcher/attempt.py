"""What the operator would make for an attempt, made as files: run document, peer table, certificates, a pod each."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from crosscloud_trainer.contract import (
    RUN_VERSION,
    ExitCode,
    Home,
    InvalidDocument,
    JobRef,
    JobSpec,
    Peer,
    PeerTable,
    ReplicaPlan,
    Report,
    RunDocument,
    StagePlan,
    dump_json,
    read_json,
)
from crosscloud_trainer.environment import MEMORY, PARENT, Memory
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.manifest import Manifest
from crosscloud_trainer.launcher.memory import free_memory
from crosscloud_trainer.launcher.ranks import in_words, usable_cores
from crosscloud_trainer.launcher.record import JobRecord
from crosscloud_trainer.launcher.shaping import Way, shaped
from crosscloud_trainer.pki import CertificateAuthority, PodIdentity
from crosscloud_trainer.reporting import Changes
from crosscloud_trainer.sizes import bytes_text

LOOPBACK = "127.0.0.1"

_PORTS = range(10_000, 32_000)  # below the range from which systems take ports for outgoing connections
_TRIES = 200


@dataclass(frozen=True)
class StageId:
    """A stage of a replica, of which there are `stages`; locally it has one pod."""

    replica: int
    stage: int
    stages: int

    def __str__(self) -> str:
        return f"replica {self.replica}" + (f" stage {self.stage}" if self.stages > 1 else "")

    @property
    def label(self) -> str:
        """In names of files and of the member."""
        return f"{self.replica}-{self.stage}" if self.stages > 1 else str(self.replica)


class LocalPod:
    """The process that plays the one pod of a stage; that of a replica's first stage speaks for it."""

    def __init__(self, place: StageId, environment: dict[str, str], log: Path, report: Path, message: Path) -> None:
        self.place, self.log = place, log
        self._report, self._message = report, message
        self._changes = Changes(report)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "crosscloud_trainer", "pod"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the launcher, which ends its pods in order
            )

    def exit_code(self) -> int | None:
        """None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def report(self) -> Report | None:
        """Its newest report, None where it hasn't written one since the last call."""
        if not self._changes.seen():
            return None
        try:
            return read_json(Report, self._report.read_bytes())
        except (OSError, InvalidDocument):
            return None

    def message(self) -> str:
        """Why it failed, in its own words."""
        try:
            return self._message.read_text() or f"see {self.log}"
        except OSError:
            return f"the pod {in_words(self.exit_code() or 0)} and left no message; see {self.log}"

    def end(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True)
class LocalJob:
    """A job on this machine. `work` is private to this run; the storage and logs stay."""

    manifest: Manifest
    record: JobRecord
    work: Path
    logs: Path
    storage_uri: str
    link_rate: float | None = None
    """Of each link between two replicas, in bytes per second each way; None leaves loopback as it is."""

    @property
    def uid(self) -> str:
        return self.record.uid

    def acknowledged(self, number: int) -> Path:
        """The file by which the pods of attempt `number` hear which checkpoints are kept."""
        return self.work / f"attempt-{number}" / "checkpoints.json"

    def start(self, number: int, held: ExitStack) -> list[LocalPod]:
        """Write the documents of attempt `number` and start its pods, and what must last as long as they in `held`."""
        spec, places = self.manifest.spec, self._places()
        folder = self.work / f"attempt-{number}"
        logs = self.logs / f"attempt-{number}"
        logs.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        self.record.begin(number)
        ports = free_ports([spec.gpus_of(place.replica) + 1 for place in places])
        (folder / "run.json").write_text(dump_json(self._run_document(number)))
        ways = self._ways(ports) if self.link_rate is not None else []
        held.enter_context(shaped(ways, self.link_rate))
        for at, place in enumerate(places):
            dialled = {way.destination: way.ports[0] for way in ways if way.source == at}
            (folder / f"peers-{place.label}.json").write_text(dump_json(self._peer_table(number, ports, dialled)))
        issuer = CertificateAuthority.create(self.uid)
        pods: list[LocalPod] = []
        try:
            for at, place in enumerate(places):
                tls = folder / f"tls-{place.label}"
                tls.mkdir(mode=0o700)
                pair = issuer.issue(self._identity(number, place))
                for name, data in (
                    ("tls.crt", pair.certificate),
                    ("tls.key", pair.key),
                    ("ca.crt", issuer.certificate),
                ):
                    (tls / name).touch(mode=0o600)
                    (tls / name).write_bytes(data)
                environment = self._environment(folder, place, ports[at])
                log = logs / f"replica-{place.label}.log"
                log.unlink(missing_ok=True)
                report, message = folder / f"report-{place.label}.json", folder / f"message-{place.label}"
                pods.append(LocalPod(place, environment, log, report, message))
        except BaseException:
            for pod in pods:
                pod.end(signal.SIGKILL)
            raise
        return pods

    def _places(self) -> list[StageId]:
        """Of all pods, in the order of their ports."""
        spec = self.manifest.spec
        counts = [spec.stages_of(replica) for replica in range(spec.replicas)]
        return [StageId(replica, stage, count) for replica, count in enumerate(counts) for stage in range(count)]

    def _environment(self, folder: Path, place: StageId, ports: range) -> dict[str, str]:
        spec = self.manifest.spec
        ranks = sum(spec.gpus_of(number) * spec.stages_of(number) for number in range(spec.replicas))
        environment = {
            "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
            **os.environ,
            "TMPDIR": str(folder),
            PARENT: str(os.getpid()),
            "CROSSCLOUD_REPLICA": str(place.replica),
            "CROSSCLOUD_STAGE": str(place.stage),
            "CROSSCLOUD_NODE": "0",
            "CROSSCLOUD_INCARNATION": "1",
            "CROSSCLOUD_RUN": str(folder / "run.json"),
            "CROSSCLOUD_PEERS": str(folder / f"peers-{place.label}.json"),
            "CROSSCLOUD_TLS": str(folder / f"tls-{place.label}"),
            "CROSSCLOUD_ACKNOWLEDGED": str(folder / "checkpoints.json"),
            "CROSSCLOUD_METRICS_PORT": "0",
            "CROSSCLOUD_MASTER_PORT": str(ports[-1]),
            "CROSSCLOUD_TERMINATION_LOG": str(folder / f"message-{place.label}"),
        }
        for name in ("CROSSCLOUD_REGISTER", "CROSSCLOUD_REPORT"):
            environment.pop(name, None)
        if place.stage == 0:
            environment["CROSSCLOUD_REPORT"] = f"file:{folder / f'report-{place.label}.json'}"
        memory = free_memory()
        if memory is not None:  # shared with the other pods here, which may not have taken theirs yet
            share = memory.size * spec.gpus_of(place.replica) // ranks
            environment[MEMORY] = str(
                Memory(share, f"for {place}, its share of {bytes_text(memory.size)} {memory.where}")
            )
        if place.replica == place.stage == 0:  # the lowest replica in the home opens the view
            environment["CROSSCLOUD_REGISTER"] = f"file:{self.work / 'view.json'}"
        return environment

    def _run_document(self, number: int) -> RunDocument:
        spec, manifest = self.manifest.spec, self.manifest
        plans = tuple(
            ReplicaPlan(
                index=replica,
                incarnation=1,
                zero_stage=spec.zero_stage_of(replica),
                stages=tuple(
                    StagePlan(place.stage, _member(spec, place), nodes=1, gpus_per_node=spec.gpus_of(replica))
                    for place in self._places()
                    if place.replica == replica
                ),
            )
            for replica in range(spec.replicas)
        )
        return RunDocument(
            api_version=RUN_VERSION,
            job=JobRef(namespace=manifest.namespace, name=manifest.name, uid=self.uid),
            attempt=number,
            home=Home(number=1, member=_member(spec, self._places()[0])),
            replicas=plans,
            sync=spec.sync,
            activations=spec.activations,
            training=spec.training,
            script=spec.script,
            storage_uri=self.storage_uri,
            checkpoint=spec.checkpoint,
            resume_from=self.record.checkpoints,
        )

    def _ways(self, ports: list[range]) -> list[Way]:
        """How each pod dials each other one: by ports of its own."""
        pairs = [(a, b) for a in range(len(ports)) for b in range(len(ports)) if a != b]
        blocks = free_ports([len(ports[b]) - 1 for _, b in pairs])
        return [Way(a, b, block, ports[b][0]) for (a, b), block in zip(pairs, blocks, strict=True)]

    def _peer_table(self, number: int, ports: list[range], dialled: Mapping[int, int]) -> PeerTable:
        """`dialled` are the first ports of pods, by their number, that are reached elsewhere than where they listen."""
        peers = tuple(
            Peer(
                replica=place.replica,
                stage=place.stage,
                node=0,
                incarnation=1,
                member=_member(self.manifest.spec, place),
                server_name=self._identity(number, place).server_name,
                direct=LOOPBACK,
                link_port=dialled.get(at, ports[at][0]),
            )
            for at, place in enumerate(self._places())
        )
        return PeerTable(api_version=RUN_VERSION, attempt=number, peers=peers)

    def _identity(self, number: int, place: StageId) -> PodIdentity:
        return PodIdentity(self.uid, number, place.replica, place.stage, node=0, incarnation=1)


def free_ports(sizes: list[int]) -> list[range]:
    """Disjoint ranges of ports that are free on loopback now, one of each size. Raises Failure where there are none."""
    found: list[range] = []
    with ExitStack() as held:
        for size in sizes:
            for _ in range(_TRIES):
                first = random.randrange(_PORTS.start, _PORTS.stop - size)  # noqa: S311 - not a secret
                block = range(first, first + size)
                with ExitStack() as trial:
                    if all(_hold(port, trial) for port in block):
                        held.push(trial.pop_all())
                        found.append(block)
                        break
            else:
                message = f"no {size} neighbouring ports are free on {LOOPBACK} from {_PORTS.start} to {_PORTS.stop}"
                raise Failure(ExitCode.INVALID_INPUT, message)
    return found


def _hold(port: int, stack: ExitStack) -> bool:
    probe = stack.enter_context(closing(socket.socket()))
    try:
        probe.bind((LOOPBACK, port))
    except OSError:
        return False
    return True


def _member(spec: JobSpec, place: StageId) -> str:
    """One of its own for each replica, or for each of its stages where it has several, unless the replica's override
    names them. Where data is only for some members, those are played in turn.
    """
    override = spec.override(place.replica)
    if override and override.stage_members:
        return override.stage_members[place.stage]
    sources = spec.training.data.all_sources if spec.training is not None else ()
    named = sorted({member for source in sources for member in source.members or ()})
    if not named:
        return f"local-{place.label}"
    return override.members[0] if override and override.members else named[place.replica % len(named)]
