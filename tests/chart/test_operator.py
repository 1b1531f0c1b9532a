"""The real operator, with no more rights than the chart gives it, runs a job on a hub that is its own member."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import JOBS, MEMBERS, job, member, minimal_spec
from helmchart import NAMESPACE, only, rendered

GPU = "NVIDIA-L4"
SECONDS = 90.0


@dataclass
class Operator:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())


def wait_for(what: Callable[[], Any], log: Path) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
    return found


def kubeconfig(hub: ApiServer, token: str) -> str:
    """The hub by the token of the chart's service account."""
    found = json.loads(hub.kubeconfig.read_text())
    found["users"][0]["user"] = {"token": token}
    return json.dumps(found)


def node(name: str) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": GPU}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def add_gpu_node(hub: ApiServer, name: str, gpus: int) -> None:
    hub.request("POST", "/api/v1/nodes", node(name))
    resources = {"cpu": "8", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    status = {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}],
    }
    hub.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, "application/merge-patch+json")
    # No kubelet is here to take off the taint that a new node has.
    hub.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, "application/merge-patch+json")


@pytest.fixture
def operator(hub: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/crosscloud/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    (tmp_path / "kubeconfig").write_text(kubeconfig(hub, hub.request("POST", path, request)["status"]["token"]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (container,) = only(rendered(), "Deployment")["spec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    environment |= {"CROSSCLOUD_NAMESPACE": NAMESPACE, "CROSSCLOUD_HTTP_PORT": str(port)}
    environment |= {"CROSSCLOUD_HTTP_HOST": "127.0.0.1", "KUBECONFIG": str(tmp_path / "kubeconfig")}
    log = tmp_path / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "crosscloud_operator"]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Operator(process, port, log)
        finally:
            process.terminate()
            process.wait(30)


def test_the_charts_rights_are_enough_to_run_and_to_clean_up_a_job(hub: ApiServer, operator: Operator) -> None:
    add_gpu_node(hub, "gpu-1", 2)
    spec = {"access": {"inCluster": {}}, "allowedNamespaces": {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}}
    hub.request("POST", MEMBERS, member(spec, "hub"))
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s3"},
        "stringData": {"AWS_ACCESS_KEY_ID": "a"},
    }
    hub.request("POST", "/api/v1/namespaces/ml/secrets", secret)
    storage = {"uri": "s3://models/a", "secretName": "s3"}
    hub.request("POST", JOBS, job({**minimal_spec(), "replicas": 2, "storage": storage}, "placed"))

    def pods() -> list[dict[str, Any]]:
        found = hub.request("GET", "/api/v1/namespaces/ml/pods?labelSelector=crosscloud.dev/job=placed")["items"]
        return [pod for pod in found if not pod["spec"].get("schedulingGates")]

    wait_for(lambda: len(pods()) == 2, operator.log)  # every object was accepted and the gates are lifted
    status = hub.request("GET", f"{JOBS}/placed")["status"]
    assert {stage["member"] for stage in status["plan"]} == {"hub"}
    wait_for(lambda: hub.request("GET", f"{MEMBERS}/hub").get("status", {}).get("gpus") == 2, operator.log)
    exported = operator.metrics()
    assert 'crosscloud_job_info{job="placed",namespace="ml"' in exported
    assert 'crosscloud_member_reachable{member="hub"} 1.0' in exported

    hub.request("DELETE", f"{JOBS}/placed")

    def gone() -> bool:
        for pod in pods():  # no kubelet is here to end them
            url = f"/api/v1/namespaces/ml/pods/{pod['metadata']['name']}"
            hub.raw("DELETE", url, {"gracePeriodSeconds": 0})
        return hub.raw("GET", f"{JOBS}/placed")[0] == 404

    wait_for(gone, operator.log)
    wait_for(lambda: 'job="placed"' not in operator.metrics(), operator.log)
    assert "orbidden" not in operator.log.read_text()
    assert operator.process.poll() is None
