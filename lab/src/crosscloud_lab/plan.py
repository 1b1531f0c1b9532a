"""From a lab's description to its names and addresses: pure, so that every step finds the same ones.

The node network is cut into blocks of 256 addresses: block 0 is the host's, block i+1 the i-th cluster's.
All clusters use the same ranges for pods and Services; only node addresses are routed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from itertools import combinations, islice

from crosscloud_lab.labfile import POD_RANGE
from crosscloud_lab.spec import ClusterSpec, LabSpec, PoolSpec

_STORAGE_HOST = 250
STORAGE_PORT = 7070


@dataclass(frozen=True)
class NodePlan:
    name: str
    index: int
    address: IPv4Address
    pods: IPv4Network
    pool: PoolSpec

    @property
    def bridge(self) -> str:
        return f"pods{self.index}"


@dataclass(frozen=True)
class ClusterPlan:
    name: str
    region: IPv4Network
    nodes: tuple[NodePlan, ...]
    peers: tuple[str, ...]
    host_interface: str
    """The host's end of the veth pair into the cluster; it carries the lab's id."""

    @property
    def api_address(self) -> IPv4Address:
        return self.nodes[0].address

    @property
    def api_url(self) -> str:
        return f"https://{self.api_address}:6443"


@dataclass(frozen=True)
class LabPlan:
    spec: LabSpec
    host_address: IPv4Address
    clusters: tuple[ClusterPlan, ...]
    storage_address: IPv4Address
    """An address of the first cluster where the S3 server listens."""

    @property
    def cgroup(self) -> str:
        return f"crosscloud-{self.spec.name}"

    @property
    def storage_cluster(self) -> ClusterPlan:
        return self.clusters[0]

    @property
    def storage_url(self) -> str:
        return f"http://{self.storage_address}:{STORAGE_PORT}"

    def cluster(self, name: str) -> ClusterPlan:
        return next(cluster for cluster in self.clusters if cluster.name == name)

    def pairs(self) -> list[tuple[str, str]]:
        """Every pair of clusters once, in the order of the lab file."""
        return list(combinations(self.spec.cluster_names(), 2))


def wan_interface(peer: str) -> str:
    """Name, inside a cluster, of its end of the link to `peer`."""
    return f"to-{peer}"


def lab_id(name: str) -> str:
    """A short mark of the lab's name, for interface names, which have 15 characters at most."""
    return hashlib.sha256(name.encode()).hexdigest()[:6]


def plan_lab(spec: LabSpec) -> LabPlan:
    """Names and addresses of everything in the lab."""
    prefix = f"cc{lab_id(spec.name)}h"
    blocks = list(islice(spec.network.subnets(new_prefix=24), len(spec.clusters) + 1))
    clusters = tuple(
        _cluster(cluster, blocks[index + 1], spec, f"{prefix}{index}") for index, cluster in enumerate(spec.clusters)
    )
    return LabPlan(
        spec=spec,
        host_address=blocks[0][1],
        clusters=clusters,
        storage_address=blocks[1][_STORAGE_HOST],
    )


def _cluster(cluster: ClusterSpec, region: IPv4Network, spec: LabSpec, host_interface: str) -> ClusterPlan:
    pools = [pool for pool in cluster.nodes for _ in range(pool.count)]
    pod_ranges = list(islice(POD_RANGE.subnets(new_prefix=24), len(pools)))
    nodes = tuple(
        NodePlan(f"{cluster.name}-{index}", index, region[index + 1], pod_ranges[index], pool)
        for index, pool in enumerate(pools)
    )
    peers = tuple(name for name in spec.cluster_names() if name != cluster.name)
    return ClusterPlan(cluster.name, region, nodes, peers, host_interface)


def node_labels(cluster: ClusterPlan, node: NodePlan) -> dict[str, str]:
    """Labels as clouds and NVIDIA's GPU feature discovery set them; gpu.memory is in MiB."""
    labels = {
        "topology.kubernetes.io/region": cluster.name,
        "topology.kubernetes.io/zone": f"{cluster.name}-a",
    }
    if node.pool.gpus:
        labels |= {
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.count": str(node.pool.gpus),
            "nvidia.com/gpu.product": node.pool.gpu,
            "nvidia.com/gpu.replicas": "1",
        }
        memory = re.search(r"(\d+)GB", node.pool.gpu)
        if memory:
            labels["nvidia.com/gpu.memory"] = str(int(memory[1]) * 1024)
    return labels
