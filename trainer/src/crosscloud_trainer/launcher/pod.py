"""`crosscloud-trainer pod`: one pod of an attempt, from its documents to its exit code.

Documents and storage are checked and the text is tokenized here, once, before any rank loads torch: what can't work
ends with one message instead of one per rank.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from crosscloud_trainer.claim import claim
from crosscloud_trainer.contract import Completion, ExitCode, Outcome, Problem
from crosscloud_trainer.data.corpus import write_corpus
from crosscloud_trainer.environment import (
    DATA_FOLDER,
    DEADLINE,
    ERROR_FILE,
    INITIAL_FOLDER,
    MEMORY,
    STATUS_FILE,
    Attempt,
    PodEnvironment,
    die_with_parent,
    expect_training,
    read_attempt,
)
from crosscloud_trainer.failures import Failure, invalid
from crosscloud_trainer.launcher import initial, network, ranks
from crosscloud_trainer.launcher.memory import free_memory
from crosscloud_trainer.launcher.script import SCRIPT_TIMEOUT, fetched
from crosscloud_trainer.reporting import Changes, ConfigMapSink, FileSink, Identity, Reporter, Sink, Status, read_status
from crosscloud_trainer.storage import Storage

_SCRIPT_TIMEOUT_MINUTES = 30 * 24 * 60  # a round may wait for days while a link is cut, and the ranks with it
_MESSAGE_LIMIT = 4096  # as Kubernetes has it for a termination message


class Stop:
    """Whether SIGTERM or SIGINT came, and when."""

    def __init__(self) -> None:
        self.since: float | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.since = self.since or time.monotonic()

    def __call__(self) -> bool:
        return self.since is not None

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, the signal ends what is being done, by Failure(TERMINATED)."""
        before = {number: signal.signal(number, self._raise) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            if self():
                self._raise(signal.SIGTERM, None)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._note(number, frame)
        raise Failure(ExitCode.TERMINATED, "ended by SIGTERM")

    def longer_than(self, seconds: float) -> bool:
        return self.since is not None and time.monotonic() - self.since > seconds


def run_pod(environ: Mapping[str, str]) -> int:
    """Run this pod to its end; returns the exit code, one of ExitCode wherever the end is explained."""
    die_with_parent(environ, signal.SIGTERM)
    stop = Stop()
    stop.install()
    try:
        pod = PodEnvironment.read(environ)
        attempt = read_attempt(pod)
        reporter = _reporter(pod, attempt, environ)
    except Failure as failure:
        _say(f"error: {failure}")
        _leave(Path(environ.get("CROSSCLOUD_TERMINATION_LOG", "/dev/termination-log")), str(failure))
        return failure.code
    status = Status(home=attempt.run.home.number)
    with tempfile.TemporaryDirectory(prefix="crosscloud-pod-") as folder:
        try:
            end = _train(pod, attempt, environ, Path(folder), reporter, stop)
        except Failure as failure:
            end = ranks.RankExit(failure.code, str(failure))
        except OSError as fault:  # a full disk may have room at the next try
            end = ranks.RankExit(1, f"{fault.filename or folder}: {fault.strerror or fault}")
        status = read_status(Path(folder) / "status.json") or status
    if end.code != ExitCode.SUCCEEDED:
        _say(f"error: {end.message}")
        _leave(pod.termination_log, end.message)
    if reporter is not None:
        reporter.offer(status)
        reporter.complete(_completion(end, status), lambda: stop.longer_than(pod.grace - 1.0))
    return end.code


def _train(
    pod: PodEnvironment,
    attempt: Attempt,
    environ: Mapping[str, str],
    folder: Path,
    reporter: Reporter | None,
    stop: Stop,
) -> ranks.RankExit:
    deadline = time.monotonic() + pod.start_deadline
    run, stage = attempt.run, attempt.stage

    def starting(detail: str) -> None:
        if reporter is not None:
            reporter.offer(Status(home=run.home.number, detail=detail))

    starting("looking whether the storage can be written")
    storage = Storage(run.storage_uri)
    storage.check()
    if run.script is None and pod.node == 0 and pod.replica == min(plan.index for plan in run.replicas):
        claim(storage, run)
    command = [sys.executable, "-m", "crosscloud_trainer.train"]
    if run.script is not None:
        starting("reading the script")
        command = [sys.executable, str(fetched(run.script.file, folder)), *run.script.args]
    else:
        starting("reading the text")
        with stop.at_once():  # reading much text takes minutes
            found = write_corpus(run.training, run.members, run.position(pod.replica), folder)
        _say(f"data: {found}")
        if run.training.model.init_from is not None:
            starting("reading the weights to begin with")
            with stop.at_once():
                initial.fetch(run.training.model.init_from, folder / INITIAL_FOLDER)
    if stage.nodes > 1:
        starting("looking for the other nodes")
    address, interface = _meeting_point(attempt, environ, deadline, stop)
    environments = ranks.rank_environments(
        first=pod.node * stage.gpus_per_node,
        local=stage.gpus_per_node,
        world=stage.ranks,
        node=pod.node,
        master=(address, pod.master_port),
        environ={
            MEMORY: str(free_memory() or ""),
            SCRIPT_TIMEOUT: str(_SCRIPT_TIMEOUT_MINUTES),
            **environ,
            DATA_FOLDER: str(folder),
            DEADLINE: str(deadline),
            **interface,
        },
    )
    status_path = folder / "status.json"
    for number, environment in enumerate(environments):
        environment[ERROR_FILE] = str(folder / f"rank-{number}.error.json")
        if run.script is not None:
            expect_training(Path(environment[ERROR_FILE]))
        if number == 0:
            environment[STATUS_FILE] = str(status_path)
    starting("loading torch and DeepSpeed")
    group = ranks.RankGroup(command, environments, sys.stdout)

    changes = Changes(status_path)

    def follow() -> None:
        if reporter is not None and changes.seen() and (status := read_status(status_path)):
            reporter.offer(status)

    return group.wait(stop, follow, pod.rank_grace)


def _meeting_point(
    attempt: Attempt, environ: Mapping[str, str], deadline: float, stop: Stop
) -> tuple[str, dict[str, str]]:
    """The address of rank 0 of the stage, which is on node 0 whatever order the peer table has, and the interface for
    gloo and NCCL: loopback on one host, else the one that leads to the other hosts."""
    if attempt.stage.nodes == 1:
        return "127.0.0.1", {network.VARIABLE: network.LOOPBACK}
    address = network.wait_for_address(attempt.master.direct, deadline, stop)
    name = network.interface_for(address, environ)
    return address, {network.VARIABLE: name, "NCCL_SOCKET_IFNAME": environ.get("NCCL_SOCKET_IFNAME", name)}


def _reporter(pod: PodEnvironment, attempt: Attempt, environ: Mapping[str, str]) -> Reporter | None:
    if pod.report is None:
        return None
    identity = Identity(attempt.run.attempt, pod.replica, pod.incarnation)
    return Reporter(_sink(pod, environ), identity, Status(home=attempt.run.home.number), _say)


def _sink(pod: PodEnvironment, environ: Mapping[str, str]) -> Sink:
    kind, _, rest = str(pod.report).partition(":")
    if kind == "file":
        return FileSink(Path(rest))
    from crosscloud_trainer.membership.kube import ConfigMapClient  # HTTP only where there is an API server

    namespace, _, name = rest.partition("/")
    try:
        client = ConfigMapClient.in_cluster(pod.report_credentials, environ)
    except OSError as fault:
        raise invalid([Problem("CROSSCLOUD_REPORT", pod.report, str(fault))]) from fault
    return ConfigMapSink(lambda data: client.patch(namespace, name, data))


def _completion(end: ranks.RankExit, status: Status) -> Completion:
    succeeded = end.code == ExitCode.SUCCEEDED
    return Completion(
        outcome=Outcome.SUCCEEDED if succeeded else Outcome.FAILED,
        exit_code=end.code,
        message=end.message[:_MESSAGE_LIMIT] or "training has ended",
        result_uri=status.result_uri,
        checkpoint_uri=status.checkpoint_uri,
        checkpoint_digest=status.checkpoint_digest,
    )


def _leave(path: Path, message: str) -> None:
    """The termination message, which the kubelet shows in the pod's status."""
    with contextlib.suppress(OSError):  # no such folder, not ours, a full disk: it stands in the log as well
        path.write_text(message[:_MESSAGE_LIMIT])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
