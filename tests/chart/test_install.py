"""`helm install` on a real API server: all that a hub needs is there, with the rights that the operator uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer, api_server
from crdfiles import EVERY_EXAMPLE, EXAMPLES, JOBS, example_name, load_yaml
from helmchart import CHART, NAMESPACE, HelmFailed, account_token, as_sets, helm, only, rendered

PATCH = "application/json-patch+json"
CHECK = CHART / "files" / "check_rights.py"
POLICY_SECONDS = 60.0


def account_files(hub: ApiServer, folder: Path) -> Path:
    """What the operator's pod finds of its service account."""
    (folder / "token").write_text(account_token(hub))
    (folder / "ca.crt").write_text(hub.ca)
    return folder


def check_rights(hub: ApiServer, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(hub.port)}
    command = [sys.executable, str(CHECK), f"--namespace={NAMESPACE}", f"--account={folder}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_operators_account_has_every_right_that_its_code_uses(hub: ApiServer, tmp_path: Path) -> None:
    done = check_rights(hub, account_files(hub, tmp_path), "--member", "--member-namespace=ml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSING" not in done.stdout
    assert "ok      patch crosscloudtrainingjobs/status in all namespaces" in done.stdout
    assert "ok      create pods in namespace ml" in done.stdout


def test_a_right_that_is_missing_is_named(hub: ApiServer, tmp_path: Path) -> None:
    done = check_rights(hub, account_files(hub, tmp_path), "--member", "--member-namespace=default")
    assert done.returncode == 1
    assert "MISSING create pods in namespace default" in done.stdout


def test_the_test_pod_asks_for_the_namespaces_of_the_values() -> None:
    pod = only(rendered("hubIsMember.enabled=true", "hubIsMember.namespaces={ml}"), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["containers"][0]["args"] == [f"--namespace={NAMESPACE}", "--member", "--member-namespace=ml"]
    script = only(rendered(), "ConfigMap", "-test-rights")["data"]["check_rights.py"]
    assert script.strip() == CHECK.read_text().strip()


def test_the_pods_pass_the_strictest_pod_security(hub: ApiServer) -> None:
    objects = rendered()
    template = only(objects, "Deployment")["spec"]["template"]
    operator = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": template["spec"]}
    for pod in (operator, only(objects, "Pod")):
        status, answer = hub.raw("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)
        assert status == 201, answer


def test_the_api_server_takes_what_every_value_brings(hub: ApiServer) -> None:
    settings = (
        "operator.priorityClassName=system-cluster-critical",
        "operator.nodeSelector.disk=ssd",
        "operator.tolerations[0].operator=Exists",
        "operator.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution=null",
        "operator.podLabels.team=a",
        "operator.podAnnotations.note=b",
        "imagePullSecrets[0].name=registry",
        "serviceAccount.annotations.role=c",
        "rbac.storageNamespaces={ml}",
        "metrics.service.annotations.scrape=yes",
        "metrics.dashboard.annotations.folder=d",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=e",
        "networkPolicy.egress[0].ports[0].port=443",
        "networkPolicy.egress[0].ports[0].protocol=TCP",
    )
    objects = {"apiVersion": "v1", "kind": "List", "items": rendered(*settings)}
    apply = ("apply", "--dry-run=server", "--validate=strict", "--server-side", "--force-conflicts", "-f", "-")
    hub.kubectl(*apply, stdin=json.dumps(objects))


@pytest.mark.parametrize("example", EVERY_EXAMPLE, ids=example_name)
def test_the_examples_can_be_applied(hub: ApiServer, example: Path) -> None:
    hub.kubectl("apply", "--dry-run=server", "-f", str(example))


def refused_in_time(hub: ApiServer, name: str, operations: list[dict[str, Any]]) -> str:
    """The API server's words once it refuses the patch; a new policy takes a moment to be in force."""
    deadline = time.monotonic() + POLICY_SECONDS
    while True:
        status, answer = hub.raw("PATCH", f"{JOBS}/{name}?dryRun=All", operations, PATCH)
        if status == 422:
            return str(answer["message"])
        assert time.monotonic() < deadline, (status, answer)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (
            {
                "op": "move",
                "from": "/spec/training/model/config/hidden_size",
                "path": "/spec/training/model/config/hidden",
            },
            "spec.training.model.config",
        ),
        (
            {"op": "move", "from": "/spec/podTemplate/metadata", "path": "/spec/podTemplate/metadatas"},
            "spec.podTemplate",
        ),
    ],
    ids=["in the model's config", "in the pod template"],
)
def test_a_renamed_key_is_an_edit_and_refused(hub: ApiServer, operation: dict[str, Any], field: str) -> None:
    job = load_yaml((EXAMPLES / "job-full.yaml").read_text())
    job["metadata"]["name"] = "renamed"
    status, answer = hub.raw("POST", JOBS, job)
    assert status in (201, 409), answer
    assert field in refused_in_time(hub, "renamed", [operation])


@pytest.mark.parametrize("kind", ["training", "script"])
def test_status_and_finalizers_can_be_written_beside_the_policy(hub: ApiServer, kind: str) -> None:
    job = load_yaml((EXAMPLES / "job-full.yaml").read_text())
    if kind == "script":
        job["spec"] = {"script": {"file": "/app/train.py"}, "storage": job["spec"]["storage"]}
    job["metadata"] |= {"name": "finished"}
    hub.request("POST", JOBS, job)
    finalizers = {"op": "add", "path": "/metadata/finalizers", "value": ["crosscloud.dev/cleanup"]}
    hub.request("PATCH", f"{JOBS}/finished", [finalizers], PATCH)
    hub.request("PATCH", f"{JOBS}/finished/status", [{"op": "add", "path": "/status", "value": {"restarts": 1}}], PATCH)
    hub.request("DELETE", f"{JOBS}/finished")
    hub.request("PATCH", f"{JOBS}/finished", [{"op": "remove", "path": "/metadata/finalizers"}], PATCH)
    assert hub.raw("GET", f"{JOBS}/finished")[0] == 404


def test_uninstalling_keeps_jobs_and_installing_again_takes_them_over() -> None:
    with api_server("again") as hub:
        hub.namespace("ml")
        install = ("install", "crosscloud", str(CHART), "--namespace", NAMESPACE, "--create-namespace")
        helm(*install, kubeconfig=hub.kubeconfig)
        hub.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        hub.kubectl("apply", "-f", str(EXAMPLES / "job.yaml"))
        helm("uninstall", "crosscloud", "--namespace", NAMESPACE, kubeconfig=hub.kubeconfig)
        assert (
            json.loads(hub.kubectl("get", "deployments,clusterroles", "-A", "-o", "json", "-l", "helm.sh/chart"))[
                "items"
            ]
            == []
        )
        assert hub.kubectl("get", "cctj", "-n", "ml", "-o", "name").strip().endswith("/tiny-llama")
        helm(*install, kubeconfig=hub.kubeconfig)
        upgrade = (
            "upgrade",
            "crosscloud",
            str(CHART),
            "--namespace",
            NAMESPACE,
            *as_sets(("operator.logLevel=DEBUG",)),
        )
        helm(*upgrade, kubeconfig=hub.kubeconfig)
        assert hub.kubectl("get", "cctj", "-n", "ml", "-o", "name").strip().endswith("/tiny-llama")


def test_an_older_hub_is_refused_with_the_version_that_it_needs() -> None:
    with pytest.raises(HelmFailed, match=r"requires kubeVersion: >=1\.30"):
        helm("template", "crosscloud", str(CHART), "--kube-version", "v1.29.0")
