"""A local run as its display sees it: the newest report of each replica, and what follows from all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crosscloud_trainer.contract import Activity, Progress, Report
from crosscloud_trainer.contract.report import ACTIVITIES
from crosscloud_trainer.launcher.manifest import Manifest

_CURVE_POINTS = 400


@dataclass(frozen=True)
class Losses:
    """Means over the replicas: training loss of the first step and of the last ones, and the last validation loss."""

    first: float | None
    last: float | None
    validation: float | None


@dataclass(frozen=True)
class Sample:
    """One report of a replica, for plots. `seconds` counts from the attempt's start."""

    seconds: float
    step: int
    loss: float | None
    validation_loss: float | None
    wan_bytes: int
    dense_bytes: int


class RunState:
    """Mutable; one thread uses it."""

    def __init__(
        self, manifest: Manifest, logs: Path, attempt: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manifest, self.logs = manifest, logs
        self.samples: dict[int, list[Sample]] = {}
        self._clock = clock
        self._started = clock()
        self.attempt = attempt
        self.reports: dict[int, Report] = {}
        self.curve: list[tuple[int, float]] = []  # (step, loss), mean over the replicas that report
        self._digests: dict[int, dict[int, str]] = {}

    @property
    def replicas(self) -> range:
        return range(self.manifest.spec.replicas)

    def next_attempt(self) -> None:
        self.attempt += 1
        self.reports.clear()
        self.curve.clear()
        self.samples.clear()
        self._digests.clear()
        self._started = self._clock()

    def see(self, replica: int, report: Report | None) -> None:
        """Take a report in; an old one changes nothing."""
        before = self.reports.get(replica)
        if report is None or report.attempt != self.attempt or (before and before.rank >= report.rank):
            return
        self.reports[replica] = report
        progress = report.progress
        if progress.digest is not None:
            self._digests.setdefault(progress.round, {})[replica] = progress.digest
        self._sample(replica, progress)
        losses = [item.progress.loss for item in self.reports.values() if item.progress.loss is not None]
        if not losses or (self.curve and progress.step < self.curve[-1][0]):
            return
        if self.curve and progress.step == self.curve[-1][0]:  # another replica has come to this step
            self.curve.pop()
        self.curve.append((progress.step, sum(losses) / len(losses)))
        if len(self.curve) > _CURVE_POINTS:  # halve the resolution, keep the whole run
            del self.curve[1:-1:2]

    def _sample(self, replica: int, progress: Progress) -> None:
        kept = self.samples.setdefault(replica, [])
        kept.append(
            Sample(
                self.seconds,
                progress.step,
                progress.loss,
                progress.validation_loss,
                progress.wan_bytes_sent,
                progress.dense_bytes,
            )
        )
        if len(kept) > 2 * _CURVE_POINTS:
            del kept[1:-1:2]

    @property
    def seconds(self) -> float:
        """Since this attempt was started."""
        return self._clock() - self._started

    def seconds_left(self) -> float | None:
        """At the pace so far; None where that can't be told."""
        parts = [report.progress for report in self.reports.values()]
        if len(parts) < len(self.replicas) or any(not part.total_steps or not part.step for part in parts):
            return None
        slowest = min(parts, key=lambda part: part.step)
        first = next((sample for sample in self.samples.get(0, []) if sample.step), None)
        if first is None or slowest.step <= first.step:
            return None
        pace = (self.seconds - first.seconds) / (slowest.step - first.step)
        return pace * (slowest.total_steps - slowest.step)

    def shares(self) -> dict[str, float] | None:
        """Share of the replicas' time by activity that took any; None before any is known."""
        parts = [report.progress.seconds for report in self.reports.values()]
        spent = {activity: sum(part[activity] for part in parts) for activity in ACTIVITIES}
        whole = sum(spent.values())
        return {name: value / whole for name, value in spent.items() if value} if whole else None

    def progress(self, replica: int) -> Progress | None:
        report = self.reports.get(replica)
        return report.progress if report else None

    def activity(self, replica: int) -> Activity:
        report = self.reports.get(replica)
        return report.activity if report else Activity.STARTING

    def detail(self, replica: int) -> str | None:
        """What it does while it doesn't train."""
        report = self.reports.get(replica)
        return report.detail if report else None

    def losses(self) -> Losses:
        parts = [report.progress for report in self.reports.values()]
        return Losses(
            first=_mean([part.first_loss for part in parts]),
            last=_mean([part.loss for part in parts]),
            validation=_mean([part.validation_loss for part in parts]),
        )

    def agreement(self) -> tuple[int, bool] | None:
        """(round, digests equal) of the last round that all replicas have told of."""
        whole = [number for number, seen in self._digests.items() if len(seen) == len(self.replicas)]
        if not whole or len(self.replicas) == 1:
            return None
        number = max(whole)
        return number, len(set(self._digests[number].values())) == 1

    def wan(self) -> tuple[int, int]:
        """Bytes that all replicas have sent over links, and what dense fp32 would have."""
        parts = [report.progress for report in self.reports.values()]
        return sum(part.wan_bytes_sent for part in parts), sum(part.dense_bytes for part in parts)

    def tokens_per_second(self) -> float:
        return sum(report.progress.tokens_per_second for report in self.reports.values())


@dataclass(frozen=True)
class Summary:
    """What a finished run came to. Losses are those of `Losses`."""

    name: str
    attempts: int
    steps: int
    tokens: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    wan_bytes: int
    dense_bytes: int
    rounds: int
    digests_equal: bool | None
    result: str | None
    checkpoint: str | None
    seconds: float
    report: str | None = None
    """The HTML page with plots."""
    best_step: int | None = None
    best_validation_loss: float | None = None
    """The lowest that any replica measured, and after which step."""
    best_checkpoint: str | None = None
    """Address of the one with the lowest validation loss of those that are kept."""

    @property
    def ratio(self) -> float | None:
        """How many times fewer bytes than dense fp32; None where nothing crossed."""
        return self.dense_bytes / self.wan_bytes if self.wan_bytes else None

    @classmethod
    def of(cls, state: RunState) -> Summary:
        parts = [state.reports[replica].progress for replica in state.replicas if replica in state.reports]
        wan, dense = state.wan()
        agreement = state.agreement()
        losses = state.losses()
        evaluated = [part for part in parts if part.best_validation_loss is not None]
        best = min(evaluated, key=lambda part: part.best_validation_loss or 0.0, default=None)
        completion = state.reports[0].completion if 0 in state.reports else None
        return cls(
            name=state.manifest.name,
            attempts=state.attempt,
            steps=max((part.step for part in parts), default=0),
            tokens=sum(part.tokens for part in parts),
            first_loss=losses.first,
            last_loss=losses.last,
            validation_loss=losses.validation,
            wan_bytes=wan,
            dense_bytes=dense,
            rounds=max((part.round for part in parts), default=0),
            digests_equal=agreement[1] if agreement else None,
            result=completion.result_uri if completion else None,
            checkpoint=completion.checkpoint_uri if completion else None,
            seconds=round(state.seconds, 1),
            best_step=best.best_step if best else None,
            best_validation_loss=best.best_validation_loss if best else None,
        )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
