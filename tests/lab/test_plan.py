"""Names and addresses of a lab."""

from __future__ import annotations

from itertools import chain

from crosscloud_lab.labfile import parse_lab, read_lab_file
from crosscloud_lab.network import cut_rules, masquerade_rules
from crosscloud_lab.plan import lab_id, node_labels, plan_lab, wan_interface

_NAMES = ", ".join(f"{{name: cluster-{number:04}, nodes: [{{count: 16}}]}}" for number in range(16))
SIXTEEN = f"{{clusters: [{_NAMES}]}}"


def test_no_address_is_given_twice_in_the_largest_lab() -> None:
    plan = plan_lab(parse_lab(SIXTEEN))
    nodes = [node.address for cluster in plan.clusters for node in cluster.nodes]
    every = [*nodes, plan.host_address, plan.storage_address]
    assert len(set(every)) == len(every) == 16 * 16 + 2
    assert all(address in plan.spec.network for address in every)
    for cluster in plan.clusters:
        assert all(node.address in cluster.region for node in cluster.nodes)


def test_every_cluster_has_the_same_pod_ranges() -> None:
    plan = plan_lab(parse_lab(SIXTEEN))
    assert len({tuple(node.pods for node in cluster.nodes) for cluster in plan.clusters}) == 1


def test_interface_names_fit_the_kernels_fifteen_characters() -> None:
    plan = plan_lab(parse_lab(SIXTEEN))
    names = [cluster.host_interface for cluster in plan.clusters]
    names += [wan_interface(peer) for cluster in plan.clusters for peer in cluster.peers]
    assert max(map(len, names)) <= 15


def test_labs_of_different_names_share_no_interface_on_the_host() -> None:
    assert lab_id("crosscloud") != lab_id("crosscloud-test")


def test_gpu_nodes_carry_the_labels_of_gpu_feature_discovery() -> None:
    plan = plan_lab(read_lab_file(None))
    east, hub = plan.cluster("east"), plan.cluster("hub")
    labels = node_labels(east, east.nodes[0])
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-80GB"
    assert labels["nvidia.com/gpu.count"] == "4"
    assert labels["nvidia.com/gpu.memory"] == "81920"
    assert labels["nvidia.com/gpu.present"] == "true"
    assert not [key for key in chain(node_labels(hub, hub.nodes[0])) if key.startswith("nvidia.com/")]


def test_rules_are_replaced_as_a_whole() -> None:
    plan = plan_lab(read_lab_file(None))
    rules = masquerade_rules(plan.cluster("west"))
    assert 'ip saddr 10.244.1.0/24 oifname { "host", "to-hub", "to-east" } snat to 10.77.3.2' in rules
    assert rules.startswith("table ip crosscloud\ndelete table ip crosscloud\n")
    assert "drop" not in cut_rules([])
    assert 'iifname "to-west" drop' in cut_rules(["west"])
