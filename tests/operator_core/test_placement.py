"""Placement against a brute-force search, and what it says when it refuses."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from crosscloud_operator.domain.inventory import Node, Snapshot
from crosscloud_operator.domain.placement import Placement, Request, StageNeed, place

NAMESPACES = {"ml": {"team": "ml"}}
EVERY = {"matchLabels": {}}


def node(name: str, free: int, gpu: str = "A100", pool: str = "gpu", **more: object) -> Node:
    return Node(name, pool, gpu, max(free, 8), free, **more)  # type: ignore[arg-type]


def member(name: str, *nodes: Node, allowed: object = EVERY, **more: object) -> Snapshot:
    return Snapshot(name, nodes, NAMESPACES, allowed, **more)  # type: ignore[arg-type]


def request(*needs: StageNeed, **more: object) -> Request:
    return Request("ml", needs, **more)  # type: ignore[arg-type]


def need(replica: int, gpus: int, *members: str) -> StageNeed:
    return StageNeed(replica, gpus, members=members)


def where(placement: Placement) -> list[tuple[str, dict[str, int]]]:
    return [(stage.member, {node.name: node.gpus for node in stage.nodes}) for stage in placement.stages]


def reasons(placement: Placement) -> dict[str, str]:
    return {item.member: item.reason for item in placement.refused}


def fits(needs: list[StageNeed], free: dict[str, dict[str, int]]) -> bool:
    """Every way to place everything, tried one after the other."""
    if not needs:
        return True
    first, *rest = needs
    for name, nodes in free.items():
        if first.members and name not in first.members:
            continue
        for count in range(1, first.gpus + 1):
            if first.gpus % count:
                continue
            each = first.gpus // count
            for chosen in combinations([node for node in nodes if nodes[node] >= each], count):
                left = {other: dict(rooms) for other, rooms in free.items()}
                for node_name in chosen:
                    left[name][node_name] -= each
                if fits(rest, left):
                    return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    rooms=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([(), ("a",), ("b", "c")])), min_size=1, max_size=3),
)
def test_a_job_is_placed_exactly_when_some_way_exists(
    rooms: dict[str, list[int]], sizes: list[tuple[int, tuple[str, ...]]]
) -> None:
    needs = [need(index, gpus, *members) for index, (gpus, members) in enumerate(sizes)]
    members = [
        member(name, *(node(f"{name}{number}", free) for number, free in enumerate(frees)))
        for name, frees in rooms.items()
    ]
    found = place(request(*needs), members, {})
    free = {each.name: {item.name: item.free for item in each.nodes} for each in members}
    assert bool(found.stages) == fits(needs, free)
    if not found.stages:
        assert {item.member for item in found.refused} == set(rooms), "every member has a reason"
        return
    assert [stage.replica for stage in found.stages] == list(range(len(needs)))
    for wanted, stage in zip(needs, found.stages, strict=True):
        assert sum(item.gpus for item in stage.nodes) == wanted.gpus
        assert len({item.gpus for item in stage.nodes}) == 1, "every node of a stage runs as many ranks"
        assert len({item.name for item in stage.nodes}) == len(stage.nodes)
        assert not wanted.members or stage.member in wanted.members
        for item in stage.nodes:
            free[stage.member][item.name] -= item.gpus
    assert all(left >= 0 for nodes in free.values() for left in nodes.values()), "no node is given away twice"


@settings(max_examples=100, deadline=None)
@given(st.permutations(["a", "b", "c"]), st.permutations([0, 1, 2]))
def test_the_plan_does_not_depend_on_the_order_of_what_is_listed(names: list[str], order: list[int]) -> None:
    nodes = [node("n0", 2), node("n1", 4), node("n2", 2)]
    members = [member(name, *(nodes[number] for number in order)) for name in names]
    found = place(request(need(0, 4), need(1, 4), need(2, 2)), members, {})
    straight = place(request(need(0, 4), need(1, 4), need(2, 2)), [member(n, *nodes) for n in "abc"], {})
    assert found == straight


def test_a_stage_takes_one_node_where_it_can_and_two_where_it_must() -> None:
    found = place(
        request(need(0, 4), need(1, 4)),
        [member("west", node("w1", 2), node("w2", 2)), member("east", node("e1", 4))],
        {},
    )
    assert where(found) == [("east", {"e1": 4}), ("west", {"w1": 2, "w2": 2})]


def test_free_gpus_of_a_member_are_never_summed_over_nodes_that_hold_too_few() -> None:
    # C07: ten nodes with one GPU each are no room for a stage whose nodes must hold two or more.
    scattered = member("a", *(node(f"n{number}", 1) for number in range(3)))
    whole = member("b", node("m1", 8), node("m2", 8))
    found = place(request(*(need(index, 4) for index in range(4))), [scattered, whole], {})
    assert {name for name, _ in where(found)} == {"b"}
    assert "needs 4 GPUs on one node or 2x2 or 4x1; free GPUs: n0 1, n1 1, n2 1" in reasons(found)["a"]


def test_a_stage_is_never_split_over_members_nor_over_unlike_pools() -> None:
    two = member("a", node("n1", 2, pool="old"), node("n2", 2, gpu="H100", pool="new"))
    found = place(request(need(0, 4)), [two, member("b", node("m1", 2))], {})
    assert found.stages == ()


def test_equal_replicas_spread_over_members_with_equal_room() -> None:
    members = [member("a", node("n1", 8)), member("b", node("m1", 8))]
    found = place(request(need(0, 4), need(1, 4)), members, {})
    assert [name for name, _ in where(found)] == ["a", "b"]


def test_gpus_promised_to_other_jobs_are_not_given_away_again() -> None:
    found = place(request(need(0, 2)), [member("a", node("n1", 4))], {("a", "n1"): 3})
    assert found.stages == ()
    assert "free GPUs: n1 1" in reasons(found)["a"]


def test_a_replica_pinned_by_an_override_goes_there_before_others_take_the_room() -> None:
    members = [member("a", node("n1", 4)), member("b", node("m1", 2), node("m2", 2))]
    found = place(request(need(0, 4), need(1, 4, "a")), members, {})
    assert [name for name, _ in where(found)] == ["b", "a"]


def test_an_unknown_member_is_neither_empty_nor_unlimited() -> None:
    # C13: "cannot estimate" is a reason, not a number.
    found = place(request(need(0, 1)), [Snapshot("a", unknown="not reached since 10:00")], {})
    assert reasons(found) == {"a": "unknown: not reached since 10:00"}


def test_every_refusal_says_what_a_person_can_do() -> None:
    taint = {"key": "team", "value": "vision", "effect": "NoSchedule"}
    members = [
        member("closed", node("n1", 8), allowed=None),
        Snapshot("bare", (node("n1", 8),), {}, EVERY),
        member("cordoned", node("n1", 8, excluded="cordoned")),
        member("tainted", node("n1", 8, taints=(taint,))),
        member("other", node("n1", 8, gpu="L4")),
        member("small", node("w1", 2), node("w2", 1)),
        member("cpu"),
    ]
    found = place(request(need(0, 4), gpu="A100", pod_spec={}), members, {})
    assert reasons(found) == {
        "closed": "namespace ml is not allowed there; "
        "its administrator can add it to allowedNamespaces of MemberCluster closed",
        "bare": "namespace ml does not exist there; create it, or apply the job in one that does",
        "cordoned": "no node qualifies: n1 is cordoned",
        "tainted": "no node qualifies: n1 has the taint team=vision:NoSchedule, which the podTemplate doesn't tolerate",
        "other": "no node qualifies: n1 has GPU L4, not A100",
        "small": "needs 4 A100 GPUs on one node or 2x2 or 4x1; free GPUs: w1 2, w2 1",
        "cpu": "no node with GPUs",
    }


def test_replicas_that_fit_one_by_one_but_not_together_are_told_apart() -> None:
    found = place(request(need(0, 4), need(1, 4)), [member("a", node("n1", 4))], {})
    assert reasons(found) == {"a": "2 of 2 replicas fit there one by one, not all at once; free GPUs: n1 4"}


def test_node_selector_affinity_and_tolerations_of_the_pod_template_are_obeyed() -> None:
    taint = {"key": "team", "value": "ml", "effect": "NoSchedule"}
    nodes = [
        node("n1", 4, labels={"disk": "ssd", "zone": "1"}),
        node("n2", 4, labels={"disk": "ssd", "zone": "2"}, taints=(taint,)),
        node("n3", 4, labels={"zone": "2"}),
    ]
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["2"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    spec = {"nodeSelector": {"disk": "ssd"}, "affinity": affinity}
    assert place(request(need(0, 1), pod_spec=spec), [member("a", *nodes)], {}).stages == ()
    tolerant = request(need(0, 1), pod_spec=spec, tolerations=({"key": "team", "operator": "Exists"},))
    assert where(place(tolerant, [member("a", *nodes)], {})) == [("a", {"n2": 1})]


def test_a_large_job_is_planned_without_trying_everything() -> None:
    members = [member(name, *(node(f"{name}{n:03}", 8) for n in range(128))) for name in "abcdefgh"]
    needs = [need(index, 128) for index in range(64)]
    found = place(request(*needs), members, {})
    assert len(found.stages) == 64
    assert all(len(stage.nodes) == 16 for stage in found.stages)
    one_too_many = [*needs, need(64, 128)]
    assert place(request(*one_too_many), members, {}).stages == ()


def test_allowed_namespaces_are_chosen_by_labels_or_by_name() -> None:
    by_label = {"matchExpressions": [{"key": "team", "operator": "In", "values": ["ml"]}]}
    by_name = {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}
    other = {"matchLabels": {"team": "web"}}
    for allowed, wanted in product((by_label, by_name), (True,)):
        assert bool(place(request(need(0, 1)), [member("a", node("n", 1), allowed=allowed)], {}).stages) is wanted
    assert place(request(need(0, 1)), [member("a", node("n", 1), allowed=other)], {}).stages == ()
