"""Small pods for tests of the lab."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from waiting import eventually

from crosscloud_lab.components import SANDBOX_IMAGE
from crosscloud_lab.lab import Lab


def pod(name: str, script: str, *, node: str | None = None, gpus: int = 0, **spec: Any) -> dict[str, Any]:
    """A pod that runs a shell script in busybox."""
    container: dict[str, Any] = {"name": "main", "image": SANDBOX_IMAGE, "command": ["sh", "-c", script]}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    placed = {"nodeName": node} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **placed, **spec},
    }


def service(name: str, app: str, port: int, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": [{"port": port, **spec.pop("ports", {})}], **spec},
    }


class Bench:
    """A namespace of its own in some clusters."""

    _numbers = count(1)

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        # Namespaces vanish slowly, so each bench has a new one.
        self.namespace = f"bench-{next(self._numbers)}"

    def kubectl(self, cluster: str, *arguments: str, stdin: str | None = None) -> str:
        return self.lab.kubectl(cluster, "--namespace", self.namespace, *arguments, stdin=stdin)

    def create(self, cluster: str, *objects: dict[str, Any]) -> None:
        """Applies objects and waits until the pods among them are ready."""
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        self.lab.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(namespace))
        self._await_account(cluster)
        self.kubectl(
            cluster, "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )
        for item in objects:
            if item["kind"] == "Pod":
                self.kubectl(
                    cluster, "wait", "--for=condition=Ready", f"pod/{item['metadata']['name']}", "--timeout=90s"
                )

    def sh(self, cluster: str, name: str, script: str) -> str:
        """Output of a shell script in a pod."""
        return self.kubectl(cluster, "exec", name, "--", "sh", "-c", script)

    def address(self, cluster: str, name: str) -> str:
        return self.kubectl(cluster, "get", "pod", name, "-o", "jsonpath={.status.podIP}")

    def node_port(self, cluster: str, name: str) -> int:
        return int(self.kubectl(cluster, "get", "service", name, "-o", "jsonpath={.spec.ports[0].nodePort}"))

    def remove(self) -> None:
        for cluster in self.lab.spec.cluster_names():
            self.lab.kubectl(cluster, "delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")

    def _await_account(self, cluster: str) -> None:
        def there() -> str:
            return self.kubectl(cluster, "get", "serviceaccounts", "default", "--ignore-not-found", "-o", "name")

        eventually(there, "the namespace's default account")
