"""Running: told by the replicas' reports and the pods' ends, until all have succeeded or the attempt must end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crosscloud_operator.domain import manifests, record
from crosscloud_operator.domain import status as words
from crosscloud_operator.domain.actions import Ensure
from crosscloud_operator.domain.lifecycle import Decision, Facts, current, end_attempt, tell
from crosscloud_operator.domain.observed import PodState, has_succeeded
from crosscloud_operator.domain.record import Cause, JobStatus, Result
from crosscloud_trainer.contract import Activity, ExitCode

LOOK = 15.0


def running(facts: Facts) -> Decision:
    status = _with_progress(facts)
    if status.plan and all(has_succeeded(facts.reports.get(stage.replica)) for stage in status.plan):
        return _succeeded(facts, status)
    if cause := cause_of_end(facts) or _start_timeout(facts):
        return end_attempt(replace(facts, status=status), cause)
    reason, message, value = _story(facts)
    status = tell(facts, status, reason, message, running=value)
    status = words.keep_progress(facts.status, status, facts.settings.progress_interval)
    requeue = facts.settings.cause_grace if any(pod.end for pod in facts.pods) else LOOK
    return Decision(status, (*facts.strays, *_acknowledged(facts, status)), requeue=requeue)


def _acknowledged(facts: Facts, status: JobStatus) -> list[Ensure]:
    """A checkpoint that the status has from now on is told to the members: older ones may go then."""
    if status.checkpoints == facts.status.checkpoints:
        return []
    anchor = manifests.anchor(facts.job.id, status.checkpoints)
    return [Ensure(member, anchor, update=True) for member in sorted({stage.member for stage in status.plan})]


def cause_of_end(facts: Facts) -> Cause | None:
    """Why the attempt must end; None while it goes on. A pod's own fault comes before what followed from it."""
    open_pods = [pod for pod in facts.pods if not has_succeeded(facts.reports.get(pod.planned.id.replica))]
    failed = [pod for pod in open_pods if pod.end and not pod.end.succeeded]
    own = [pod for pod in failed if pod.end and not pod.end.is_consequence]
    if own:
        return _failure(facts, min(own, key=_order))
    lost = [pod for pod in open_pods if pod.missing or (pod.leaving and not pod.end)]
    if lost:
        message = f"{lost[0].planned.label} was deleted or its node is gone"
        return Cause("PodLost", message, False, True, lost[0].planned.member, lost[0].planned.name)
    silent = [pod for pod in open_pods if pod.known and pod.planned.reports and pod.end and pod.end.succeeded]
    if silent and not failed:
        pod = silent[0].planned
        message = f"{pod.label} ended with exit code 0 but left no record that replica {pod.id.replica} has succeeded"
        return Cause("NoCompletionRecord", message, True, True, pod.member, pod.name, 0)
    if failed:
        first = min(failed, key=_order)
        at = first.end.at if first.end else None
        waiting = any(not pod.end and not pod.missing for pod in open_pods)
        if not waiting or at is None or facts.now > record.seconds(at) + facts.settings.cause_grace:
            return _failure(facts, first)
    return None


def _order(pod: PodState) -> tuple[str, str]:
    return ((pod.end.at if pod.end else None) or "", pod.planned.name)


def _failure(facts: Facts, pod: PodState) -> Cause:
    end = pod.end
    if end is None:
        raise AssertionError("a failure has an end")
    report = facts.reports.get(pod.planned.id.replica)
    said = report.completion.message if report and report.completion else end.message
    if end.exit_code is None:
        how = f"failed ({end.reason})"
    else:
        known = {code.value: code.name for code in ExitCode}
        how = f"ended with exit code {end.exit_code} ({known.get(end.exit_code, end.reason)})"
    message = f"{pod.planned.label} {how}" + (f": {said.strip()[:600]}" if said.strip() else "")
    reason = "PodDisrupted" if end.from_outside else "OOMKilled" if end.reason == "OOMKilled" else "PodFailed"
    planned = pod.planned
    return Cause(reason, message, end.counted, end.retryable, planned.member, planned.name, end.exit_code)


def _start_timeout(facts: Facts) -> Cause | None:
    bound = current(facts.status).bound_at
    limit = facts.settings.start_timeout
    if bound is None or facts.now <= record.seconds(bound) + limit:
        return None
    late = [pod for pod in facts.pods if pod.known and not pod.started and not pod.end]
    if not late:
        return None
    pod = late[0]
    message = f"{pod.planned.label} did not start within {limit:g} s: {pod.blocked or 'no word from the kubelet'}"
    return Cause("StartTimeout", message, False, True, pod.planned.member, pod.planned.name)


def _succeeded(facts: Facts, status: JobStatus) -> Decision:
    completions = [report.completion for _, report in sorted(facts.reports.items()) if report.completion]
    results = [item for item in completions if item.result_uri] or completions
    first = results[0]
    time = record.rfc3339(facts.now)
    status = replace(
        status,
        attempt=replace(current(status), ended_at=time),
        result=Result(first.result_uri, first.checkpoint_uri, first.checkpoint_digest),
        finished_at=time,
        replicas=0,
    )
    message = f"all {facts.job.spec.replicas} replica(s) have succeeded" + (
        f"; the result is at {first.result_uri}" if first.result_uri else ""
    )
    status = tell(facts, status, "Succeeded", message)
    status = words.with_condition(status, words.SUCCEEDED, True, "Succeeded", message, facts.now)
    return Decision(status, again=True)


def _with_progress(facts: Facts) -> JobStatus:
    """What the replicas said last, in the status; a replica that hasn't spoken in this attempt says Starting."""
    indexes = sorted({stage.replica for stage in facts.status.plan})
    replicas = []
    for index in indexes:
        pods = [pod for pod in facts.pods if pod.planned.id.replica == index]
        blocked = next((f"{pod.planned.label}: {pod.blocked}" for pod in pods if pod.blocked and not pod.started), None)
        replicas.append(words.replica_status(index, facts.reports.get(index), blocked))
    alive = sum(_runs([pod for pod in facts.pods if pod.planned.id.replica == index]) for index in indexes)
    progress = words.progress_summary(facts.reports.values()) or facts.status.progress
    status = words.with_checkpoints(facts.status, facts.reports.values(), facts.job.spec.checkpoint.keep)
    return replace(status, replica_statuses=tuple(replicas), progress=progress, replicas=alive)


def _runs(pods: Sequence[PodState]) -> bool:
    return all(pod.started and not pod.end for pod in pods)


def _story(facts: Facts) -> tuple[str, str, bool | None]:
    """Reason, message and value of the condition Running."""
    attempt = current(facts.status).number
    if facts.unreachable:
        lost = ", ".join(f"{name} since {since}" for name, since in sorted(facts.unreachable.items()))
        return "MemberUnreachable", f"not reached: {lost}; training goes on there as far as is known", None
    if waiting := words.waiting_words(facts.reports):
        return words.WAITING_FOR_PEERS, waiting, True
    activities = {report.activity for report in facts.reports.values()}
    if activities and activities <= {Activity.FINISHING, Activity.ENDED}:
        return "Finishing", "the last checkpoint and the result are being written", True
    if not activities or activities == {Activity.STARTING}:
        blocked = [f"{pod.planned.label}: {pod.blocked}" for pod in facts.pods if pod.blocked and not pod.started]
        blocked += facts.gateways
        return "Starting", "; ".join(blocked[:4]) or f"attempt {attempt}: trainers are starting", True
    return "Training", f"attempt {attempt}: {len(facts.reports)} replica(s) are training", True
