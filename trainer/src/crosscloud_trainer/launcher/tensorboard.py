"""TensorBoard files of a local run: one folder for each replica, from its reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from crosscloud_trainer.contract import Report
from crosscloud_trainer.contract.report import seconds_of
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.launcher.state import RunState


class EventFiles(Protocol):
    """Told of the state now and then."""

    def follow(self, state: RunState) -> None: ...


class _None:
    """Where none are asked for."""

    def follow(self, state: RunState) -> None: ...


class TensorBoardFiles:
    """Scalars by inner step below `folder`, which belongs to this run."""

    def __init__(self, folder: Path, writer: Any) -> None:
        """`writer` makes a `SummaryWriter` from the folder that it is given."""
        self._folder, self._writer = folder, writer
        self._writers: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def follow(self, state: RunState) -> None:
        for replica, report in state.reports.items():
            progress = report.progress
            name = f"attempt-{state.attempt}/replica-{replica}"
            if self._steps.get(name) == progress.step or not progress.step:
                continue
            self._steps[name] = progress.step
            if name not in self._writers:
                self._writers[name] = self._writer(str(self._folder / name))
            for tag, value in scalars(report).items():
                self._writers[name].add_scalar(tag, value, progress.step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def scalars(report: Report) -> Mapping[str, float]:
    """What a report says, by TensorBoard's tags; what isn't known yet is left out."""
    progress = report.progress
    sent = progress.wan_bytes_sent
    age = seconds_of(report.time) - seconds_of(progress.saved_at) if progress.saved_at else None
    found = {
        "loss/train": progress.loss,
        "loss/validation": progress.validation_loss,
        "speed/tokens per second": progress.tokens_per_second,
        "wan/bytes sent": float(sent),
        "wan/compression ratio": progress.dense_bytes / sent if sent else None,
        "wan/residual norm": progress.residual_norm,
        **{f"time/{activity}": seconds for activity, seconds in progress.seconds.items()},
        "steps/skipped": float(progress.skipped_steps),
        "rounds/skipped": float(progress.skipped_rounds),
        "rounds/digest mismatches": float(progress.digest_mismatches),
        "checkpoint/age in seconds": age,
        "checkpoint/unsaved steps": float(progress.unsaved_steps),
    }
    for part in progress.wan:
        place = f"replica {part.replica}/{part.kind}"
        found |= {f"wan sent to {place}": float(part.sent), f"wan received from {place}": float(part.received)}
    return {tag: value for tag, value in found.items() if value is not None}


@contextlib.contextmanager
def event_files(folder: Path | None) -> Iterator[EventFiles]:
    """Files below `folder` while inside, none where it is None. Raises Failure where TensorBoard isn't installed."""
    if folder is None:
        yield _None()
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as fault:
        message = "--tensorboard: needs a package more: pip install 'crosscloud-trainer[tensorboard]'"
        raise invalid([message]) from fault
    files = TensorBoardFiles(folder, SummaryWriter)
    try:
        yield files
    finally:
        files.close()
