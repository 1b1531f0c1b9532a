"""What the operator keeps in a job's status, kept in a file: the launcher plays the operator."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from crosscloud_trainer.contract import (
    MAX_REMEMBERED,
    Acknowledged,
    InvalidDocument,
    Report,
    StoredCheckpoint,
    dump_json,
    read_json,
    remembered,
)
from crosscloud_trainer.contract.reading import rule
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.reporting import write_whole

RECORD = "job.json"


@dataclass(frozen=True)
class _Content:
    uid: str = rule()
    attempt: int = rule(0, minimum=0)  # the last one
    checkpoints: tuple[StoredCheckpoint, ...] = rule((), max_items=MAX_REMEMBERED)  # newest first
    succeeded: bool = rule(False)


class JobRecord:
    """One job's file. It is saved before anybody is told what stands in it."""

    def __init__(self, path: Path, content: _Content) -> None:
        self._path, self._content = path, content
        self._acknowledged: StoredCheckpoint | None = None

    @classmethod
    def new(cls, folder: Path, uid: str) -> JobRecord:
        return cls(folder / RECORD, _Content(uid))

    @classmethod
    def open(cls, folder: Path, *, resume: bool, overwrite: bool = False) -> JobRecord:
        """A new job's, or where `resume` is set the one that an earlier run left in `folder`.

        Raises Failure where there is nothing to resume, and where a new job would take the place of checkpoints from
        which an earlier one can go on, unless `overwrite` is set.
        """
        path = folder / RECORD
        try:
            found = read_json(_Content, path.read_bytes())
        except (OSError, InvalidDocument) as fault:
            if not resume:
                return cls.new(folder, str(uuid.uuid4()))
            why = getattr(fault, "strerror", None) or str(fault).splitlines()[0]
            raise invalid([f"--resume: {path} can't be read: {why}; leave --resume out to begin anew"]) from fault
        if resume and not found.checkpoints:
            raise invalid([f"--resume: the run in {folder} has left no checkpoint; leave --resume out to begin anew"])
        if resume:
            return cls(path, found)
        if found.checkpoints and not found.succeeded and not overwrite:
            early = f"--out: the run in {folder} has ended early, with a checkpoint of step {found.checkpoints[0].step}"
            raise invalid(
                [f"{early}; --resume goes on from there, --overwrite begins anew, and another folder keeps both"]
            )
        return cls.new(folder, str(uuid.uuid4()))

    @property
    def uid(self) -> str:
        return self._content.uid

    @property
    def attempt(self) -> int:
        return self._content.attempt

    @property
    def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        return self._content.checkpoints

    def begin(self, attempt: int) -> None:
        """An attempt begins: its number is never used again."""
        self._save(replace(self._content, attempt=attempt))

    def succeed(self) -> None:
        """The job has come to its end. On a full disk it is forgotten: then the next run asks once more than needed."""
        with contextlib.suppress(OSError):
            self._save(replace(self._content, succeeded=True))

    def see(self, reports: Iterable[Report], keep: int, acknowledged: Path) -> None:
        """Remember the newest checkpoint of the present attempt's reports, then acknowledge it in a file.

        Where the disk is full the next call tries again; meanwhile older ones stay.
        """
        told = [item.progress.checkpoint for item in reports if item.progress.checkpoint]
        newest = max(told, key=lambda item: item.step, default=None)
        if newest is None or newest == self._acknowledged:
            return
        with contextlib.suppress(OSError):
            if newest not in self.checkpoints:
                self._save(replace(self._content, checkpoints=remembered(newest, self.checkpoints, keep)))
            write_whole(acknowledged, dump_json(Acknowledged(self.checkpoints)))
            self._acknowledged = newest

    def _save(self, content: _Content) -> None:
        write_whole(self._path, dump_json(content))
        self._content = content
