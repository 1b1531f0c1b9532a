"""Where the stages of a job run: one plan for all of its replicas on one snapshot of all members, or why there is none.

Node by node: a stage of G GPUs takes n nodes of one pool with G/n GPUs each, fewest nodes first, never over more than
one member. All or nothing. A replica's stages go into one member where they can, and over as few boundaries between
members as there must be. Each goes where it fits on the fewest nodes, then to the member with most free GPUs, then by
name; `search.py` has the search. A member that others can't reach takes a job only as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosscloud_operator.domain import scheduling
from crosscloud_operator.domain.inventory import Node, Snapshot
from crosscloud_operator.domain.record import PlacedStage, Refusal
from crosscloud_operator.domain.search import ReplicaNeed, room_for, search
from crosscloud_operator.domain.status import some

NODES_NAMED = 8  # in one reason


@dataclass(frozen=True)
class Request:
    """What a job asks of the planner; `pod_spec` is that of its podTemplate."""

    namespace: str
    replicas: tuple[ReplicaNeed, ...]
    gpu: str | None = None
    pod_spec: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Placement:
    """`stages` is the whole plan, or empty; `refused` says for each member that can't take a stage why."""

    stages: tuple[PlacedStage, ...]
    refused: tuple[Refusal, ...]

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted({stage.member for stage in self.stages}))


def place(request: Request, members: Sequence[Snapshot], promised: Mapping[tuple[str, str], int]) -> Placement:
    """`promised` are GPUs by (member, node) that other jobs' plans hold, but whose pods aren't bound yet."""
    offers = {member.name: _offer(request, member, promised) for member in members}
    usable = {name: nodes for name, (nodes, reason) in sorted(offers.items()) if reason is None}
    closed = sorted(member.name for member in members if not member.reachable and member.name in usable)
    placed = search(request.replicas, {name: nodes for name, nodes in usable.items() if name not in closed})
    for name in closed:
        placed = placed or search(request.replicas, {name: usable[name]})
    stages = tuple(sorted(placed or (), key=lambda stage: (stage.replica, stage.stage)))
    spans = len({stage.member for stage in stages}) != 1
    return Placement(stages, _refusals(request, offers, closed if spans else (), alone=placed is None))


def _offer(
    request: Request, member: Snapshot, promised: Mapping[tuple[str, str], int]
) -> tuple[tuple[Node, ...], str | None]:
    """The member's nodes that qualify, with what is really free there; or the reason why none does."""
    if member.unknown is not None:
        return (), f"unknown: {member.unknown}"
    labels = member.namespaces.get(request.namespace)
    if labels is None:
        return (), f"namespace {request.namespace} does not exist there; create it, or apply the job in one that does"
    labels = {"kubernetes.io/metadata.name": request.namespace, **labels}
    if not scheduling.matches_labels(member.allowed_namespaces, labels):
        return (), (
            f"namespace {request.namespace} is not allowed there; "
            f"its administrator can add it to allowedNamespaces of MemberCluster {member.name}"
        )
    nodes, reasons = [], []
    for node in sorted(member.nodes, key=lambda item: item.name):
        reason = _exclusion(request, node)
        if reason is None:
            nodes.append(replace(node, free=max(0, node.free - promised.get((member.name, node.name), 0))))
        else:
            reasons.append(f"{node.name} {reason}")
    if not nodes:
        return (), "no node with GPUs" if not reasons else f"no node qualifies: {some(reasons, NODES_NAMED)}"
    return tuple(nodes), None


def _exclusion(request: Request, node: Node) -> str | None:
    if request.gpu is not None and node.gpu != request.gpu:
        return f"has GPU {node.gpu or 'of unknown kind'}, not {request.gpu}"
    if node.excluded is not None:
        return f"is {node.excluded}"
    if not scheduling.matches_node(request.pod_spec, node.name, node.labels):
        return "doesn't match nodeSelector or node affinity of the podTemplate"
    taint = scheduling.untolerated(node.taints, request.tolerations)
    return None if taint is None else f"has the taint {taint}, which the podTemplate doesn't tolerate"


def _refusals(
    request: Request,
    offers: Mapping[str, tuple[tuple[Node, ...], str | None]],
    closed: Sequence[str],
    *,
    alone: bool,
) -> tuple[Refusal, ...]:
    """Why each member can't take even one stage; with `alone`, also why those that could aren't enough. `closed` are
    those that can't be reached by others.
    """
    found = []
    for name, (nodes, reason) in sorted(offers.items()):
        if reason is not None:
            found.append(Refusal(name, reason))
            continue
        allowed = [need for need in request.replicas if need.may_use(name)]
        rooms = [(node.pool, node.free) for node in nodes]
        fitting = [need for need in allowed if room_for(need.gpus, 1, rooms)[0]]
        free = f"free GPUs: {some([f'{node.name} {node.free}' for node in nodes], NODES_NAMED)}"
        if not allowed:
            found.append(Refusal(name, "no replica may run there, by replicaOverrides"))
        elif not fitting:
            shapes = " or ".join(_shape(gpus, request.gpu) for gpus in sorted({need.gpus for need in allowed}))
            found.append(Refusal(name, f"needs {shapes}; {free}"))
        elif name in closed:
            found.append(Refusal(name, f"{_no_path(name)}, and the job needs more than this member; {free}"))
        elif alone:
            found.append(Refusal(name, f"{_not_enough(request, fitting, rooms)}; {free}"))
    return tuple(found)


def _no_path(name: str) -> str:
    return (
        "no ready node has an address, so that pods in other members can't reach it "
        f"(spec.gateway.address of MemberCluster {name} can name one)"
    )


def _not_enough(request: Request, fitting: Sequence[ReplicaNeed], rooms: Sequence[tuple[str, int]]) -> str:
    """How much of the job a member could take that has room for some of it."""
    if all(need.stages == 1 for need in request.replicas):
        return f"{len(fitting)} of {len(request.replicas)} replicas fit there one by one, not all at once"
    stages = {need.replica: room_for(need.gpus, need.stages, rooms)[0] for need in fitting}
    most = max(fitting, key=lambda need: (stages[need.replica], -need.replica))
    part = (
        f"room for {stages[most.replica]} of the {most.stages} stages of replica {most.replica}, not for all of the job"
    )
    return part + (", of which the members of one replica must hold a source of data together" if most.together else "")


def _shape(gpus: int, product: str | None) -> str:
    """`4 GPUs (...) on one node, or 2 each on 2 nodes of one pool`."""
    kind = f" {product}" if product else ""
    shapes = [f"{gpus}{kind} GPU{'s' if gpus > 1 else ''} on one node"]
    shapes += [f"{n}x{gpus // n}" for n in range(2, gpus + 1) if gpus % n == 0][:3]
    return " or ".join(shapes)
