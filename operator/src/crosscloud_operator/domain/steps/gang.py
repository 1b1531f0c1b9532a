"""Admitting and Binding: all members accept all pods, or none runs; then all get their nodes, or none keeps one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crosscloud_operator.domain import record
from crosscloud_operator.domain.actions import Failure, Fault, Lift
from crosscloud_operator.domain.lifecycle import Decision, Facts, current, end_attempt, tell, with_attempt
from crosscloud_operator.domain.observed import PodState
from crosscloud_operator.domain.record import Cause
from crosscloud_operator.domain.render import attempt_actions
from crosscloud_operator.domain.status import some
from crosscloud_operator.domain.steps.running import cause_of_end

LOOK = 2.0  # seconds until the next look where no event wakes us


def admitting(facts: Facts) -> Decision:
    """Make everything; the pods are accepted when all are seen by a list."""
    attempt = current(facts.status)
    if facts.pods and all(pod.known and pod.uid and not pod.leaving for pod in facts.pods):
        status = with_attempt(facts.status, admitted_at=record.rfc3339(facts.now))
        message = f"attempt {attempt.number}: every member accepted its pods; waiting for nodes"
        return Decision(tell(facts, status, "Binding", message), again=True)
    if facts.now > record.seconds(attempt.planned_at) + facts.settings.admit_timeout:
        absent = ", ".join(pod.planned.label for pod in facts.pods if not pod.uid)
        message = f"not every pod was accepted within {facts.settings.admit_timeout:g} s; still missing: {absent}"
        return end_attempt(facts, _not_run("AdmissionTimeout", message))
    spans = len({stage.member for stage in facts.status.plan}) > 1
    lost = [name for name, site in sorted(facts.sites.items()) if not site.is_whole(gateway=spans)]
    if lost:
        message = f"anchor, Service or address of the job has gone from {', '.join(lost)}"
        return end_attempt(facts, _not_run("PreparationLost", message))
    message = f"attempt {attempt.number}: pods are being made"
    if away := sorted({stage.member for stage in facts.status.plan} - set(facts.sites)):
        message += f"; {', '.join(away)} does not answer"
        return Decision(tell(facts, facts.status, "Admitting", message), requeue=LOOK)
    status = tell(facts, facts.status, "Admitting", message)
    return Decision(status, (*facts.strays, *attempt_actions(facts)), requeue=LOOK, again=True)


def binding(facts: Facts) -> Decision:
    """Lift the gates; when not all pods are bound in time, all are taken back."""
    attempt = current(facts.status)
    if cause := cause_of_end(facts):
        return end_attempt(facts, cause)
    if all(pod.bound for pod in facts.pods):
        time = record.rfc3339(facts.now)
        status = with_attempt(facts.status, bound_at=time)
        status = replace(status, started_at=status.started_at or time)
        return Decision(tell(facts, status, "Starting", "every pod has its node", running=True), again=True)
    unbound = [pod for pod in facts.pods if not pod.bound]
    late = facts.now > record.seconds(attempt.admitted_at or attempt.planned_at) + facts.settings.bind_timeout
    if late and any(pod.known for pod in unbound):
        return end_attempt(facts, _not_run("BindTimeout", _unbound_words(unbound, facts.settings.bind_timeout)))
    lifts = [
        Lift(pod.planned.member, pod.planned.name, pod.uid, pod.gate)
        for pod in unbound
        if pod.gate is not None and pod.known and pod.uid
    ]
    message = f"attempt {attempt.number}: every member accepted its pods; waiting for nodes"
    status = tell(facts, facts.status, "Binding", message)
    return Decision(status, (*facts.strays, *lifts), requeue=LOOK)


def after_failures(facts: Facts, failures: Sequence[Failure]) -> Decision | None:
    """What follows from actions that could not be carried out while the gang was being made; None: try again later."""
    final = [item for item in failures if item.fault in (Fault.REFUSED, Fault.NAME_CONFLICT)]
    if not final:
        return None
    first = final[0]
    message = "; ".join(str(item) for item in final[:4])
    return end_attempt(facts, _not_run(first.fault.value, message, first.member))


def _not_run(reason: str, message: str, member: str | None = None) -> Cause:
    """An attempt that never ran doesn't count against the user's limit."""
    return Cause(reason, message, counted=False, retryable=True, member=member)


def _unbound_words(unbound: Sequence[PodState], timeout: float) -> str:
    words = [f"{pod.planned.label} ({pod.blocked or 'no word from the scheduler'})" for pod in unbound]
    return f"no node within {timeout:g} s for {some(words)}"
