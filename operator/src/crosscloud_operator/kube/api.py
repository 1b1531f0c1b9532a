"""The one small interface that all I/O of the operator stands behind: a cluster's objects, and the world of clusters.

    ApiError
    ├── NotFound        404
    ├── AlreadyExists   409 on create
    ├── Conflict        409 on a patch or delete: resourceVersion, UID or a JSON patch test no longer holds
    ├── Refused         403, 422, other 4xx: quota, LimitRange, Pod Security, webhook, RBAC, schema; the server's words
    └── Unreachable     no answer, time-out, 429, 5xx, expired credentials: nothing is known about what happened

`HttpCluster` (kube/cluster.py) is the real form. Whatever passes tests/operator_core/conformance.py may take its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Obj = dict[str, Any]  # a Kubernetes object as raw JSON


@dataclass(frozen=True)
class Kind:
    """A resource of an API group; `plural` as in the URL."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


POD = Kind("", "v1", "Pod", "pods")
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
SERVICE = Kind("", "v1", "Service", "services")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
EVENT = Kind("", "v1", "Event", "events")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Kind(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
JOB = Kind("crosscloud.dev", "v1alpha1", "CrossCloudTrainingJob", "crosscloudtrainingjobs")
MEMBER = Kind("crosscloud.dev", "v1alpha1", "MemberCluster", "memberclusters", namespaced=False)

KINDS: dict[str, Kind] = {
    kind.kind: kind
    for kind in (
        POD, NODE, NAMESPACE, CONFIG_MAP, SECRET, SERVICE, SERVICE_ACCOUNT, EVENT, DEPLOYMENT, NETWORK_POLICY, ROLE,
        ROLE_BINDING, CLUSTER_ROLE, CLUSTER_ROLE_BINDING, LEASE, JOB, MEMBER,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """The address of one object in a cluster."""

    kind: Kind
    name: str
    namespace: str | None = None

    @staticmethod
    def of(obj: Mapping[str, Any]) -> Ref:
        meta = obj["metadata"]
        return Ref(KINDS[obj["kind"]], meta["name"], meta.get("namespace"))


class ApiError(Exception):
    """An API server's answer, or its absence. `message` is the server's own text."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


class NotFound(ApiError): ...


class AlreadyExists(ApiError): ...


class Conflict(ApiError): ...


class Refused(ApiError): ...


class Unreachable(ApiError): ...


class Cluster(Protocol):
    """One API server. Every call has a deadline and raises an ApiError."""

    name: str

    async def get(self, ref: Ref) -> Obj | None:
        """The object, or None where there is none."""

    async def list(self, kind: Kind, *, namespace: str | None = None, selector: str | None = None) -> Sequence[Obj]:
        """A complete, consistent list from the server (in pages), never a part of one."""

    async def create(self, obj: Obj) -> Obj:
        """Raises AlreadyExists, Refused."""

    async def json_patch(self, ref: Ref, operations: Sequence[Obj]) -> Obj:
        """RFC 6902. Raises NotFound; Conflict when a `test` operation fails."""

    async def merge_patch(self, ref: Ref, patch: Obj, *, subresource: str | None = None) -> Obj:
        """RFC 7386; a resourceVersion or uid in the patch's metadata is a precondition. Raises NotFound, Conflict."""

    async def delete(self, ref: Ref, *, uid: str) -> None:
        """Deletes only the object of this UID, with its own grace period; one that is gone already is fine."""


class Cache(Protocol):
    """What an informer knows of one kind in one cluster."""

    @property
    def synced(self) -> bool:
        """Whether a complete list has been seen."""

    @property
    def unreachable_since(self) -> float | None:
        """Wall-clock time (seconds) of the last contact, when contact is lost; None while it holds."""

    def objects(self) -> Sequence[Obj]:
        """The objects as last seen, projected to what the operator reads."""


class World(Protocol):
    """All clusters as `reconcile` sees them."""

    @property
    def hub(self) -> Cluster: ...

    def member(self, name: str) -> Cluster | None:
        """The member's API server; None where its MemberCluster or its credentials can't be used."""

    def members(self) -> Sequence[Obj]:
        """The MemberCluster objects, as last seen."""

    def cache(self, member: str, kind: Kind) -> Cache | None:
        """The informer of POD (all namespaces, projected), NODE, NAMESPACE or CONFIG_MAP (our label only)."""

    def jobs(self) -> Sequence[Obj]:
        """The jobs on the hub, as last seen."""

    def now(self) -> float:
        """Wall-clock seconds."""

    @property
    def planning(self) -> asyncio.Lock:
        """Held while a plan is made and written, so that two jobs aren't promised the same GPUs."""
