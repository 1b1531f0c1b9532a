"""`crosscloud-trainer local`: plays the operator on one machine, without root and without Kubernetes.

Each replica is a pod process in a member of its own, so that updates cross a real mutual-TLS link on loopback. A lost
rank ends the attempt, and the next one starts, as the failure policy says.
"""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from crosscloud_trainer.contract import ExitCode, JobSpec, best_of, counted, retryable
from crosscloud_trainer.failures import Failure, invalid
from crosscloud_trainer.launcher.attempt import LocalJob, LocalPod
from crosscloud_trainer.launcher.display import Display, chosen_display
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.record import JobRecord
from crosscloud_trainer.launcher.report_page import report_page
from crosscloud_trainer.launcher.shaping import bytes_per_second
from crosscloud_trainer.launcher.state import RunState, Summary
from crosscloud_trainer.launcher.tensorboard import EventFiles, event_files
from crosscloud_trainer.launcher.workspace import work_folder

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 60.0
_NEVER_RAN_LIMIT = 5  # attempts in a row that never started: on one machine, waiting longer doesn't help


@dataclass
class _Interrupt:
    """Whether Ctrl-C, SIGTERM or the end of the terminal came."""

    number: int = 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number


def run_local(
    path: Path,
    *,
    as_json: bool,
    out: Path | None,
    keep: bool,
    link: str | None = None,
    storage: str | None = None,
    tensorboard: bool = False,
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Run the manifest at `path`; returns the exit code. Raises Failure for what can't start."""
    if resume and overwrite:
        raise invalid(
            ["--resume, --overwrite: one goes on with the earlier run, the other begins anew; give one of them"]
        )
    manifest = read_manifest(path)
    rate = bytes_per_second(link) if link is not None else None
    folder = out if out is not None else Path("crosscloud-runs") / manifest.name
    uri = _address(storage) if storage else _storage_uri(manifest.spec, folder, given=out is not None)
    with (
        _claimed(folder),
        _interrupts() as interrupt,
        work_folder(manifest.name, keep=keep) as work,
        event_files(folder / "tensorboard" if tensorboard else None) as files,
    ):
        record = JobRecord.open(folder, resume=resume, overwrite=overwrite)
        job = LocalJob(manifest, record, work, folder / "logs", uri, rate)
        code = _run_attempts(job, chosen_display(as_json), files, interrupt, folder / "report.html")
    if keep and not as_json:
        print(f"kept: {work}")  # noqa: T201
    return code


def _storage_uri(spec: JobSpec, folder: Path, *, given: bool) -> str:
    """A path in the manifest is used as it is; anything else is for clusters, and a folder here stands for it."""
    uri = spec.storage.uri
    if not given and (uri.startswith(("/", "file://"))):
        return uri
    return str(folder.resolve())


def _address(storage: str) -> str:
    return storage if "://" in storage else str(Path(storage).resolve())


def _run_attempts(job: LocalJob, display: Display, files: EventFiles, interrupt: _Interrupt, page: Path) -> int:
    spec = job.manifest.spec
    state = RunState(job.manifest, job.logs, job.record.attempt)
    failed = never_ran = 0

    def tell() -> None:
        display.progress(state)
        files.follow(state)

    with display:
        while True:
            state.next_attempt()
            display.attempt(state)
            code, message = _run_attempt(job, state, tell, lambda: display.stopping(_stopping(spec)), interrupt)
            if code == ExitCode.SUCCEEDED:
                job.record.succeed()
                best = best_of(job.record.checkpoints)
                uri = best.uri if best is not None else None
                summary = replace(Summary.of(state), best_checkpoint=uri)
                with suppress(OSError):  # a full disk: what was trained is stored
                    page.write_text(report_page(state, summary), encoding="utf-8")
                    summary = replace(summary, report=str(page))
                display.finish(summary)
                return code
            if interrupt.number:
                display.failure(state, _interrupted(job), last=True)
                return 128 + interrupt.number
            if code != ExitCode.TERMINATED:
                failed, never_ran = (failed + 1, 0) if counted(code) else (failed, never_ran + 1)
            last = not retryable(code) or failed >= spec.failure_policy.attempts or never_ran >= _NEVER_RAN_LIMIT
            display.failure(state, message, last=last)
            if last:
                return code


def _run_attempt(
    job: LocalJob,
    state: RunState,
    tell: Callable[[], None],
    tell_stopping: Callable[[], None],
    interrupt: _Interrupt,
) -> tuple[int, str]:
    """Exit code and message of one attempt. No process of it is left."""
    with ExitStack() as held:
        pods = job.start(state.attempt, held)

        def see() -> None:
            _see(job, state, pods)
            tell()

        held.callback(_see, job, state, pods)  # a last checkpoint, once they have ended
        held.callback(_end, pods)
        while True:
            if interrupt.number:
                tell_stopping()
                _end(pods, see)
                see()
                return ExitCode.TERMINATED, "interrupted"
            codes = {pod.place: pod.exit_code() for pod in pods}
            see()
            lost = [pod for pod in pods if codes[pod.place]]
            if lost:
                first = lost[0]
                return codes[first.place] or 1, f"{first.place}: {first.message()}"
            if all(code == 0 for code in codes.values()):
                return ExitCode.SUCCEEDED, ""
            time.sleep(_POLL_SECONDS)


def _see(job: LocalJob, state: RunState, pods: list[LocalPod]) -> None:
    """Take in what the pods have said since the last time."""
    for pod in pods:
        if pod.place.stage == 0:
            state.see(pod.place.replica, pod.report())
    acknowledged = job.acknowledged(state.attempt)
    job.record.see(state.reports.values(), job.manifest.spec.checkpoint.keep, acknowledged)


def _stopping(spec: JobSpec) -> str:
    """What follows an interruption, which may take a while."""
    then = "stop after this round, with a checkpoint" if spec.training else "are told to end"
    return f"interrupted: the replicas {then}; at most {_GRACE_SECONDS:.0f} seconds"


def _interrupted(job: LocalJob) -> str:
    if not job.record.checkpoints:
        return "interrupted: all processes have ended"
    step = job.record.checkpoints[0].step
    return f"interrupted: all processes have ended; --resume goes on after step {step}"


def _end(pods: list[LocalPod], see: Callable[[], None] = lambda: None) -> None:
    """All processes end, by force after a while; `see` is called as long as they take."""
    for pod in pods:
        pod.end(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(pod.exit_code() is None for pod in pods) and time.monotonic() < deadline:
        see()
        time.sleep(_POLL_SECONDS)
    for pod in pods:
        if not pod.wait(0.0):
            pod.end(signal.SIGKILL)  # its ranks go with it, by the kernel's word
            pod.wait(_GRACE_SECONDS)


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    noted = _Interrupt()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, noted.note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder for this run alone: two runs in one would mix their results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as fault:
        raise invalid([f"--out: {folder} can't be written: {fault.strerror}"]) from fault
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            message = f"--out: another run uses {folder}; wait for it, or choose another folder"
            raise Failure(ExitCode.INVALID_INPUT, message) from fault
        yield
