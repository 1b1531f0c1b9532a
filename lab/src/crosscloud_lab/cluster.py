"""Brings one cluster up and tells how it does. Every step leaves alone what is right already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from crosscloud_lab import cgroups, components
from crosscloud_lab.api import Api, ApiRefused, node_ready
from crosscloud_lab.binaries import Binaries
from crosscloud_lab.errors import LabError
from crosscloud_lab.layout import ClusterFiles
from crosscloud_lab.pki import ensure_pki
from crosscloud_lab.plan import ClusterPlan, NodePlan
from crosscloud_lab.progress import Note
from crosscloud_lab.sandbox import Daemon, Sandbox, tail
from crosscloud_lab.waiting import wait_until

_MERGE_PATCH = "application/merge-patch+json"
_DNS_ROLE = "crosscloud:dns"


@dataclass(frozen=True)
class NodeStatus:
    name: str
    address: str
    ready: bool
    gpus: int
    gpu: str


@dataclass(frozen=True)
class ClusterStatus:
    """`down` lists the components that don't run."""

    name: str
    api: str
    ready: bool
    down: tuple[str, ...]
    nodes: tuple[NodeStatus, ...]


class Cluster:
    """One cluster: its plan, files and sandbox."""

    def __init__(
        self, plan: ClusterPlan, files: ClusterFiles, sandbox: Sandbox, binaries: Binaries, lab_cgroup: str
    ) -> None:
        self.plan = plan
        self.files = files
        self.sandbox = sandbox
        self._binaries = binaries
        self._lab_cgroup = lab_cgroup

    def prepare(self) -> None:
        """Keys, certificates and configuration files."""
        ensure_pki(self.files.pki, self.plan)
        components.write_control_plane_files(self.plan, self.files)
        for node in self.plan.nodes:
            components.write_node_files(self.plan, node, self.files, self._lab_cgroup)

    def up(self, busybox: Path, note: Note) -> None:
        """Starts what doesn't run and waits until everything is ready; the sandbox must be connected."""
        note("API server")
        for node in self.plan.nodes:
            self.sandbox.start(self.containerd(node))
        self.sandbox.start(self.etcd)
        self.sandbox.start(self.api_server)
        api = self.api()
        self._wait(self.api_server, api.ready)
        note("components")
        self._grant_dns(api)
        for daemon in (self.controller_manager, self.scheduler, self.proxy, self.dns):
            self.sandbox.start(daemon)
        note("nodes")
        started = {node.name: self._start_node(node, busybox) for node in self.plan.nodes}
        for node in self.plan.nodes:
            since = started[node.name]
            self._wait(self.kubelet(node), partial(self._node_ready, api, node, since))
            self._set_gpus(api, node)
        note("DNS")
        self._wait(self.dns, lambda: self._answers(components.COREDNS_READY_PORT, "/ready"))
        self._wait(self.proxy, lambda: self._answers(components.PROXY_HEALTH_PORT, "/healthz"))
        # Pods can't be created before the namespace's account and its authority exist.
        self._wait(self.controller_manager, lambda: self._default_account(api))

    @property
    def etcd(self) -> Daemon:
        return components.etcd(self.files, self._binaries)

    @property
    def api_server(self) -> Daemon:
        return components.api_server(self.plan, self.files, self._binaries)

    @property
    def controller_manager(self) -> Daemon:
        return components.controller_manager(self.files, self._binaries)

    @property
    def scheduler(self) -> Daemon:
        return components.scheduler(self.files, self._binaries)

    @property
    def proxy(self) -> Daemon:
        return components.proxy(self.files, self._binaries)

    @property
    def dns(self) -> Daemon:
        return components.dns(self.files, self._binaries)

    def kubelet(self, node: NodePlan) -> Daemon:
        return components.kubelet(self.plan, node, self.files, self._binaries)

    def containerd(self, node: NodePlan) -> Daemon:
        return components.containerd(node, self.files)

    def daemons(self) -> list[Daemon]:
        nodes = [daemon for node in self.plan.nodes for daemon in (self.containerd(node), self.kubelet(node))]
        return [
            self.etcd,
            self.api_server,
            self.controller_manager,
            self.scheduler,
            self.proxy,
            self.dns,
            *nodes,
        ]

    def api(self) -> Api:
        return Api(self.plan, self.files.pki)

    def ctr(self, node: NodePlan, *arguments: str | Path, timeout: float = 900) -> str:
        """Output of containerd's client on one node, in the namespace that the kubelet uses."""
        client = ["ctr", f"--address={components.containerd_socket(node)}", "--namespace=k8s.io"]
        return self.sandbox.run([*client, *arguments], timeout=timeout)

    def wait_containerd(self, node: NodePlan) -> None:
        self._wait(self.containerd(node), lambda: self._containerd_ready(node))

    def status(self) -> ClusterStatus:
        down = tuple(daemon.name for daemon in self.daemons() if not self.sandbox.alive(daemon))
        try:
            objects = self.api().nodes()
        except (LabError, OSError):
            objects = {}
        nodes = tuple(
            NodeStatus(
                name=node.name,
                address=str(node.address),
                ready=node_ready(objects.get(node.name, {})),
                gpus=_gpus(objects.get(node.name, {})),
                gpu=node.pool.gpu,
            )
            for node in self.plan.nodes
        )
        ready = not down and all(node.ready for node in nodes)
        return ClusterStatus(self.plan.name, self.plan.api_url, ready, down, nodes)

    def _start_node(self, node: NodePlan, busybox: Path) -> datetime | None:
        """Starts a node; the time from which on its kubelet must say that it is ready, if it was started."""
        self.wait_containerd(node)
        if components.SANDBOX_IMAGE not in self.ctr(node, "images", "list", "--quiet").split():
            self.ctr(node, "images", "import", busybox)
        cgroups.make(components.pods_cgroup(self._lab_cgroup, node))
        now = datetime.now(UTC)
        return now if self.sandbox.start(self.kubelet(node)) else None

    def _containerd_ready(self, node: NodePlan) -> bool:
        try:
            self.ctr(node, "version", timeout=10)
        except LabError:
            return False
        return True

    def _node_ready(self, api: Api, node: NodePlan, since: datetime | None) -> bool:
        try:
            return node_ready(api.json("GET", f"/api/v1/nodes/{node.name}"), since)
        except LabError:
            return False

    def _set_gpus(self, api: Api, node: NodePlan) -> None:
        count = str(node.pool.gpus)
        current = api.json("GET", f"/api/v1/nodes/{node.name}")["status"]
        if node.pool.gpus == 0 or all(
            current[key].get("nvidia.com/gpu") == count for key in ("capacity", "allocatable")
        ):
            return
        amount = {"nvidia.com/gpu": count}
        patch = {"status": {"capacity": amount, "allocatable": amount}}
        api.json("PATCH", f"/api/v1/nodes/{node.name}/status", patch, _MERGE_PATCH)

    def _grant_dns(self, api: Api) -> None:
        rules = [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ]
        base = "/apis/rbac.authorization.k8s.io/v1"
        api.create(f"{base}/clusterroles", {"metadata": {"name": _DNS_ROLE}, "rules": rules})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _DNS_ROLE}
        user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": _DNS_ROLE}
        binding = {"metadata": {"name": _DNS_ROLE}, "roleRef": role, "subjects": [user]}
        api.create(f"{base}/clusterrolebindings", binding)

    def _default_account(self, api: Api) -> bool:
        base = "/api/v1/namespaces/default"
        try:
            api.text("GET", f"{base}/serviceaccounts/default")
            api.text("GET", f"{base}/configmaps/kube-root-ca.crt")
        except ApiRefused as refused:
            if refused.code == 404:
                return False
            raise
        return True

    def _answers(self, port: int, path: str) -> bool:
        """Whether a component on the first node's address answers 200."""
        try:
            urlopen(f"http://{self.plan.api_address}:{port}{path}", timeout=5).close()
        except (URLError, OSError):
            return False
        return True

    def _wait(self, daemon: Daemon, ready: Callable[[], bool]) -> None:
        wait_until(
            ready,
            f"{daemon.name} of cluster {self.plan.name}",
            lambda: tail(self.sandbox.log(daemon)),
            alive=lambda: self.sandbox.alive(daemon),
        )


def _gpus(node: Any) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", "0"))
