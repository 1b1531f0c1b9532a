"""Events on the hub: what changed between two statuses, told once. They come from what was saved, not from memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosscloud_operator.domain import names, record
from crosscloud_operator.domain.record import JobStatus
from crosscloud_operator.domain.status import FAILED, PLACED, REACHABLE, RUNNING, SUCCEEDED, WAITING_FOR_PEERS
from crosscloud_trainer.contract import API_VERSION, KIND

MESSAGE_LIMIT = 1000


@dataclass(frozen=True)
class Note:
    """One Event; `key` tells it apart from others of the job, so that repeating it makes no second one.

    `recurs`: it may happen again, and the Event then counts; its text must not change from time to time.
    """

    type: str  # Normal or Warning
    reason: str
    message: str
    key: str
    recurs: bool = False


def notes(old: JobStatus, new: JobStatus) -> tuple[Note, ...]:
    """What a person would want to read in `kubectl describe`."""
    found = [*_attempt_notes(old, new), *_waiting_notes(old, new), *_end_notes(old, new), *_peer_notes(old, new)]
    before, after = old.condition(REACHABLE), new.condition(REACHABLE)
    if after is not None and (before is None or before.status != after.status):
        if after.status == "False":
            lost = ", ".join(item.name for item in new.members if item.unreachable_since)
            found.append(_recurring("Warning", "MemberUnreachable", f"not reached: {lost}"))
        elif before is not None:
            found.append(_recurring("Normal", "MemberBack", after.message))
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


def again(event: dict[str, Any], now: float) -> dict[str, Any]:
    """The merge patch by which an Event that is there already counts once more."""
    version = {"resourceVersion": event["metadata"]["resourceVersion"]}
    return {"metadata": version, "count": int(event.get("count") or 1) + 1, "lastTimestamp": record.rfc3339(now)}


def _attempt_notes(old: JobStatus, new: JobStatus) -> list[Note]:
    attempt = new.attempt
    if attempt is None:
        return []
    before = old.attempt if old.attempt and old.attempt.number == attempt.number else None
    found = []
    key = f"attempt/{attempt.number}"
    if before is None:
        where = record.places(new.plan, nodes=True)
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
    return found


def _peer_notes(old: JobStatus, new: JobStatus) -> list[Note]:
    before, after = old.condition(RUNNING), new.condition(RUNNING)
    waited = before is not None and before.reason == WAITING_FOR_PEERS
    if after is None or waited == (after.reason == WAITING_FOR_PEERS):
        return []
    if not waited:
        return [_recurring("Warning", after.reason, after.message)]
    # One that stops, or whose member was lost, has an Event for that.
    return (
        [_recurring("Normal", "PeersBack", "no replica waits for another any more")] if after.status == "True" else []
    )


def _recurring(kind: str, reason: str, message: str) -> Note:
    return Note(kind, reason, message, f"{reason}/{message}", recurs=True)
