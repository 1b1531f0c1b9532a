"""What a pod and its ranks are told by environment variables, and how a rank answers its launcher."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from crosscloud_trainer.contract import (
    MASTER_PORT,
    METRICS_PORT,
    ContractTooNew,
    ExitCode,
    InvalidDocument,
    Peer,
    PeerTable,
    Problem,
    ReplicaPlan,
    RunDocument,
    StagePlan,
    read_peer_table,
    read_run_document,
)
from crosscloud_trainer.failures import Failure, invalid

T = TypeVar("T")

# what the launcher adds for its ranks
STATUS_FILE = "CROSSCLOUD_STATUS"  # local rank 0 keeps its status there
DATA_FOLDER = "CROSSCLOUD_DATA"  # the tokens of this pod
INITIAL_FOLDER = "initial"  # in that folder, the weights to begin with
DEADLINE = "CROSSCLOUD_DEADLINE"  # of the start, on this host's monotonic clock
ERROR_FILE = "CROSSCLOUD_ERROR_FILE"  # a rank that fails leaves its message there
MEMORY = "CROSSCLOUD_MEMORY"  # what the ranks of this pod may take together, see `Memory`
PARENT = "CROSSCLOUD_PARENT_PID"  # whose end is the end of this process

_START_DEADLINE = 300
_GRACE = 30  # as Kubernetes has it
_LAST_WORD_SECONDS = 5.0  # of the grace period, to deliver the completion before the kubelet kills
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Memory:
    """Bytes that may be taken, and in words what sets that limit."""

    size: int
    where: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Memory | None:
        """What the launcher measured before any rank took some of it."""
        size, _, where = environ.get(MEMORY, "").partition(" ")
        return cls(int(size), where) if size else None

    def __str__(self) -> str:
        return f"{self.size} {self.where}"


@dataclass(frozen=True)
class PodEnvironment:
    """One pod's place in the attempt and the files that it was given.

    `report` and `register` are `configmap:NAMESPACE/NAME` or `file:PATH`. `acknowledged` is where the operator says
    which checkpoints it has saved in the job's status. `metrics_port` 0 serves no metrics.
    `start_deadline` is in seconds: a pod that hasn't met its peers by then ends. `grace` is how long the pod may go on
    after SIGTERM, in seconds.
    """

    replica: int
    stage: int
    node: int
    incarnation: int
    run: Path
    peers: Path
    tls: Path
    report: str | None
    report_credentials: Path
    register: str | None
    acknowledged: Path | None
    metrics_port: int
    master_port: int
    start_deadline: int
    grace: int
    termination_log: Path

    @property
    def rank_grace(self) -> float:
        """Seconds that ranks may go on after SIGTERM; then they are killed, and the launcher has its last word."""
        return max(1.0, self.grace - _LAST_WORD_SECONDS)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PodEnvironment:
        """Raises Failure(INVALID_INPUT) with every variable that is missing or wrong."""
        problems: list[Problem] = []

        def number(name: str, default: int | None = None, minimum: int = 0, maximum: int = 2**31) -> int:
            text = environ.get(name, "" if default is None else str(default))
            if text.isdecimal() and len(text) <= len(str(maximum)) and minimum <= int(text) <= maximum:
                return int(text)
            problems.append(Problem(name, text, f"must be a whole number from {minimum} to {maximum}"))
            return minimum

        made = cls(
            replica=number("CROSSCLOUD_REPLICA"),
            stage=number("CROSSCLOUD_STAGE"),
            node=number("CROSSCLOUD_NODE"),
            incarnation=number("CROSSCLOUD_INCARNATION", minimum=1),
            run=Path(environ.get("CROSSCLOUD_RUN", "/etc/crosscloud/run/run.json")),
            peers=Path(environ.get("CROSSCLOUD_PEERS", "/etc/crosscloud/peers/peers.json")),
            tls=Path(environ.get("CROSSCLOUD_TLS", "/etc/crosscloud/tls")),
            report=environ.get("CROSSCLOUD_REPORT"),
            report_credentials=report_credentials(environ),
            register=environ.get("CROSSCLOUD_REGISTER"),
            acknowledged=Path(environ["CROSSCLOUD_ACKNOWLEDGED"]) if "CROSSCLOUD_ACKNOWLEDGED" in environ else None,
            metrics_port=number("CROSSCLOUD_METRICS_PORT", METRICS_PORT, maximum=65535),
            master_port=number("CROSSCLOUD_MASTER_PORT", MASTER_PORT, minimum=1, maximum=65535),
            start_deadline=number("CROSSCLOUD_START_DEADLINE", _START_DEADLINE, minimum=1),
            grace=number("CROSSCLOUD_GRACE", _GRACE, minimum=1),
            termination_log=Path(environ.get("CROSSCLOUD_TERMINATION_LOG", "/dev/termination-log")),
        )
        for name, value in (("CROSSCLOUD_REPORT", made.report), ("CROSSCLOUD_REGISTER", made.register)):
            if value is not None and not value.startswith(("configmap:", "file:")):
                problems.append(Problem(name, value, "must be configmap:NAMESPACE/NAME or file:PATH"))
        if problems:
            raise invalid(problems)
        return made


def report_credentials(environ: Mapping[str, str]) -> Path:
    """The folder with token and ca.crt for the API server of this pod's member."""
    return Path(environ.get("CROSSCLOUD_REPORT_CREDENTIALS", "/etc/crosscloud/report"))


@dataclass(frozen=True)
class Attempt:
    """The two documents of an attempt, as seen from one pod."""

    run: RunDocument
    peers: PeerTable
    plan: ReplicaPlan
    stage: StagePlan
    me: Peer

    @property
    def master(self) -> Peer:
        """The pod with rank 0 of this stage."""
        return self.peers.peer(self.me.replica, self.me.stage, 0)


def read_attempt(pod: PodEnvironment) -> Attempt:
    """Read and cross-check the documents. Raises Failure(INVALID_INPUT or CONTRACT_TOO_NEW)."""
    run = _document(pod.run, "CROSSCLOUD_RUN", read_run_document)
    peers = _document(pod.peers, "CROSSCLOUD_PEERS", read_peer_table)
    problems = []
    if peers.attempt != run.attempt:
        problems.append(Problem("peers: attempt", peers.attempt, f"must be the run's, {run.attempt}"))
    plan = next((item for item in run.replicas if item.index == pod.replica), None)
    stage = next((item for item in plan.stages if item.index == pod.stage), None) if plan else None
    if plan is None or stage is None:
        found = {"replica": pod.replica, "stage": pod.stage}
        raise invalid([*problems, Problem("CROSSCLOUD_REPLICA", found, "the run document has no such stage")])
    if pod.node >= stage.nodes:
        problems.append(Problem("CROSSCLOUD_NODE", pod.node, f"must be below the stage's nodes, {stage.nodes}"))
    if pod.incarnation != plan.incarnation:
        allowed = f"must be the run document's, {plan.incarnation}"
        problems.append(Problem("CROSSCLOUD_INCARNATION", pod.incarnation, allowed))
    known = {(peer.replica, peer.stage, peer.node): peer for peer in peers.peers}
    for replica in run.replicas:
        for part in replica.stages:
            for node in range(part.nodes):
                if (replica.index, part.index, node) not in known:
                    missing = {"replica": replica.index, "stage": part.index, "node": node}
                    problems.append(Problem("peers: peers", missing, "is missing in the peer table"))
    for name in ("tls.crt", "tls.key", "ca.crt"):
        if not (pod.tls / name).is_file():
            problems.append(Problem("CROSSCLOUD_TLS", str(pod.tls), f"must be a folder with {name}"))
    if problems:
        raise invalid(problems)
    return Attempt(run, peers, plan, stage, known[pod.replica, pod.stage, pod.node])


def _document(path: Path, variable: str, reader: Callable[[bytes], T]) -> T:
    try:
        return reader(path.read_bytes())
    except OSError as fault:
        allowed = f"must be a file that can be read ({fault.strerror})"
        raise invalid([Problem(variable, str(path), allowed)]) from fault
    except InvalidDocument as fault:
        raise invalid([f"{path.name}: {problem}" for problem in fault.problems]) from fault
    except ContractTooNew as fault:
        raise Failure(ExitCode.CONTRACT_TOO_NEW, f"{path.name}: {fault}") from fault


def die_with_parent(environ: Mapping[str, str], signal_number: int) -> None:
    """Have the kernel send `signal_number` to this process once the launcher that started it is gone, however."""
    parent = environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if str(os.getppid()) != parent:
        os.kill(os.getpid(), signal_number)


def unfinished(error_file: Path) -> Path:
    """The file that is there from a rank's beginning until its training has come to its end."""
    return error_file.with_name(error_file.name + ".unfinished")


NOT_JOINED = "the script has not called crosscloud_trainer.join()"


def expect_training(error_file: Path) -> None:
    """On the launcher's side: a script that ends without having joined the job has not been trained by it."""
    unfinished(error_file).write_text(NOT_JOINED)


def begin_training(environ: Mapping[str, str]) -> None:
    """Tell the launcher that an end of this rank, also one without an error, would come too early."""
    if path := environ.get(ERROR_FILE):
        unfinished(Path(path)).write_text("")


def end_training(environ: Mapping[str, str]) -> None:
    """Tell the launcher that this rank's training has come to its end."""
    if path := environ.get(ERROR_FILE):
        unfinished(Path(path)).unlink(missing_ok=True)


def leave_message(environ: Mapping[str, str], message: str) -> None:
    """Tell the launcher why this rank ends; it may read that even after a SIGKILL of the pod's other ranks.

    On a full disk it is said in the log: it may never hold up the end.
    """
    path = environ.get(ERROR_FILE)
    if path is None:
        return
    try:
        Path(path).write_text(message)
    except OSError:
        sys.stderr.write(f"error: {message}\n")
