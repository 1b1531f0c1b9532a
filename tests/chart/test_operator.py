"""The real operator, with no more rights than the chart gives it, runs a job on a hub that is its own member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import JOBS, MEMBERS, job, member, minimal_spec
from helmchart import operator_of_the_chart
from operatorprocess import Operator
from waiting import wait_until

GPU = "NVIDIA-L4"
SECONDS = 90.0


def wait_for(what: Callable[[], object], operator: Operator) -> None:
    """What the operator logged explains a failure."""
    try:
        wait_until(what, SECONDS)
    except AssertionError as fault:
        raise AssertionError(f"{fault}; {operator.log.read_text()[-4000:]}") from None


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
    with operator_of_the_chart(hub, tmp_path, "operator") as found:
        yield found


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

    wait_for(lambda: len(pods()) == 2, operator)  # every object was accepted and the gates are lifted
    status = hub.request("GET", f"{JOBS}/placed")["status"]
    assert {stage["member"] for stage in status["plan"]} == {"hub"}
    wait_for(lambda: hub.request("GET", f"{MEMBERS}/hub").get("status", {}).get("gpus") == 2, operator)
    exported = operator.get("/metrics")[1]
    assert 'crosscloud_job_info{job="placed",namespace="ml"' in exported
    assert 'crosscloud_member_reachable{member="hub"} 1.0' in exported

    hub.request("DELETE", f"{JOBS}/placed")

    def gone() -> bool:
        for pod in pods():  # no kubelet is here to end them
            url = f"/api/v1/namespaces/ml/pods/{pod['metadata']['name']}"
            hub.raw("DELETE", url, {"gracePeriodSeconds": 0})
        return hub.raw("GET", f"{JOBS}/placed")[0] == 404

    wait_for(gone, operator)
    wait_for(lambda: 'job="placed"' not in operator.get("/metrics")[1], operator)
    assert "orbidden" not in operator.log.read_text()
    assert operator.process.poll() is None
