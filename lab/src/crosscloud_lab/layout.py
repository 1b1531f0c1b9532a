"""Where one cluster's files lie in the lab's state folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crosscloud_lab.plan import NodePlan


@dataclass(frozen=True)
class ClusterFiles:
    root: Path

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.root / "admin.kubeconfig"

    def kubeconfig(self, user: str) -> Path:
        return self.config / f"{user}.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.root / "logs" / "audit.log"

    def node(self, node: NodePlan) -> Path:
        return self.root / "nodes" / node.name

    def containerd_root(self, node: NodePlan) -> Path:
        return self.node(node) / "containerd"
