"""Where the stages of a job run: one plan for all of its replicas on one snapshot of all members, or why there is none.

Node by node: a stage of G GPUs takes n nodes of one pool with G/n GPUs each, fewest nodes first, never over more than
one member. All or nothing. Each replica goes where it fits on the fewest nodes, then to the member with most free GPUs,
then by name; where that leaves no room for a later replica, the choice is taken back and the next one tried. The search
is deterministic and complete up to MAX_STEPS choices, which only contrived shapes reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosscloud_operator.domain import scheduling
from crosscloud_operator.domain.inventory import Node, Snapshot
from crosscloud_operator.domain.record import PlacedNode, PlacedStage, Refusal

MAX_STEPS = 2000


@dataclass(frozen=True)
class StageNeed:
    """One stage of one replica. `members` narrows the choice; empty leaves it open."""

    replica: int
    gpus: int
    zero_stage: int = 1
    stage: int = 0
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What a job asks of the planner; `pod_spec` is that of its podTemplate."""

    namespace: str
    stages: tuple[StageNeed, ...]
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


Free = dict[str, dict[str, int]]  # member -> node -> GPUs


def place(request: Request, members: Sequence[Snapshot], promised: Mapping[tuple[str, str], int]) -> Placement:
    """`promised` are GPUs by (member, node) that other jobs' plans hold, but whose pods aren't bound yet."""
    offers = {member.name: _offer(request, member, promised) for member in members}
    usable = {name: nodes for name, (nodes, reason) in sorted(offers.items()) if reason is None}
    order = sorted(request.stages, key=lambda need: (-need.gpus, len(need.members) or len(members), need.replica))
    free: Free = {name: {node.name: node.free for node in nodes} for name, nodes in usable.items()}
    placed = _search(order, usable, free)
    refused = _refusals(request, offers, alone=placed is None)
    stages = tuple(sorted(placed or (), key=lambda stage: (stage.replica, stage.stage)))
    return Placement(stages, refused)


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
        return (), "no node with GPUs" if not reasons else f"no node qualifies: {_some(reasons)}"
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


def _search(needs: Sequence[StageNeed], usable: Mapping[str, tuple[Node, ...]], free: Free) -> list[PlacedStage] | None:
    """Depth first over the needs; a state that failed once isn't entered again."""
    failed: set[tuple[int, tuple[tuple[int, ...], ...]]] = set()
    steps = 0

    def descend(index: int) -> list[PlacedStage] | None:
        nonlocal steps
        if index == len(needs):
            return []
        state = (index, tuple(tuple(nodes.values()) for nodes in free.values()))
        if state in failed:
            return None
        for stage in _choices(needs[index], usable, free):
            steps += 1
            if steps > MAX_STEPS:
                return None
            for node in stage.nodes:
                free[stage.member][node.name] -= node.gpus
            rest = descend(index + 1)
            for node in stage.nodes:
                free[stage.member][node.name] += node.gpus
            if rest is not None:
                return [stage, *rest]
        failed.add(state)
        return None

    return descend(0)


def _choices(need: StageNeed, usable: Mapping[str, tuple[Node, ...]], free: Free) -> Iterator[PlacedStage]:
    """Every way to place one stage, the best first."""
    room = {name: sum(free[name].values()) for name in usable if not need.members or name in need.members}
    members = sorted((name for name in room if room[name] >= need.gpus), key=lambda name: (-room[name], name))
    for count in range(1, need.gpus + 1):
        if need.gpus % count:
            continue
        each = need.gpus // count
        for name in members:
            pools: dict[str, list[Node]] = {}
            for node in usable[name]:
                if free[name][node.name] >= each:
                    pools.setdefault(node.pool, []).append(node)
            for pool in sorted(pools):
                for names in _node_sets(pools[pool], free[name], count):
                    nodes = tuple(PlacedNode(node, each) for node in names)
                    yield PlacedStage(need.replica, 1, need.stage, name, pool, need.zero_stage, nodes)


def _node_sets(nodes: Sequence[Node], free: Mapping[str, int], count: int) -> Iterator[tuple[str, ...]]:
    """Sets of `count` nodes, tightest fit first; of nodes with equal room the first by name stand for all."""
    by_room: dict[int, list[str]] = {}
    for node in nodes:
        by_room.setdefault(free[node.name], []).append(node.name)
    rooms = [by_room[room] for room in sorted(by_room)]

    def take(index: int, wanted: int) -> Iterator[tuple[str, ...]]:
        if wanted == 0:
            yield ()
        elif sum(len(names) for names in rooms[index:]) >= wanted:
            for number in range(min(wanted, len(rooms[index])), -1, -1):
                for rest in take(index + 1, wanted - number):
                    yield (*rooms[index][:number], *rest)

    for names in take(0, count):
        yield tuple(sorted(names))


def _refusals(
    request: Request, offers: Mapping[str, tuple[tuple[Node, ...], str | None]], *, alone: bool
) -> tuple[Refusal, ...]:
    """Why each member can't take even one stage; with `alone`, also why those that could aren't enough."""
    found = []
    for name, (nodes, reason) in sorted(offers.items()):
        if reason is not None:
            found.append(Refusal(name, reason))
            continue
        free: Free = {name: {node.name: node.free for node in nodes}}
        allowed = [need for need in request.stages if not need.members or name in need.members]
        fitting = [need for need in allowed if any(True for _ in _choices(need, {name: nodes}, free))]
        rooms = _some([f"{node.name} {node.free}" for node in nodes])
        if not allowed:
            found.append(Refusal(name, "no replica may run there, by replicaOverrides"))
        elif not fitting:
            shapes = " or ".join(_shape(gpus, request.gpu) for gpus in sorted({need.gpus for need in allowed}))
            found.append(Refusal(name, f"needs {shapes}; free GPUs: {rooms}"))
        elif alone:
            whole = f"{len(fitting)} of {len(request.stages)} replicas fit there one by one, not all at once"
            found.append(Refusal(name, f"{whole}; free GPUs: {rooms}"))
    return tuple(found)


def _shape(gpus: int, product: str | None) -> str:
    """`4 GPUs (...) on one node, or 2 each on 2 nodes of one pool`."""
    kind = f" {product}" if product else ""
    shapes = [f"{gpus}{kind} GPU{'s' if gpus > 1 else ''} on one node"]
    shapes += [f"{n}x{gpus // n}" for n in range(2, gpus + 1) if gpus % n == 0][:3]
    return " or ".join(shapes)


def _some(items: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
