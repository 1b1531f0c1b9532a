"""What the operator may do, in a hub and in a member: one table, from which `crosscloud member add` makes the member's
ClusterRole and against which the chart's roles are tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Right:
    """Verbs on resources of an API group, and what for."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str

    def rule(self) -> dict[str, Any]:
        """The same as a rule of a Role or ClusterRole."""
        return {"apiGroups": [self.group], "resources": list(self.resources), "verbs": list(self.verbs)}


# In the whole member: what planning and the informers read.
MEMBER_VIEW_RIGHTS: tuple[Right, ...] = (
    Right("", ("nodes", "namespaces"), ("get", "list", "watch"), "plan: GPUs, labels, allowed namespaces"),
    Right("", ("pods",), ("get", "list", "watch"), "what others use; what became of ours"),
    Right("", ("configmaps",), ("get", "list", "watch"), "reports (only those with our label are asked for)"),
)

# In the namespaces that jobs may use, and in no other.
MEMBER_RUN_RIGHTS: tuple[Right, ...] = (
    Right("", ("pods",), ("get", "list", "create", "patch", "delete"), "run jobs; lift the gates"),
    Right("", ("configmaps",), ("get", "list", "create", "patch", "delete"), "anchor, documents, reports"),
    Right("", ("secrets",), ("get", "create", "patch", "delete"), "keys of the job's pods, storage credentials"),
    Right("", ("services", "serviceaccounts"), ("get", "create"), "addresses; who writes reports"),
    Right("apps", ("deployments",), ("get", "list", "create", "delete"), "the job's gateway"),
    Right("networking.k8s.io", ("networkpolicies",), ("get", "create"), "only the job's own pods reach its pods"),
    Right("rbac.authorization.k8s.io", ("roles", "rolebindings"), ("get", "create"), "a pod may write its own report"),
)

HUB_RIGHTS: tuple[Right, ...] = (
    Right("crosscloud.dev", ("crosscloudtrainingjobs",), ("get", "list", "watch", "patch"), "jobs, their finalizer"),
    Right("crosscloud.dev", ("crosscloudtrainingjobs/status",), ("patch",), "what became of them"),
    Right("crosscloud.dev", ("memberclusters",), ("get", "list", "watch"), "members"),
    Right("crosscloud.dev", ("memberclusters/status",), ("patch",), "what they have"),
    Right("", ("secrets",), ("get",), "a job's storage credentials, by name, from its namespace"),
    Right("", ("events",), ("create", "get", "patch"), "tell users what happened, and how often"),
    Right("", ("namespaces",), ("get",), "the hub's id is the UID of kube-system"),
)

# In the operator's own namespace on the hub.
HUB_NAMESPACE_RIGHTS: tuple[Right, ...] = (
    Right("", ("secrets",), ("get", "list", "watch", "create", "patch", "delete"), "members' kubeconfigs, job CAs"),
    Right("coordination.k8s.io", ("leases",), ("get", "create", "patch"), "one operator at a time"),
)
