"""Uninstalling on two real API servers: in the documented order nothing hangs, and in a wrong one the way out works.

No controller runs here, so the last step of the order, deleting the operator's namespace, is judged by what is in it:
a namespace goes when nothing in it has a finalizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer, api_server
from click.testing import CliRunner
from crdfiles import EXAMPLES, JOBS
from helmchart import CHART, NAMESPACE, helm, operator_of_the_chart
from waiting import wait_until

from crosscloud_operator.cli.main import main

from .test_operator import add_gpu_node

INSTALL = ("install", "crosscloud", str(CHART), "--namespace", NAMESPACE, "--create-namespace")
JOB = f"{JOBS}/tiny-llama"
ANCHOR = "/api/v1/namespaces/ml/configmaps/tiny-llama-anchor"
SECONDS = 90


@pytest.fixture
def east() -> Iterator[ApiServer]:
    with api_server("east") as server:
        yield server


@pytest.fixture
def bare_hub() -> Iterator[ApiServer]:
    with api_server("bare-hub") as server:
        server.namespace("ml")
        yield server


def install(hub: ApiServer) -> None:
    helm(*INSTALL, kubeconfig=hub.kubeconfig)
    hub.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")


def crosscloud(hub: ApiServer, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["--kubeconfig", str(hub.kubeconfig), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def add_east(hub: ApiServer, east: ApiServer) -> None:
    crosscloud(hub, "member", "add", "east", "--kubeconfig", str(east.kubeconfig), "--allow-namespace", "ml")


def begin(hub: ApiServer, east: ApiServer) -> None:
    """A job that has objects in the member, and so our finalizer."""
    job = json.loads(hub.kubectl("create", "--dry-run=client", "-o", "json", "-f", str(EXAMPLES / "job.yaml")))
    job["spec"] |= {"replicas": 1, "replica": {"gpusPerStage": 1}, "storage": {"uri": "s3://models/a"}}
    hub.request("POST", JOBS, job)
    wait_until(lambda: east.raw("GET", ANCHOR)[0] == 200, SECONDS)
    assert hub.request("GET", JOB)["metadata"]["finalizers"] == ["crosscloud.dev/cleanup"]


def with_finalizers(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    kinds = "pods,services,deployments,configmaps,secrets,serviceaccounts,leases,roles,rolebindings,networkpolicies"
    found = json.loads(server.kubectl("get", kinds, "-n", namespace, "-o", "json"))["items"]
    return [item for item in found if item["metadata"].get("finalizers")]


def test_in_the_documented_order_nothing_hangs(bare_hub: ApiServer, east: ApiServer, tmp_path: Path) -> None:
    add_gpu_node(east, "gpu-1", 2)
    install(bare_hub)
    with operator_of_the_chart(bare_hub, tmp_path, "first"):
        add_east(bare_hub, east)
        begin(bare_hub, east)
        # 1. jobs, while the operator runs
        bare_hub.kubectl("delete", "cctj", "--all", "--all-namespaces", "--timeout=50s")
        assert east.raw("GET", ANCHOR)[0] == 404
        # 2. members
        crosscloud(bare_hub, "member", "remove", "east", "--kubeconfig", str(east.kubeconfig))
    # 3. the operator
    helm("uninstall", "crosscloud", "--namespace", NAMESPACE, kubeconfig=bare_hub.kubeconfig)
    # 4. the kinds
    crds = ("crosscloudtrainingjobs.crosscloud.dev", "memberclusters.crosscloud.dev")
    bare_hub.kubectl("delete", "crd", *crds, "--timeout=50s")
    assert with_finalizers(bare_hub, NAMESPACE) == []
    left = bare_hub.kubectl("get", "secrets,deployments,clusterroles,clusterrolebindings", "-A", "-o", "name")
    assert "crosscloud" not in left
    assert "crosscloud" not in east.kubectl("get", "clusterroles,clusterrolebindings,rolebindings", "-A", "-o", "name")


def test_a_job_that_hangs_since_the_operator_was_removed_first_is_freed_by_installing_again(
    bare_hub: ApiServer, east: ApiServer, tmp_path: Path
) -> None:
    add_gpu_node(east, "gpu-1", 2)
    install(bare_hub)
    with operator_of_the_chart(bare_hub, tmp_path, "first"):
        add_east(bare_hub, east)
        begin(bare_hub, east)
    helm("uninstall", "crosscloud", "--namespace", NAMESPACE, kubeconfig=bare_hub.kubeconfig)
    # With its namespace the members' Secrets went too.
    bare_hub.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/secrets/member-east")
    bare_hub.kubectl("delete", "cctj", "--all", "--all-namespaces", "--wait=false")
    assert bare_hub.request("GET", JOB)["metadata"]["deletionTimestamp"]

    install(bare_hub)
    with operator_of_the_chart(bare_hub, tmp_path, "second"):
        add_east(bare_hub, east)
        wait_until(lambda: bare_hub.raw("GET", JOB)[0] == 404, SECONDS)
    assert east.raw("GET", ANCHOR)[0] == 404
