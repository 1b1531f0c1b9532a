"""A world at work on a hub's API server, and what its members hold."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from apiserver import ApiServer
from waiting import until

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import MEMBER
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.informer import Times
from crosscloud_operator.kube.world import KubeWorld

OPERATOR = "crosscloud-system"
TIMES = Times(first_pause=0.05, last_pause=0.5, grace=0.1)
HUB_ID = "hub-of-the-tests"


class Running:
    """A world at work, the jobs that it woke, and the hub's administrator."""

    def __init__(self, hub_api: ApiServer, world: KubeWorld, woken: list[tuple[str, str]]) -> None:
        self.api = hub_api
        self.world = world
        self.woken = woken

    def add(self, name: str, kubeconfig: str | None) -> None:
        """A MemberCluster, and its Secret where a kubeconfig is given."""
        if kubeconfig is not None:
            self.store(name, kubeconfig)
        spec = {"access": {"kubeconfigSecret": {"name": f"member-{name}"}}}
        body = {"apiVersion": MEMBER.api_version, "kind": MEMBER.kind, "metadata": {"name": name}, "spec": spec}
        self.api.request("POST", "/apis/crosscloud.dev/v1alpha1/memberclusters", body)

    def store(self, name: str, kubeconfig: str) -> None:
        data = {"kubeconfig": base64.b64encode(kubeconfig.encode()).decode()}
        path, meta = f"/api/v1/namespaces/{OPERATOR}/secrets", {"name": f"member-{name}"}
        status, _ = self.api.raw("POST", path, {"metadata": meta, "data": data})
        if status == 409:
            patch = "application/merge-patch+json"
            self.api.request("PATCH", f"{path}/member-{name}", {"data": data}, patch)

    def stored(self, name: str) -> str:
        found = self.api.request("GET", f"/api/v1/namespaces/{OPERATOR}/secrets/member-{name}")
        return base64.b64decode(found["data"]["kubeconfig"]).decode()

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.request("GET", f"/apis/crosscloud.dev/v1alpha1/memberclusters/{name}")
        return found.get("status") or {}

    def condition(self, name: str, kind: str = "Ready") -> tuple[str, str, str]:
        """(status, reason, message); empty texts where there is none yet."""
        for item in self.status(name).get("conditions", ()):
            if item["type"] == kind:
                return item["status"], item["reason"], item["message"]
        return "", "", ""

    async def ready(self, name: str) -> None:
        await until(lambda: self.condition(name)[0] == "True")


@contextlib.asynccontextmanager
async def running(hub: HttpCluster, hub_api: ApiServer, **options: Any) -> AsyncIterator[Running]:
    woken: list[tuple[str, str]] = []
    world = KubeWorld(
        hub,
        hub_id=HUB_ID,
        namespace=OPERATOR,
        token_seconds=600,
        wake=lambda namespace, name: woken.append((namespace, name)),
        times=TIMES,
        **options,
    )
    task = asyncio.create_task(world.run())
    try:
        await asyncio.wait_for(world.wait_synced(), 30)
        yield Running(hub_api, world, woken)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def node(api: ApiServer, name: str, gpus: int, product: str = "NVIDIA-A100-SXM4-80GB") -> None:
    amount = {"nvidia.com/gpu": str(gpus), "cpu": "8", "memory": "32Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True"}
    status = {"capacity": amount, "allocatable": amount, "conditions": [ready]}
    meta = {"name": name, "labels": {"nvidia.com/gpu.product": product}}
    api.request("POST", "/api/v1/nodes", {"metadata": meta, "spec": {}, "status": status})


def pod(api: ApiServer, namespace: str, name: str, node_name: str, gpus: int = 0, **labels: str) -> None:
    amount = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container = {"name": "c", "image": "i", "resources": {"limits": amount, "requests": amount}}
    meta = {"name": name, "labels": labels}
    body = {"metadata": meta, "spec": {"nodeName": node_name, "containers": [container]}}
    api.request("POST", f"/api/v1/namespaces/{namespace}/pods", body)


def account(api: ApiServer, namespace: str, name: str) -> Access:
    """A service account that may read everything and renew its token, and a token for it of ten minutes."""
    path, full = f"/api/v1/namespaces/{namespace}/serviceaccounts", f"{namespace}-{name}"
    api.request("POST", path, {"metadata": {"name": name}})
    rules = [
        {"apiGroups": [""], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["serviceaccounts/token"], "resourceNames": [name], "verbs": ["create"]},
    ]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    api.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": full}, "rules": rules})
    subjects = [{"kind": "ServiceAccount", "namespace": namespace, "name": name}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": full}
    body = {"metadata": {"name": full}, "subjects": subjects, "roleRef": role}
    api.request("POST", f"{rbac}/clusterrolebindings", body)
    return Access(api.url, ca=api.ca, token=token(api, namespace, name))


def token(api: ApiServer, namespace: str, account_name: str) -> str:
    """A token of ten minutes, the shortest that there is; each is another text."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    granted = api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account_name}/token", body)
    return str(granted["status"]["token"])
