"""All objects of an attempt, from its plan: what has to exist before its pods are accepted, then the pods."""

from __future__ import annotations

from collections.abc import Mapping

from crosscloud_operator.domain import documents, gateway, manifests, names, pods
from crosscloud_operator.domain.actions import Action, Ensure, EnsureAuthority, EnsureKeys
from crosscloud_operator.domain.documents import PlannedPod
from crosscloud_operator.domain.lifecycle import Facts, Site, current
from crosscloud_operator.domain.record import Home
from crosscloud_trainer.contract import PeerTable, RunDocument


def attempt_actions(facts: Facts) -> tuple[Action, ...]:
    """In the order in which each member needs them; pods last."""
    home = facts.status.home
    if home is None:
        raise AssertionError("a plan has a home")
    attempt = current(facts.status).number
    job, settings, plan = facts.job, facts.settings, facts.status.plan
    gateways = {name: site.gateway for name, site in facts.sites.items() if site.gateway}
    members = sorted({stage.member for stage in plan})
    table = documents.peer_table(job, attempt, plan, gateways if len(members) > 1 else {}, settings)
    document = documents.run_document(job, attempt, home, plan, facts.status.checkpoints)
    planned = documents.planned_pods(job.id.name, attempt, plan)
    actions: list[Action] = [EnsureAuthority()]
    for member in members:
        own = tuple(pod for pod in planned if pod.member == member)
        anchor_uid = _anchor_uid(facts.sites, member)
        actions += _support(facts, member, anchor_uid, own, home, document, table)
        actions.append(EnsureKeys(member, anchor_uid, attempt, own))
        if len(members) > 1:
            actions += _gateway(facts, member, anchor_uid, planned, table)
    for pod in planned:
        obj = pods.pod(job, pod, _anchor_uid(facts.sites, pod.member), home.member, settings)
        actions.append(Ensure(pod.member, obj))
    return tuple(actions)


def _support(
    facts: Facts,
    member: str,
    anchor_uid: str,
    own: tuple[PlannedPod, ...],
    home: Home,
    document: RunDocument,
    table: PeerTable,
) -> list[Action]:
    """Reports, view, RBAC, NetworkPolicy, documents and the copy of the storage Secret in one member."""
    job = facts.job.id
    replicas = sorted({pod.id.replica for pod in own if pod.reports})
    writable = [names.report(job.name, replica) for replica in replicas]
    if member == home.member:
        writable.append(names.view(job.name))
    account = facts.job.pod_spec.get("serviceAccountName")
    objects = manifests.reports(job, anchor_uid, replicas)
    if member == home.member:
        objects.append(manifests.view(job, anchor_uid))
    objects += manifests.reporter(job, anchor_uid, writable, account)
    objects.append(manifests.network_policy(job, anchor_uid))
    objects.append(manifests.run_document(job, anchor_uid, document))
    objects.append(manifests.peer_table(job, anchor_uid, table))
    anchor = manifests.anchor(job, facts.status.checkpoints)
    actions: list[Action] = [Ensure(member, anchor, update=True), *(Ensure(member, obj) for obj in objects)]
    if facts.storage is not None:
        # The user may have corrected it since the last attempt.
        actions.append(Ensure(member, manifests.storage_secret(job, anchor_uid, facts.storage), update=True))
    return actions


def _gateway(
    facts: Facts, member: str, anchor_uid: str, planned: tuple[PlannedPod, ...], table: PeerTable
) -> list[Action]:
    ranks = {(pod.id.replica, pod.id.stage, pod.id.node): pod.gpus for pod in planned}
    config = gateway.configuration(table, ranks, member, facts.settings.gateway_port)
    pull_secrets = facts.job.pod_spec.get("imagePullSecrets") or ()
    attempt = current(facts.status).number
    made = gateway.gateway(facts.job.id, anchor_uid, attempt, config, facts.settings, pull_secrets)
    return [Ensure(member, obj) for obj in made]


def _anchor_uid(sites: Mapping[str, Site], member: str) -> str:
    uid = sites[member].anchor_uid
    if uid is None:
        raise AssertionError("sites are whole before an attempt is rendered")
    return uid
