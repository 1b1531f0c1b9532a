"""From rank 0 to the operator: the rank leaves its status in a file, its pod's launcher makes reports of it.

The launcher writes the report, not the rank, because it outlives the rank: a completion is told even when ranks were
killed, and a slow API server never holds up a training step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crosscloud_trainer.contract import (
    REPORT_KEY,
    REPORT_VERSION,
    Activity,
    Completion,
    InvalidDocument,
    Progress,
    Report,
    dump_json,
    read_json,
)
from crosscloud_trainer.contract.reading import rule
from crosscloud_trainer.contract.report import timestamp

_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class Status:
    """What rank 0 knows: where it is in the run, under which view, and at the end what it stored."""

    home: int = rule(minimum=1)
    term: int = rule(0, minimum=0)
    view: int = rule(0, minimum=0)
    activity: Activity = rule(Activity.STARTING)
    detail: str | None = rule(None, max_length=100)
    progress: Progress = rule(factory=lambda: Progress(step=0, total_steps=0, round=0, tokens=0))
    result_uri: str | None = rule(None)
    checkpoint_uri: str | None = rule(None)
    checkpoint_digest: str | None = rule(None)


@dataclass(frozen=True)
class Identity:
    """Whose report it is."""

    attempt: int
    replica: int
    incarnation: int


class Sink(Protocol):
    """Where reports go. `interval` is the least number of seconds between two of them."""

    interval: float

    def send(self, text: str) -> None:
        """Deliver the report's JSON text, or raise OSError."""


class FileSink:
    """A file that always holds one whole report. Cheap, so the launcher's display may follow closely."""

    interval = 0.2

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, text: str) -> None:
        write_whole(self._path, text)


class ConfigMapSink:
    """The key of the report's ConfigMap, patched; `patch` raises OSError for what may pass by itself."""

    interval = 10.0

    def __init__(self, patch: Callable[[dict[str, str]], object]) -> None:
        self._patch = patch

    def send(self, text: str) -> None:
        self._patch({REPORT_KEY: text})


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content so that a reader sees the old or the new text, never a part. Raises OSError."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(text)
    except OSError as fault:
        fault.filename = fault.filename or str(path)  # a full disk doesn't say where it is
        raise
    draft.replace(path)


class Changes:
    """Whether a file was replaced since one last asked: cheap enough to ask many times a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[int, int] | None = None

    def seen(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False
        now = (found.st_ino, found.st_mtime_ns)
        before, self._last = self._last, now
        return now != before


def read_status(path: Path) -> Status | None:
    """What rank 0 left last, None before it left anything."""
    try:
        return read_json(Status, path.read_bytes())
    except (OSError, InvalidDocument):
        return None


class Reporter:
    """Sends the newest status: at once when the activity changes, otherwise as often as the sink likes."""

    def __init__(self, sink: Sink, identity: Identity, first: Status, log: Callable[[str], None]) -> None:
        self._sink, self._identity, self._log = sink, identity, log
        self._newest = first
        self._completion: Completion | None = None
        self._sequence = 0
        self._wake = threading.Condition()
        self._sent = False  # the completion was delivered
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def offer(self, status: Status) -> None:
        """The newest status; may be called as often as one likes."""
        with self._wake:
            if status != self._newest:
                self._newest = status
                self._wake.notify()

    def complete(self, completion: Completion, given_up: Callable[[], bool]) -> bool:
        """Deliver the last word, trying again until it is delivered or `given_up`. Whether it was delivered."""
        with self._wake:
            self._completion = completion
            self._wake.notify()
        while self._thread.is_alive() and not given_up():
            self._thread.join(timeout=0.1)
        with self._wake:
            self._given_up = True
            self._wake.notify()
        return self._sent

    def _run(self) -> None:
        last: Status | None = None
        last_time = -float("inf")
        while True:
            with self._wake:
                while not self._due(last, last_time):
                    if self._given_up:
                        return
                    self._wake.wait(timeout=0.1)
                status, completion = self._newest, self._completion
            if not self._deliver(status, completion):
                return
            last, last_time = status, time.monotonic()
            if completion is not None:
                self._sent = True
                return

    def _due(self, last: Status | None, last_time: float) -> bool:
        if self._completion is not None or last is None:
            return True
        if self._newest == last:
            return False
        if self._newest.activity is not last.activity:
            return True
        return time.monotonic() - last_time >= self._sink.interval

    def _deliver(self, status: Status, completion: Completion | None) -> bool:
        """False when given up. A progress report that fails is dropped for a newer one, never a completion."""
        pause = _FIRST_PAUSE_SECONDS
        told = False
        while True:
            try:
                self._sink.send(dump_json(self._report(status, completion)))
            except OSError as fault:
                if not told:
                    self._log(f"the report can't be written, trying again: {fault}")
                    told = True
            else:
                return True
            with self._wake:
                self._wake.wait(timeout=pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret
                if self._given_up:
                    return False
                status = self._newest
                completion = self._completion
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def _report(self, status: Status, completion: Completion | None) -> Report:
        self._sequence += 1
        activity = Activity.ENDED if completion is not None else status.activity
        return Report(
            api_version=REPORT_VERSION,
            attempt=self._identity.attempt,
            home=status.home,
            term=status.term,
            view=status.view,
            replica=self._identity.replica,
            incarnation=self._identity.incarnation,
            sequence=self._sequence,
            time=timestamp(time.time()),
            activity=activity,
            progress=status.progress,
            detail=status.detail if completion is None else None,
            completion=completion,
        )


class Stall:
    """Tells a wait that is news from the ordinary one of a slow link: nothing has moved for so many seconds. Pure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None
        self._moved = 0
        self._quiet_since = 0.0

    def since(self, began: float | None, moved: int, now: float) -> float | None:
        """Since when nothing has moved, once that is long enough to tell; times in seconds since 1970.

        `began` is when the present wait began, None while there is none; `moved` counts bytes that have crossed. The
        answer stays the same for as long as nothing moves, so that it makes no new text at each report.
        """
        if began is None:
            self._began = None
            return None
        if began != self._began:
            self._began, self._moved, self._quiet_since = began, moved, began
        elif moved != self._moved:
            self._moved, self._quiet_since = moved, now
        return self._quiet_since if now - self._quiet_since >= self._seconds else None


class StatusFile:
    """Rank 0's side: keeps the newest status in a file, also while the training thread waits in a round.

    `live` adds what changes without the training thread: what a round waits for, and the view.
    """

    interval = 0.2

    def __init__(self, path: Path, first: Status, live: Callable[[Status], Status]) -> None:
        self._path, self._status, self._live = path, first, live
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._written: Status | None = None
        self._flush()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def update(self, **changes: object) -> None:
        """Change fields of the status; written within `interval`, a change of activity at once, and so is any change
        after `close`."""
        with self._lock:
            before = self._status
            self._status = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
        if self._status.activity is not before.activity or self._stop.is_set():
            self._flush()

    def watch(self, live: Callable[[Status], Status]) -> None:
        """Set what adds the live part, once there is a link."""
        self._live = live

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._flush()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            status = self._live(self._status)
            if status != self._written:
                # a full disk must not end the training; the next interval tries again
                with contextlib.suppress(OSError):
                    write_whole(self._path, dump_json(status))
                    self._written = status
