"""What a job's status says: conditions and the summary of progress. The operator is its only author."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from crosscloud_operator.domain import record
from crosscloud_operator.domain.record import Condition, JobStatus, ProgressSummary, ReplicaStatus
from crosscloud_trainer.contract import Activity, Progress, Report, remembered
from crosscloud_trainer.contract.report import perplexity
from crosscloud_trainer.sizes import bytes_text

PLACED, RUNNING, SUCCEEDED, FAILED, REACHABLE = "Placed", "Running", "Succeeded", "Failed", "MembersReachable"
WAITING_FOR_PEERS = "WaitingForPeers"  # the reason of Running while a round waits for a replica, or a step for a stage
MESSAGE_LIMIT = 1024


def with_condition(
    status: JobStatus, kind: str, value: bool | None, reason: str, message: str, now: float
) -> JobStatus:
    """Set a condition (None is Unknown); its transition time changes only with its status."""
    before = status.condition(kind)
    word = {True: "True", False: "False", None: "Unknown"}[value]
    since = before.last_transition_time if before and before.status == word else record.rfc3339(now)
    message = message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
    changed = Condition(kind, word, reason, message, since, status.observed_generation)
    others = tuple(item for item in status.conditions if item.type != kind)
    return replace(status, conditions=tuple(sorted((*others, changed), key=lambda item: item.type)))


def replica_status(index: int, report: Report | None, blocked: str | None) -> ReplicaStatus:
    """A replica's last word; `blocked` says why its pods don't start where it has spoken none."""
    if report is None:
        return ReplicaStatus(index, Activity.STARTING.value, message=blocked)
    progress = report.progress
    return ReplicaStatus(
        index=index,
        activity=report.activity.value,
        step=progress.step,
        round=progress.round,
        loss=_number(progress.loss),
        digest=progress.digest,
        waiting_for=progress.waiting_for,
        waiting_for_stages=progress.waiting_for_stages,
        waiting_since=progress.waiting_since if record.parsed(progress.waiting_since) is not None else None,
        reported_at=report.time,
        message=report.completion.message if report.completion else blocked,
    )


def progress_summary(reports: Iterable[Report]) -> ProgressSummary | None:
    """The job's progress: the step of the replica that is least far, the mean of the losses, sums of the rest."""
    all_progress = [report.progress for report in reports]
    if not all_progress:
        return None
    last = min(all_progress, key=lambda item: item.step)
    validation = _mean(item.validation_loss for item in all_progress)
    best = min(all_progress, key=_best)
    wan = sum(item.wan_bytes_sent for item in all_progress)
    per_step = wan // last.step if last.step else 0
    return ProgressSummary(
        step=last.step,
        total_steps=last.total_steps,
        round=min(item.round for item in all_progress),
        tokens=sum(item.tokens for item in all_progress),
        tokens_per_second=round(sum(item.tokens_per_second for item in all_progress)),
        wan_bytes=wan,
        dense_bytes=sum(item.dense_bytes for item in all_progress),
        wan_bytes_per_step=per_step,
        wan_per_step=bytes_text(per_step),
        skipped_steps=sum(item.skipped_steps for item in all_progress),
        loss=_number(_mean(item.loss for item in all_progress)),
        first_loss=_number(_mean(item.first_loss for item in all_progress)),
        validation_loss=_number(validation),
        validation_perplexity=None if validation is None else _number(perplexity(validation)),
        best_validation_loss=_number(best.best_validation_loss),
        best_step=best.best_step,
    )


def with_checkpoints(status: JobStatus, reports: Iterable[Report], keep: int) -> JobStatus:
    """The status with the newest checkpoint that replicas under its home have told of, and what stays beside it."""
    home = status.home.number if status.home else 0
    told = [item.progress.checkpoint for item in reports if item.home == home and item.progress.checkpoint]
    newest = max(told, key=lambda item: item.step, default=None)
    if newest is None or newest in status.checkpoints:
        return status
    return replace(status, checkpoints=remembered(newest, status.checkpoints, keep))


def _best(progress: Progress) -> float:
    return math.inf if progress.best_validation_loss is None else progress.best_validation_loss


def some(items: Sequence[str], limit: int = 4) -> str:
    """The first items, for a message, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def waiting_words(reports: Mapping[int, Report]) -> str | None:
    """`replica 0 waits for replica 1`, for those that wait; None when none does. Since when is in replicaStatuses: a
    text that changes with each wait would make a new Event of each.
    """
    words = []
    for index, report in sorted(reports.items()):
        progress = report.progress
        if report.activity is Activity.WAITING and progress.awaited:
            words.append(f"replica {index} waits for {progress.awaited}")
    return "; ".join(words) or None


def keep_progress(old: JobStatus, new: JobStatus, interval: float) -> JobStatus:
    """`new`, but with the old numbers where those alone have changed and less than `interval` seconds have gone by."""
    if old.progress is None or new.progress is None:
        return new
    quiet = replace(new, progress=old.progress, replica_statuses=old.replica_statuses)
    same_story = quiet == old and _story(old.replica_statuses) == _story(new.replica_statuses)
    return quiet if same_story and _newest(new) - _newest(old) < interval else new


def _story(replicas: Sequence[ReplicaStatus]) -> list[tuple[object, ...]]:
    return [(item.index, item.activity, item.waiting_for, item.waiting_for_stages, item.message) for item in replicas]


def _newest(status: JobStatus) -> float:
    return max((record.seconds(item.reported_at) for item in status.replica_statuses if item.reported_at), default=0)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
