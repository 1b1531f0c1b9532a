"""Events on the hub: what changed between two statuses, told once. They come from what was saved, not from memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosscloud_operator.domain import names, record
from crosscloud_operator.domain.record import JobStatus
from crosscloud_operator.domain.status import FAILED, PLACED, REACHABLE, RUNNING, SUCCEEDED
from crosscloud_trainer.contract import API_VERSION, KIND

MESSAGE_LIMIT = 1000


@dataclass(frozen=True)
class Note:
    """One Event; `key` tells it apart from others of the job, so that repeating it makes no second one."""

    type: str  # Normal or Warning
    reason: str
    message: str
    key: str


def notes(old: JobStatus, new: JobStatus) -> tuple[Note, ...]:
    """What a person would want to read in `kubectl describe`."""
    found = [*_attempt_notes(old, new), *_waiting_notes(old, new), *_end_notes(old, new)]
    before, after = old.condition(REACHABLE), new.condition(REACHABLE)
    if after is not None and (before is None or before.status != after.status):
        key = f"{REACHABLE}/{after.last_transition_time}"
        if after.status == "False":
            found.append(Note("Warning", "MemberUnreachable", after.message, key))
        elif before is not None:
            found.append(Note("Normal", "MemberBack", after.message, key))
    return tuple(found)


def event(job: names.JobId, note: Note, now: float) -> dict[str, Any]:
    """The Event object of a note."""
    time = record.rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": names.event(job.name, f"{job.uid}/{note.key}"),
            "namespace": job.namespace,
            "labels": names.labels(job, "event"),
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message[:MESSAGE_LIMIT],
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
        "source": {"component": "crosscloud-operator"},
        "reportingComponent": "crosscloud.dev/operator",
        "reportingInstance": "crosscloud-operator",
    }


def _attempt_notes(old: JobStatus, new: JobStatus) -> list[Note]:
    attempt = new.attempt
    if attempt is None:
        return []
    before = old.attempt if old.attempt and old.attempt.number == attempt.number else None
    found = []
    key = f"attempt/{attempt.number}"
    if before is None:
        where = ", ".join(
            f"replica {stage.replica} on {stage.member} ({', '.join(node.name for node in stage.nodes)})"
            for stage in new.plan
        )
        found.append(Note("Normal", "Planned", f"attempt {attempt.number}: {where}", f"{key}/planned"))
    if attempt.admitted_at and not (before and before.admitted_at):
        found.append(
            Note("Normal", "Admitted", f"attempt {attempt.number}: every member accepted its pods", f"{key}/admitted")
        )
    if attempt.bound_at and not (before and before.bound_at):
        found.append(Note("Normal", "Started", f"attempt {attempt.number}: every pod has its node", f"{key}/bound"))
    if attempt.cause and not (before and before.cause):
        cause = attempt.cause
        counts = "counts" if cause.counted else "doesn't count"
        text = f"attempt {attempt.number} ended and {counts} against failurePolicy.attempts: {cause.message}"
        found.append(Note("Warning", cause.reason, text, f"{key}/ended"))
    return found


def _waiting_notes(old: JobStatus, new: JobStatus) -> list[Note]:
    before, after = old.condition(PLACED), new.condition(PLACED)
    if (
        after is None
        or after.status != "False"
        or (before and (before.status, before.reason) == ("False", after.reason))
    ):
        return []
    number = new.attempt.number if new.attempt else 0
    return [Note("Normal", after.reason, after.message, f"waiting/{number}/{after.reason}")]


def _end_notes(old: JobStatus, new: JobStatus) -> list[Note]:
    found = []
    for kind, level in ((SUCCEEDED, "Normal"), (FAILED, "Warning")):
        if new.is_true(kind) and not old.is_true(kind):
            condition = new.condition(kind)
            found.append(Note(level, kind, condition.message if condition else "", f"end/{kind}"))
    before, after = old.condition(RUNNING), new.condition(RUNNING)
    if after and after.reason == "WaitingForPeers" and (before is None or before.reason != after.reason):
        found.append(Note("Normal", after.reason, after.message, f"peers/{after.message}"))
    return found
