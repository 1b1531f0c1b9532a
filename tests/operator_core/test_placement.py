"""Placement against a brute-force search, and what it says when it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from crosscloud_operator.domain.inventory import Node, Snapshot
from crosscloud_operator.domain.placement import Placement, Request, place
from crosscloud_operator.domain.search import ReplicaNeed, boundaries

NAMESPACES = {"ml": {"team": "ml"}}
EVERY = {"matchLabels": {}}


def node(name: str, free: int, gpu: str = "A100", pool: str = "gpu", **more: object) -> Node:
    return Node(name, pool, gpu, max(free, 8), free, **more)  # type: ignore[arg-type]


def member(name: str, *nodes: Node, allowed: object = EVERY, **more: object) -> Snapshot:
    return Snapshot(name, nodes, NAMESPACES, allowed, **more)  # type: ignore[arg-type]


def request(*needs: ReplicaNeed, **more: object) -> Request:
    return Request("ml", needs, **more)  # type: ignore[arg-type]


def need(
    replica: int, gpus: int, *members: str, stages: int = 1, together: tuple[str, ...] = (), named: str = ""
) -> ReplicaNeed:
    """`named`: a letter for the member of each stage."""
    sets = tuple(map(frozenset, together))
    return ReplicaNeed(replica, gpus, stages, members=members, together=sets, stage_members=tuple(named))


def where(placement: Placement) -> list[tuple[str, dict[str, int]]]:
    return [(stage.member, {node.name: node.gpus for node in stage.nodes}) for stage in placement.stages]


def reasons(placement: Placement) -> dict[str, str]:
    return {item.member: item.reason for item in placement.refused}


Free = dict[str, dict[str, int]]


def ways(gpus: int, nodes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Every choice of nodes, all with as many GPUs, for a stage in one member; each with what it leaves free."""
    for count in range(1, gpus + 1):
        if gpus % count == 0:
            each = gpus // count
            for chosen in combinations([node for node in nodes if nodes[node] >= each], count):
                yield {node: room - each * (node in chosen) for node, room in nodes.items()}


def fewest_boundaries(needs: list[ReplicaNeed], free: Free) -> int | None:
    """Of every way to place everything, tried one after the other; None where there is none."""
    steps = [(each, stage) for each in needs for stage in range(each.stages)]
    seen: dict[object, int | None] = {}

    def best(index: int, before: str, free: Free) -> int | None:
        """`before`: the members of the replica's stages so far, in their order."""
        if index == len(steps):
            return 0
        each, stage = steps[index]
        before = before if stage else ""
        key = (index, before, tuple(tuple(sorted(nodes.values())) for nodes in free.values()))
        if key not in seen:
            found = [
                rest + (stage > 0 and before[-1] != name)
                for name, nodes in free.items()
                if name in (each.stage_members[stage : stage + 1] or each.members or free)
                if not each.together or any({*before, name} <= group for group in each.together)
                for left in ways(each.gpus, nodes)
                if (rest := best(index + 1, before + name, {**free, name: left})) is not None
            ]
            seen[key] = min(found, default=None)
        return seen[key]

    return best(0, "", free)


@settings(max_examples=300, deadline=None)
@given(
    rooms=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1),
    shapes=st.lists(
        st.tuples(
            st.integers(1, 6),
            st.integers(1, 4),
            st.sampled_from([(), ("a",), ("b", "c")]),
            st.sampled_from([(), ("a", "bc"), ("ab", "bc")]),
            st.sampled_from(["", "", "abca", "bbcc"]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_a_job_is_placed_exactly_when_some_way_exists_over_as_few_boundaries_as_there_must_be(
    rooms: dict[str, list[int]], shapes: list[tuple[int, int, tuple[str, ...], tuple[str, ...], str]]
) -> None:
    needs = [
        need(index, gpus, *members, stages=stages, together=together, named=named[:stages])
        for index, (gpus, stages, members, together, named) in enumerate(shapes)
    ]
    members = [
        member(name, *(node(f"{name}{number}", free) for number, free in enumerate(frees)))
        for name, frees in rooms.items()
    ]
    found = place(request(*needs), members, {})
    free = {each.name: {item.name: item.free for item in each.nodes} for each in members}
    fewest = fewest_boundaries(needs, free)
    assert bool(found.stages) == (fewest is not None)
    if not found.stages:
        assert {item.member for item in found.refused} == set(rooms), "every member has a reason"
        return
    assert boundaries(found.stages) == fewest
    wanted = [(each.replica, stage) for each in needs for stage in range(each.stages)]
    assert [(stage.replica, stage.stage) for stage in found.stages] == wanted
    for stage in found.stages:
        asked = needs[stage.replica]
        assert sum(item.gpus for item in stage.nodes) == asked.gpus
        assert len({item.gpus for item in stage.nodes}) == 1, "every node of a stage runs as many ranks"
        assert len({item.name for item in stage.nodes}) == len(stage.nodes)
        if asked.stage_members:
            assert stage.member == asked.stage_members[stage.stage]
        else:
            assert not asked.members or stage.member in asked.members
        lies = {item.member for item in found.stages if item.replica == stage.replica}
        assert not asked.together or any(lies <= group for group in asked.together)
        for item in stage.nodes:
            free[stage.member][item.name] -= item.gpus
    assert all(left >= 0 for nodes in free.values() for left in nodes.values()), "no node is given away twice"


@settings(max_examples=100, deadline=None)
@given(st.permutations(["a", "b", "c"]), st.permutations([0, 1, 2]))
def test_the_plan_does_not_depend_on_the_order_of_what_is_listed(names: list[str], order: list[int]) -> None:
    nodes = [node("n0", 2), node("n1", 4), node("n2", 2)]
    members = [member(name, *(nodes[number] for number in order)) for name in names]
    for stages in (1, 3):
        asked = request(need(0, 4), need(1, 4), need(2, 2, stages=stages))
        found = place(asked, members, {})
        assert found.stages
        assert found == place(asked, [member(n, *nodes) for n in "abc"], {})


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


def test_the_stages_of_a_replica_stay_together_where_a_member_has_room_for_all_of_them() -> None:
    members = [member("a", node("n1", 5)), member("b", node("m1", 2), node("m2", 2), node("m3", 2))]
    found = place(request(need(0, 2, stages=3)), members, {})
    assert where(found) == [("b", {"m1": 2}), ("b", {"m2": 2}), ("b", {"m3": 2})]
    # Where the larger one of two replicas goes decides whether the smaller ones must be split.
    found = place(
        request(need(0, 1, stages=4), need(1, 1, stages=3), need(2, 1, stages=2)),
        [member("a", node("n1", 5)), member("b", node("m1", 4))],
        {},
    )
    assert [name for name, _ in where(found)] == ["b"] * 4 + ["a"] * 5


def test_a_replica_that_no_member_can_hold_is_split_between_neighbouring_stages() -> None:
    members = [member("a", node("n1", 3)), member("b", node("m1", 1), node("m2", 2)), member("c", node("k1", 1))]
    found = place(request(need(0, 1, stages=6)), members, {})
    assert [name for name, _ in where(found)] == ["a"] * 3 + ["b"] * 3
    assert place(request(need(0, 1, stages=8)), members, {}).stages == ()


def test_a_pinned_replica_keeps_all_of_its_stages_in_its_members() -> None:
    members = [member("a", node("n1", 8)), member("b", node("m1", 2)), member("c", node("k1", 2))]
    found = place(request(need(0, 2, "b", "c", stages=2), need(1, 4, stages=2)), members, {})
    assert [name for name, _ in where(found)] == ["b", "c", "a", "a"]
    refused = place(request(need(0, 2, "b", stages=2)), members, {})
    assert reasons(refused) == {
        "a": "no replica may run there, by replicaOverrides",
        "b": "room for 1 of the 2 stages of replica 0, not for all of the job; free GPUs: m1 2",
        "c": "no replica may run there, by replicaOverrides",
    }


def test_a_replica_is_split_only_over_members_that_hold_a_source_together() -> None:
    members = [member("a", node("n1", 3)), member("b", node("m1", 2)), member("c", node("k1", 2))]
    assert [name for name, _ in where(place(request(need(0, 1, stages=4)), members, {}))] == ["a", "a", "a", "b"]
    held = place(request(need(0, 1, stages=4, together=("a", "bc"))), members, {})
    assert [name for name, _ in where(held)] == ["b", "b", "c", "c"]
    refused = place(request(need(0, 1, stages=5, together=("a", "bc"))), members, {})
    assert reasons(refused)["a"] == (
        "room for 3 of the 5 stages of replica 0, not for all of the job, of which the members of one replica must "
        "hold a source of data together; free GPUs: n1 3"
    )


def test_a_member_that_others_can_not_reach_takes_a_job_only_as_a_whole() -> None:
    hidden, open_ = member("a", node("n1", 4), reachable=False), member("b", node("m1", 2), node("m2", 1))
    alone = place(request(need(0, 1, stages=4)), [hidden, open_], {})
    assert [name for name, _ in where(alone)] == ["a"] * 4
    assert where(place(request(need(0, 1, stages=2)), [hidden, open_], {})) == [("b", {"m2": 1}), ("b", {"m1": 1})]
    split = place(request(need(0, 1, stages=5)), [hidden, open_], {})
    assert split.stages == ()
    assert reasons(split) == {
        "a": "no ready node has an address, so that pods in other members can't reach it (spec.gateway.address of "
        "MemberCluster a can name one), and the job needs more than this member; free GPUs: n1 4",
        "b": "room for 3 of the 5 stages of replica 0, not for all of the job; free GPUs: m1 2, m2 1",
    }


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
    deep = place(request(*(need(index, 2, stages=64) for index in range(64))), members, {})
    assert len(deep.stages) == 64 * 64
    assert boundaries(deep.stages) == 0


def test_allowed_namespaces_are_chosen_by_labels_or_by_name() -> None:
    by_label = {"matchExpressions": [{"key": "team", "operator": "In", "values": ["ml"]}]}
    by_name = {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}
    other = {"matchLabels": {"team": "web"}}
    for allowed, wanted in product((by_label, by_name), (True,)):
        assert bool(place(request(need(0, 1)), [member("a", node("n", 1), allowed=allowed)], {}).stages) is wanted
    assert place(request(need(0, 1)), [member("a", node("n", 1), allowed=other)], {}).stages == ()
