"""Stopping, Ending and Deleting: an attempt's objects go, and are seen gone, before anything follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from crosscloud_operator.domain import record
from crosscloud_operator.domain import status as words
from crosscloud_operator.domain.actions import Remove
from crosscloud_operator.domain.lifecycle import (
    Decision,
    Facts,
    Found,
    Scene,
    current,
    is_final,
    tell,
    with_attempt,
)
from crosscloud_operator.domain.record import Attempt
from crosscloud_operator.domain.settings import JobSettings

LOOK = 2.0
UNREACHABLE_LOOK = 15.0
EXIT_GRACE = 60.0  # after success, until a pod that still runs is deleted
_REMOVE = "`crosscloud member remove NAME`"
LONG_RUN = 600.0  # seconds; an attempt that ran for longer starts the pauses anew


def stopping(facts: Facts) -> Decision:
    """All pods of the attempt are deleted; those of a last attempt that have ended are kept for their logs.

    Pods that are told to end write a last checkpoint, so that what they report is listened to until they are gone.
    """
    status = words.with_checkpoints(facts.status, facts.reports.values(), facts.job.spec.checkpoint.keep)
    facts = replace(facts, status=status)
    attempt = current(facts.status)
    final = is_final(facts.status, facts.job)
    left = [item for item in facts.found if not (final and item.is_trainer and item.finished)]
    # Where no gate was lifted nothing can run: the next attempt need not wait for a member that doesn't answer.
    unanswered = dict(facts.unreachable) if attempt.admitted_at else {}
    cause = attempt.cause.message if attempt.cause else ""
    if left or unanswered:
        status = tell(facts, facts.status, "Stopping", f"{cause}; {_wait_words(left, unanswered)}")
        return Decision(status, _removals(left), requeue=LOOK if left else UNREACHABLE_LOOK)
    time = record.rfc3339(facts.now)
    if final:
        status = replace(with_attempt(facts.status, gone_at=time), finished_at=time)
        counted = f"{status.attempts_counted} of {facts.job.spec.failure_policy.attempts} attempts used"
        why = "another attempt can't end differently" if not _retryable(attempt) else counted
        message = f"{cause} ({why})"
        status = tell(facts, status, "Failed", message)
        status = words.with_condition(status, words.FAILED, True, _reason(attempt), message, facts.now)
        return Decision(status)
    pause = backoff(attempt, facts.settings)
    status = with_attempt(facts.status, gone_at=time, retry_at=record.rfc3339(facts.now + pause))
    message = f"attempt {attempt.number + 1} follows in {pause:g} s; attempt {attempt.number}: {cause}"
    status = tell(facts, status, "Retrying", message, placed=(False, "Retrying", message))
    return Decision(status, requeue=pause)


def retrying(facts: Facts) -> Decision:
    retry_at = current(facts.status).retry_at
    left = record.seconds(retry_at) - facts.now if retry_at else 0.0
    return Decision(facts.status, requeue=max(1.0, left))


def ending(facts: Facts) -> Decision:
    """After success: the gateway goes, finished pods stay for their logs until the job is deleted."""
    finished = facts.status.finished_at
    overdue = finished is not None and facts.now > record.seconds(finished) + EXIT_GRACE
    left = [item for item in facts.found if not (item.is_trainer and item.finished)]
    if left or facts.unreachable:
        removable = [item for item in left if not item.is_trainer or item.held_open or overdue]
        status = words.with_condition(facts.status, words.RUNNING, False, "Succeeded", _message(facts), facts.now)
        return Decision(status, _removals(removable), requeue=LOOK if left else UNREACHABLE_LOOK)
    return Decision(with_attempt(facts.status, gone_at=record.rfc3339(facts.now)))


def finished(facts: Facts) -> Decision:
    return Decision(facts.status)


def deleting(scene: Scene, anchors: tuple[Remove, ...]) -> Decision:
    """The anchors go, with all that they own; a member without a MemberCluster isn't waited for."""
    if not anchors and not scene.unreachable:
        return Decision(scene.status, release=True)
    where = ", ".join(sorted({item.member for item in anchors}))
    message = f"removing the job's objects from {where}" if where else "removing the job's objects"
    if scene.unreachable:
        waits = ", ".join(f"{name} (not reached since {since})" for name, since in sorted(scene.unreachable.items()))
        message = f"waiting for {waits}; gone for good: {_REMOVE}"
    status = tell(scene, scene.status, "Deleting", message)
    return Decision(status, anchors, requeue=LOOK if anchors else UNREACHABLE_LOOK)


def backoff(attempt: Attempt, settings: JobSettings) -> float:
    """Seconds until the next attempt: doubled with each, up to the limit; from the start again after a long run."""
    ran = 0.0
    if attempt.bound_at and attempt.ended_at:
        ran = record.seconds(attempt.ended_at) - record.seconds(attempt.bound_at)
    doublings = 0 if ran > LONG_RUN else min(attempt.number - 1, 16)
    return float(min(settings.backoff_base * 2**doublings, settings.backoff_limit))


def _removals(found: Iterable[Found]) -> tuple[Remove, ...]:
    """Deployments first, or they would replace the pods that go."""
    going = [item.remove for item in found if not item.leaving]
    return tuple(sorted(going, key=lambda item: (item.kind != "Deployment", item.member, item.kind, item.name)))


def _wait_words(left: Iterable[Found], unanswered: dict[str, str]) -> str:
    going = [f"{item.remove.member}/{item.remove.name}" for item in left]
    parts = [f"waiting until {words.some(going)} are gone"] if going else []
    for name, since in sorted(unanswered.items()):
        parts.append(f"waiting for {name} to answer (not reached since {since}; gone for good: {_REMOVE})")
    return "; ".join(parts)


def _reason(attempt: Attempt) -> str:
    return attempt.cause.reason if attempt.cause else "Failed"


def _retryable(attempt: Attempt) -> bool:
    return attempt.cause is None or attempt.cause.retryable


def _message(facts: Facts) -> str:
    condition = facts.status.condition(words.RUNNING)
    return condition.message if condition else ""
