"""Waiting: find room for all replicas, make Services and addresses ready, then fix the plan."""

from __future__ import annotations

from dataclasses import replace

from crosscloud_operator.domain import manifests, record
from crosscloud_operator.domain.actions import Action, Ensure, EnsureAuthority, Fault
from crosscloud_operator.domain.documents import choose_home
from crosscloud_operator.domain.lifecycle import Decision, Facts, Site, tell
from crosscloud_operator.domain.placement import Placement
from crosscloud_operator.domain.record import Attempt, Home, JobStatus, MemberState
from crosscloud_operator.domain.status import PLACED


def waiting(facts: Facts) -> Decision:
    """A job that waits keeps no pod and no reservation."""
    placement = _placement(facts)
    if not placement.stages:
        return _no_room(facts, placement)
    secret = facts.job.spec.storage.secret_name
    if secret and facts.storage is None:
        where = f"{facts.job.id.namespace}/{secret}"
        return _wait(facts, "StorageSecretMissing", f"spec.storage.secretName: no Secret {where} on the hub; create it")
    unprepared = [name for name in placement.members if not _is_ready(facts, name, placement)]
    if not unprepared:
        return Decision(facts.status, plan=True)
    known = {item.name for item in facts.status.members}
    new = tuple(MemberState(name) for name in unprepared if name not in known)
    members = tuple(sorted((*facts.status.members, *new), key=lambda item: item.name))
    status = replace(facts.status, members=members, refused=placement.refused)
    if new or not _has_failed(facts.status):
        message = f"making Services and addresses ready in {', '.join(unprepared)}"
        status = tell(facts, status, "Preparing", message, placed=(False, "Preparing", message))
    sites = [facts.sites.get(name, Site()) for name in unprepared]
    problems = [site.problem for site in sites if site.problem]
    if problems and _spans(placement):
        return _wait(replace(facts, status=status), "NoGatewayAddress", "; ".join(problems))
    actions = [action for name in unprepared for action in _preparation(facts, name, placement)]
    return Decision(status, (EnsureAuthority(), *actions), again=True)


def _has_failed(status: JobStatus) -> bool:
    """Whether the status says why the last preparation failed: that stays until one succeeds, or each try would write
    the status twice, and each write would wake the next try.
    """
    placed = status.condition(PLACED)
    return placed is not None and placed.reason in {fault.value for fault in Fault}


def plan(facts: Facts) -> Decision:
    """Fix plan, attempt number and home; on a fresh list of jobs, while no other job is being planned."""
    placement = _placement(facts)
    if not placement.stages or not all(_is_ready(facts, name, placement) for name in placement.members):
        return waiting(facts)
    status = facts.status
    before = status.attempt
    member = choose_home(placement.stages, facts.hub_member)
    number = 1 if status.home is None else status.home.number + (status.home.member != member)
    attempt = Attempt((before.number if before else 0) + 1, record.rfc3339(facts.now))
    status = replace(
        status,
        attempt=attempt,
        home=Home(number, member),
        plan=placement.stages,
        refused=placement.refused,
        restarts=status.restarts + (1 if before and before.bound_at else 0),
        replica_statuses=(),
        progress=None,
    )
    placed = (True, "Planned", record.places(placement.stages))
    message = f"attempt {attempt.number}: pods are being made"
    return Decision(tell(facts, status, "Admitting", message, placed=placed), again=True)


def _no_room(facts: Facts, placement: Placement) -> Decision:
    facts = replace(facts, status=replace(facts.status, refused=placement.refused))
    if not placement.refused:
        return _wait(facts, "NoMembers", "there is no MemberCluster; add one by `crosscloud member add`")
    reasons = "; ".join(f"{item.member}: {item.reason}" for item in placement.refused)
    return _wait(facts, "InsufficientCapacity", reasons)


def _wait(facts: Facts, reason: str, message: str) -> Decision:
    status: JobStatus = tell(facts, facts.status, "Waiting", message, placed=(False, reason, message))
    return Decision(status, requeue=facts.settings.waiting_interval)


def _placement(facts: Facts) -> Placement:
    return facts.placement or Placement((), ())


def _is_ready(facts: Facts, member: str, placement: Placement) -> bool:
    site = facts.sites.get(member, Site())
    recorded = any(item.name == member for item in facts.status.members)
    return recorded and site.is_whole(gateway=_spans(placement))


def _preparation(facts: Facts, member: str, placement: Placement) -> list[Action]:
    """The anchor first: what it owns needs its UID, which the next look brings."""
    site = facts.sites.get(member, Site())
    if site.anchor_uid is None:
        return [Ensure(member, manifests.anchor(facts.job.id))]
    made = manifests.services(facts.job.id, site.anchor_uid, facts.settings.gateway_port, gateway=_spans(placement))
    return [Ensure(member, obj) for obj in made]


def _spans(placement: Placement) -> bool:
    """Whether the job lies in several members: only then it needs gateways."""
    return len(placement.members) > 1
