"""What a member has to offer, from the raw objects of its informers: node pools, and free GPUs node by node.

Free is allocatable less what the bound pods request that have not ended. A member whose lists aren't complete is
unknown, which is neither empty nor unlimited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crosscloud_operator.domain import scheduling

Obj = Mapping[str, Any]

GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
# How clusters name their node pools: our own label first, then those of the large providers.
POOL_LABELS = (
    "crosscloud.dev/pool",
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
ENDED = ("Succeeded", "Failed")
SYSTEM_NAMESPACE = "kube-system"


@dataclass(frozen=True)
class Node:
    """A node with GPUs. `excluded` says why nothing may be put there now; None where it may."""

    name: str
    pool: str
    gpu: str  # product, "" where the node doesn't say
    total: int
    free: int
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Obj, ...] = ()
    excluded: str | None = None


@dataclass(frozen=True)
class Pool:
    """Nodes alike in GPU product, pool label and taints."""

    name: str
    gpu: str
    nodes: int
    total: int
    free: int


@dataclass(frozen=True)
class Snapshot:
    """One member at one moment. `unknown` says why nothing may be planned there; None where its lists are complete.

    `namespaces` are the labels of its namespaces by name; those that are being deleted are left out. `reachable`:
    whether its gateway can have an address, so that pods of other members can connect to its pods.
    """

    name: str
    nodes: tuple[Node, ...] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    allowed_namespaces: Obj | None = None
    unknown: str | None = None
    reachable: bool = True

    @property
    def free(self) -> int:
        return sum(node.free for node in self.nodes if node.excluded is None)


def snapshot(
    name: str,
    nodes: Iterable[Obj],
    pods: Iterable[Obj],
    namespaces: Iterable[Obj],
    allowed_namespaces: Obj | None,
    resource: str = GPU_RESOURCE,
    product: str = GPU_PRODUCT,
    *,
    reachable: bool = True,
) -> Snapshot:
    """A member whose lists are complete. `resource` is what nodes call a GPU, `product` the label with its kind."""
    return Snapshot(
        name=name,
        nodes=gpu_nodes(nodes, pods, resource, product),
        namespaces={
            item["metadata"]["name"]: item["metadata"].get("labels") or {}
            for item in namespaces
            if not item["metadata"].get("deletionTimestamp")
        },
        allowed_namespaces=allowed_namespaces,
        reachable=reachable,
    )


def gpu_nodes(
    nodes: Iterable[Obj], pods: Iterable[Obj], resource: str = GPU_RESOURCE, product: str = GPU_PRODUCT
) -> tuple[Node, ...]:
    """The nodes that have GPUs, in order of their names."""
    held: dict[str, int] = defaultdict(int)
    for pod in pods:
        node_name = (pod.get("spec") or {}).get("nodeName")
        if node_name and (pod.get("status") or {}).get("phase") not in ENDED:
            held[node_name] += scheduling.requested(pod["spec"], resource)
    named = _pool_names(nodes := list(nodes), resource, product)
    found = []
    for raw in sorted(nodes, key=lambda item: str(item["metadata"]["name"])):
        total = _gpus(raw, resource)
        if total == 0:
            continue
        name = raw["metadata"]["name"]
        labels = raw["metadata"].get("labels") or {}
        found.append(
            Node(
                name=name,
                pool=named[_pool_key(raw, product)],
                gpu=labels.get(product, ""),
                total=total,
                free=max(0, total - held[name]),
                labels=labels,
                taints=tuple((raw.get("spec") or {}).get("taints") or ()),
                excluded=_exclusion(raw),
            )
        )
    return tuple(found)


def pools(
    nodes: Iterable[Obj], pods: Iterable[Obj], resource: str = GPU_RESOURCE, product: str = GPU_PRODUCT
) -> tuple[Pool, ...]:
    """The node pools of a member, in order of their names; nodes that take nothing now have no free GPUs."""
    grouped: dict[str, list[Node]] = defaultdict(list)
    for node in gpu_nodes(nodes, pods, resource, product):
        grouped[node.pool].append(node)
    return tuple(
        Pool(
            name=name,
            gpu=members[0].gpu,
            nodes=len(members),
            total=sum(node.total for node in members),
            free=sum(node.free for node in members if node.excluded is None),
        )
        for name, members in sorted(grouped.items())
    )


def gateway_host(member: Obj, nodes: Iterable[Obj]) -> str | None:
    """Where others reach the member's NodePorts: the address set, or that of its first ready node; None without any."""
    fixed = ((member.get("spec") or {}).get("gateway") or {}).get("address")
    if fixed:
        return str(fixed)
    for kind in ("ExternalIP", "InternalIP"):
        for node in sorted(nodes, key=lambda item: str(item["metadata"]["name"])):
            if _is_ready(node):
                for address in (node.get("status") or {}).get("addresses") or ():
                    if address.get("type") == kind:
                        return str(address["address"])
    return None


def cluster_id(namespaces: Iterable[Obj]) -> str | None:
    """What tells one cluster from all others: the UID of its namespace kube-system, which lives as long as it does."""
    found = (item["metadata"].get("uid") for item in namespaces if item["metadata"]["name"] == SYSTEM_NAMESPACE)
    return next((str(uid) for uid in found if uid), None)


def duplicates(members: Iterable[Obj], seen: Mapping[str, str]) -> dict[str, str]:
    """Members whose cluster an older one names already, with that one's name; of equal age, the first by name.

    `seen` are the ids of the clusters that are watched, by member; the others' are in their status since they were.
    """
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for member in sorted(members, key=_age):
        name = str(member["metadata"]["name"])
        cluster = seen.get(name) or (member.get("status") or {}).get("clusterId")
        if cluster and first.setdefault(cluster, name) != name:
            found[name] = first[cluster]
    return found


def _age(member: Obj) -> tuple[str, str]:
    return str(member["metadata"].get("creationTimestamp") or ""), str(member["metadata"]["name"])


def _gpus(node: Obj, resource: str) -> int:
    return scheduling.count(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def _is_ready(node: Obj) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)


def _exclusion(node: Obj) -> str | None:
    if (node.get("spec") or {}).get("unschedulable"):
        return "cordoned"
    return None if _is_ready(node) else "NotReady"


PoolKey = tuple[str, str, tuple[tuple[str, str, str], ...]]


def _pool_key(node: Obj, product: str) -> PoolKey:
    labels = node["metadata"].get("labels") or {}
    label = next((labels[key] for key in POOL_LABELS if labels.get(key)), "")
    # Kubernetes itself puts taints on nodes that are ill; those don't make another pool.
    taints = tuple(
        sorted(
            (str(item.get("key")), str(item.get("value") or ""), str(item.get("effect")))
            for item in (node.get("spec") or {}).get("taints") or ()
            if not str(item.get("key")).startswith("node.kubernetes.io/")
        )
    )
    return label, labels.get(product, ""), taints


def _pool_names(nodes: Sequence[Obj], resource: str, product: str) -> dict[PoolKey, str]:
    """A readable name for each pool: its label or product; a number behind it where two would be alike."""
    names: dict[PoolKey, str] = {}
    taken: set[str] = set()
    for key in sorted({_pool_key(node, product) for node in nodes if _gpus(node, resource)}):
        wanted = key[0] or key[1] or "gpu"
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name)
        names[key] = name
    return names
