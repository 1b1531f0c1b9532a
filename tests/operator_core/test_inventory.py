"""What a member has to offer, from raw objects."""

from __future__ import annotations

from typing import Any

import pytest

from crosscloud_operator.domain import inventory, scheduling
from crosscloud_operator.domain.record import rfc3339, seconds

GPU = "nvidia.com/gpu"


def node(name: str, gpus: object, ready: str = "True", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "A100", "kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {"allocatable": {GPU: gpus}, "conditions": [{"type": "Ready", "status": ready}]},
    }


def pod(on: str | None, gpus: int, phase: str = "Running") -> dict[str, Any]:
    containers = [{"name": "a", "resources": {"requests": {GPU: str(gpus)}}}]
    return {"metadata": {"name": "p"}, "spec": {"nodeName": on, "containers": containers}, "status": {"phase": phase}}


def free(*pods: dict[str, Any]) -> dict[str, int]:
    return {item.name: item.free for item in inventory.gpu_nodes([node("n1", "4"), node("n2", "4")], pods)}


def test_free_is_allocatable_less_what_bound_pods_request_that_have_not_ended() -> None:
    pods = [pod("n1", 1), pod("n1", 2, "Pending"), pod("n2", 4, "Succeeded"), pod("n2", 4, "Failed"), pod(None, 4)]
    assert free(*pods) == {"n1": 1, "n2": 4}


def test_a_node_that_is_overcommitted_has_nothing_free() -> None:
    assert free(pod("n1", 9))["n1"] == 0


@pytest.mark.parametrize(
    ("containers", "init", "expected"),
    [
        ([1, 2], [], 3),
        ([1], [(4, None)], 4),  # the largest init container runs alone
        ([3], [(1, None), (2, None)], 3),
        ([2], [(1, "Always")], 3),  # a sidecar runs beside the containers
        ([1], [(2, "Always"), (3, None)], 5),  # and beside the init containers after it
        ([1], [(3, None), (2, "Always")], 3),
    ],
)
def test_init_containers_count_by_the_rule_of_kubernetes(
    containers: list[int], init: list[tuple[int, str | None]], expected: int
) -> None:
    spec = {
        "containers": [{"resources": {"limits": {GPU: str(gpus)}}} for gpus in containers],
        "initContainers": [
            {"resources": {"requests": {GPU: str(gpus)}}, **({"restartPolicy": policy} if policy else {})}
            for gpus, policy in init
        ],
    }
    assert scheduling.requested(spec, GPU) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("4", 4), (4, 4), ("1k", 1000), ("", 0), ("x", 0), ("-1", 0), ("1.5", 0)]
)
def test_what_is_no_count_of_devices_offers_none(text: object, expected: int) -> None:
    assert scheduling.count(text) == expected


def test_nodes_that_take_nothing_now_say_why() -> None:
    nodes = [
        node("a", "4", ready="False"),
        node("b", "4", unschedulable=True),
        node("c", "0"),
        node("d", "4", "Unknown"),
    ]
    found = {item.name: item.excluded for item in inventory.gpu_nodes(nodes, [])}
    assert found == {"a": "NotReady", "b": "cordoned", "d": "NotReady"}


def test_pools_are_nodes_alike_in_product_label_and_taints() -> None:
    labelled = node("l1", "8")
    labelled["metadata"]["labels"]["cloud.google.com/gke-nodepool"] = "a100-pool"
    tainted = node("t1", "8", taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    ill = node("n3", "2", taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}], ready="Unknown")
    nodes = [node("n1", "4"), node("n2", "2"), labelled, tainted, ill]
    found = {(item.name, item.nodes, item.total, item.free) for item in inventory.pools(nodes, [pod("n1", 1)])}
    assert found == {("A100", 3, 8, 5), ("A100-2", 1, 8, 8), ("a100-pool", 1, 8, 8)}


def test_the_gateway_is_reached_at_the_address_set_or_at_a_ready_node() -> None:
    first, second = node("n1", "1", ready="False"), node("n2", "1")
    first["status"]["addresses"] = [{"type": "ExternalIP", "address": "192.0.2.1"}]
    second["status"]["addresses"] = [
        {"type": "InternalIP", "address": "10.0.0.2"},
        {"type": "Hostname", "address": "n2"},
    ]
    assert inventory.gateway_host({}, [first, second]) == "10.0.0.2"
    assert inventory.gateway_host({"spec": {"gateway": {"address": "gw.example.org"}}}, [second]) == "gw.example.org"
    assert inventory.gateway_host({}, [first]) is None


def test_times_in_a_status_are_whole_seconds_of_utc() -> None:
    assert rfc3339(0.9) == "1970-01-01T00:00:00Z"
    assert seconds("1970-01-01T01:00:00+01:00") == 0.0
    assert seconds(rfc3339(1_800_000_000)) == 1_800_000_000


def member(name: str, made: str, cluster: str | None = None) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "creationTimestamp": made},
        "status": {"clusterId": cluster} if cluster else {},
    }


def test_of_two_members_that_are_one_cluster_the_older_goes_on_and_of_equal_age_the_first_by_name() -> None:
    old, new = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    members = [
        member("a", new, "u1"),
        member("b", old, "u1"),
        member("c", old, "u2"),
        member("d", new),
        member("e", new),
    ]
    assert inventory.duplicates(members, {}) == {"a": "b"}
    assert inventory.duplicates(reversed(members), {}) == {"a": "b"}
    assert inventory.duplicates(members, {"d": "u3", "e": "u3"}) == {"a": "b", "e": "d"}
    # What is seen now counts more than what was written before.
    assert inventory.duplicates(members, {"b": "u4"}) == {}
    assert inventory.duplicates([], {}) == {}
