"""A job's life on two real API servers, the operator a process with the rights of the table and no others.

The hub is the member `west` too. No kubelet, scheduler or controller runs: the tests do what those would do.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from click.testing import CliRunner
from operatorprocess import NAMESPACE, operator_process
from waiting import wait_until

from crosscloud_operator.cli.main import main
from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.kubeconfig import render
from crosscloud_operator.kube.rights import HUB_NAMESPACE_RIGHTS, HUB_RIGHTS

JOBS = "/apis/crosscloud.dev/v1alpha1/namespaces/train/crosscloudtrainingjobs"
PODS = "/api/v1/namespaces/train/pods"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
MERGE = "application/merge-patch+json"
OF_JOBS = "labelSelector=crosscloud.dev/job-uid"
TO_ACCOUNT = [{"kind": "ServiceAccount", "namespace": NAMESPACE, "name": "hub-operator"}]


@pytest.fixture(scope="module")
def narrow(hub_api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig of the hub with the operator's rights there, as the chart gives them."""
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    hub_api.request("POST", accounts, {"metadata": {"name": "hub-operator"}})
    group = "rbac.authorization.k8s.io"
    for kind, at, rights in (
        ("ClusterRole", RBAC, HUB_RIGHTS),
        ("Role", f"{RBAC}/namespaces/{NAMESPACE}", HUB_NAMESPACE_RIGHTS),
    ):
        meta = {"name": "hub-operator"}
        hub_api.request("POST", f"{at}/{kind.lower()}s", {"metadata": meta, "rules": [item.rule() for item in rights]})
        role = {"apiGroup": group, "kind": kind, "name": "hub-operator"}
        binding = {"metadata": meta, "roleRef": role, "subjects": TO_ACCOUNT}
        hub_api.request("POST", f"{at}/{kind.lower()}bindings", binding)
    token = hub_api.request("POST", f"{accounts}/hub-operator/token", {"spec": {}})["status"]["token"]
    path = tmp_path_factory.mktemp("hub") / "kubeconfig"
    path.write_text(render(Access(hub_api.url, ca=hub_api.ca), "hub", token))
    return path


class Players:
    """Scheduler and kubelet of the members, at work in a thread until `stop`."""

    def __init__(self, *servers: ApiServer) -> None:
        self._servers = servers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()
        self.faults: list[Exception] = []

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self.faults == []

    def _play(self) -> None:
        try:
            while not self._stop.wait(0.1):
                for server in self._servers:
                    for pod in server.request("GET", PODS)["items"]:
                        self._move(server, pod)
        except (AssertionError, OSError, KeyError, ValueError) as fault:  # the test's own thread shows it
            self.faults.append(fault)

    def _move(self, server: ApiServer, pod: dict[str, Any]) -> None:
        path = f"{PODS}/{pod['metadata']['name']}"
        if pod["metadata"].get("deletionTimestamp"):
            force = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
            server.raw("DELETE", path, force)
        elif pod["spec"].get("schedulingGates"):
            return
        elif not pod["spec"].get("nodeName"):
            required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            (node,) = required["nodeSelectorTerms"][0]["matchFields"][0]["values"]
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            meta = {"name": pod["metadata"]["name"]}
            server.raw(
                "POST", f"{path}/binding", {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
            )
        elif pod["status"]["phase"] == "Pending":
            set_state(server, pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})


def set_state(server: ApiServer, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
    """What a kubelet writes."""
    container = {"name": "trainer", "state": state, "ready": False, "restartCount": 0, "image": "i", "imageID": "i"}
    status = {"status": {"phase": phase, "containerStatuses": [container]}}
    server.raw("PATCH", f"{PODS}/{pod['metadata']['name']}/status", status, MERGE)


def pods(*servers: ApiServer) -> list[tuple[ApiServer, dict[str, Any]]]:
    return [(server, pod) for server in servers for pod in server.request("GET", PODS)["items"]]


def reporter(pod: dict[str, Any]) -> str | None:
    """Name of the report that the pod writes, if it is the one that writes it."""
    found = [item["value"] for item in pod["spec"]["containers"][0]["env"] if item["name"] == "CROSSCLOUD_REPORT"]
    return found[0].removeprefix("configmap:train/") if found else None


def write_report(
    server: ApiServer, pod: dict[str, Any], sequence: int, outcome: str | None = None, *, waits: bool = False
) -> None:
    """As the pod itself: with a token of its service account, on its own report."""
    name = reporter(pod)
    assert name is not None
    labels = pod["metadata"]["labels"]
    progress = {"step": 5 * sequence, "totalSteps": 10, "round": 1, "tokens": 1000, "loss": 2.5, "wanBytesSent": 4096}
    document: dict[str, Any] = {
        "apiVersion": "report.crosscloud.dev/v1",
        "attempt": int(labels["crosscloud.dev/attempt"]),
        "home": 1,
        "term": 1,
        "view": 1,
        "replica": int(labels["crosscloud.dev/replica"]),
        "incarnation": int(labels["crosscloud.dev/incarnation"]),
        "sequence": sequence,
        "time": "2026-01-01T00:00:00Z",
        "activity": "Ended" if outcome else "Waiting" if waits else "Training",
        "progress": progress,
    }
    if waits:
        progress |= {"waitingFor": [1 - document["replica"]], "waitingSince": "2026-01-01T00:00:00Z"}
    if outcome:
        uri = "s3://models/x/result"
        document["completion"] = {"outcome": outcome, "exitCode": 0, "message": "done", "resultUri": uri}
    account = pod["spec"]["serviceAccountName"]
    path = f"/api/v1/namespaces/train/serviceaccounts/{account}/token"
    token = server.request("POST", path, {"spec": {}})["status"]["token"]
    patch = json.dumps({"data": {"report.json": json.dumps(document)}})
    kubectl = (f"--token={token}", "-n", "train", "patch", "configmap")
    as_pod(server, *kubectl, name, "--type=merge", "-p", patch)
    refused = as_pod(server, *kubectl, "kube-root-ca.crt", "--type=merge", "-p", patch, check=False)
    assert "forbidden" in refused.lower()


def as_pod(server: ApiServer, *arguments: str, check: bool = True) -> str:
    """kubectl with a token alone, without the administrator's certificate."""
    document = json.loads(server.kubeconfig.read_text())
    document["users"][0]["user"] = {}
    path = server.folder / "tokenless.kubeconfig"
    path.write_text(json.dumps(document))
    return server.kubectl("--kubeconfig", str(path), *arguments, check=check)


@pytest.fixture
def members(hub_api: ApiServer, east_api: ApiServer) -> Iterator[None]:
    """East with 4 GPUs on one node, west with 2 on each of two."""
    for server, nodes in ((east_api, {"e1": 4}), (hub_api, {"w1": 2, "w2": 2})):
        server.namespace("train")
        server.raw("POST", "/api/v1/namespaces/train/configmaps", {"metadata": {"name": "kube-root-ca.crt"}})
        for name, gpus in nodes.items():
            amount = {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"}
            address = {"type": "InternalIP", "address": "127.0.0.1"}
            ready = [{"type": "Ready", "status": "True"}]
            status = {"capacity": amount, "allocatable": amount, "conditions": ready, "addresses": [address]}
            server.raw("POST", "/api/v1/nodes", {"metadata": {"name": name}, "status": status})
            # Admission taints a new node as not ready; the node controller would take that back.
            server.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, MERGE)
    yield
    for server in (hub_api, east_api):
        server.request("DELETE", "/api/v1/nodes")
    hub_api.request("DELETE", "/apis/crosscloud.dev/v1alpha1/memberclusters")


def crosscloud(hub_api: ApiServer, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["--kubeconfig", str(hub_api.kubeconfig), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def add_members(hub_api: ApiServer, east_api: ApiServer) -> None:
    """Both by the command line; returns when the operator has found them ready."""
    for name, server in (("east", east_api), ("west", hub_api)):
        add = ("member", "add", name, "--kubeconfig", str(server.kubeconfig), "--allow-namespace", "train")
        assert f"{name} is Ready" in crosscloud(hub_api, *add)


def submit(hub_api: ApiServer, name: str, finalizers: list[str] | None = None) -> None:
    hub_api.raw("POST", "/api/v1/namespaces/train/secrets", {"metadata": {"name": "s3"}, "stringData": {"AWS_X": "y"}})
    training = {"model": {"preset": "tiny-llama"}, "data": {"train": ["stdlib:*.py"]}, "tokens": "1M"}
    spec = {
        "replicas": 2,
        "replica": {"gpusPerStage": 4},
        "training": training,
        "storage": {"uri": "s3://models/x", "secretName": "s3"},
    }
    body = {"apiVersion": "crosscloud.dev/v1alpha1", "kind": "CrossCloudTrainingJob", "spec": spec}
    hub_api.request("POST", JOBS, {**body, "metadata": {"name": name, "finalizers": finalizers}})


def status(hub_api: ApiServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = hub_api.request("GET", f"{JOBS}/{name}").get("status") or {}
    return found


def reason(hub_api: ApiServer, name: str) -> str:
    conditions = status(hub_api, name).get("conditions", ())
    return next((str(item["reason"]) for item in conditions if item["type"] == "Running"), "")


def wait(hub_api: ApiServer, condition: Callable[[], object]) -> None:
    """Generous: the machine may be busy. What the job says of itself explains a failure."""
    try:
        wait_until(condition, 90)
    except AssertionError as fault:
        raise AssertionError(f"{fault}; {json.dumps(status(hub_api, 'main'), indent=1)}") from None


def test_a_job_runs_over_two_real_api_servers_with_least_rights_and_survives_a_killed_operator(
    narrow: Path, members: None, hub_api: ApiServer, east_api: ApiServer, tmp_path: Path
) -> None:
    players = Players(hub_api, east_api)
    try:
        with operator_process(narrow, tmp_path, "first") as first:
            wait_until(lambda: first.ready, 60)
            add_members(hub_api, east_api)
            submit(hub_api, "main")
            wait(hub_api, lambda: len(pods(hub_api, east_api)) > 0)
            first.process.kill()
        with operator_process(narrow, tmp_path, "second") as second:
            running = {"Starting", "Training"}
            wait(hub_api, lambda: reason(hub_api, "main") in running and status(hub_api, "main").get("replicas") == 2)
            found = pods(hub_api, east_api)
            assert len(found) == 3  # 1x4 in east, 2x2 in west
            assert all(pod["metadata"]["labels"]["crosscloud.dev/attempt"] == "1" for _, pod in found)
            writers = [(server, pod) for server, pod in found if reporter(pod)]
            assert len(writers) == 2
            for server, pod in writers:
                write_report(server, pod, 1)
            wait(hub_api, lambda: reason(hub_api, "main") == "Training")
            wait_until(lambda: second.metric("crosscloud_job_loss", job="main", replica="1") == 2.5)
            assert second.metric("crosscloud_job_wan_bytes_total", job="main", replica="0") == 4096
            assert second.metric("crosscloud_member_free_gpus", member="east") == 0
            assert "Training" in crosscloud(hub_api, "status", "main", "-n", "train")
            for sequence, waits in ((2, True), (3, False), (4, True), (5, False)):
                write_report(*writers[0], sequence, waits=waits)
                wait(hub_api, lambda waits=waits: (reason(hub_api, "main") == "WaitingForPeers") == waits)  # type: ignore[misc]
            events = hub_api.request("GET", "/api/v1/namespaces/train/events")["items"]
            counts = {item["reason"]: (item["type"], item["count"]) for item in events}
            assert counts["WaitingForPeers"] == ("Warning", 2)
            assert counts["PeersBack"] == ("Normal", 2)
            for server, pod in writers:
                write_report(server, pod, 6, "Succeeded")
            for server, pod in found:
                ended = {"exitCode": 0, "reason": "Completed", "finishedAt": "2026-01-01T00:00:00Z"}
                set_state(server, pod, "Succeeded", {"terminated": ended})
            wait(hub_api, lambda: reason(hub_api, "main") == "Succeeded")
            assert status(hub_api, "main")["result"]["uri"] == "s3://models/x/result"
            hub_api.request("DELETE", f"{JOBS}/main")
            wait_until(lambda: hub_api.raw("GET", f"{JOBS}/main")[0] == 404, 60)
            wait_until(lambda: second.metric("crosscloud_job_loss", job="main") is None)
            for server in (hub_api, east_api):
                anchors = server.request("GET", "/api/v1/namespaces/train/configmaps/")["items"]
                assert not [item for item in anchors if item["metadata"]["name"].endswith("-anchor")]
            assert "forbidden" not in second.log.read_text().lower()
    finally:
        players.stop()


# From the making of a job to its deletion: the operator is at another place each time, at its pods after the last one.
PAUSES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.3)


def kept_by_garbage_collection(server: ApiServer) -> list[str]:
    """What of all jobs' objects has no owner, or one that is there. The rest is removed, as the collector would."""
    groups = {"/api/v1": "pods configmaps secrets services serviceaccounts", "/apis/apps/v1": "deployments"}
    groups |= {RBAC: "roles rolebindings", "/apis/networking.k8s.io/v1": "networkpolicies"}
    paths = [f"{group}/namespaces/train/{kind}" for group, kinds in groups.items() for kind in kinds.split()]
    found = [(path, obj) for path in paths for obj in server.request("GET", f"{path}?{OF_JOBS}")["items"]]
    uids = {obj["metadata"]["uid"] for _, obj in found}
    kept = []
    for path, obj in found:
        owners = {owner["uid"] for owner in obj["metadata"].get("ownerReferences", ())}
        if not owners or owners & uids:
            kept.append(f"{path}/{obj['metadata']['name']}")
        else:
            server.raw("DELETE", f"{path}/{obj['metadata']['name']}", {"gracePeriodSeconds": 0})
    return kept


def test_jobs_that_are_deleted_as_soon_as_they_are_made_leave_nothing_and_are_no_error(
    narrow: Path, members: None, hub_api: ApiServer, east_api: ApiServer, tmp_path: Path
) -> None:
    theirs = ["example.com/theirs"]

    def waiting_for_theirs() -> list[str]:
        jobs = [job["metadata"] for job in hub_api.request("GET", JOBS)["items"]]
        assert all(meta["deletionTimestamp"] for meta in jobs)
        return [meta["name"] for meta in jobs if meta["finalizers"] == theirs]

    with operator_process(narrow, tmp_path, "only") as operator:
        wait_until(lambda: operator.ready, 60)
        add_members(hub_api, east_api)
        before = operator.total("crosscloud_operator_reconcile_errors_total")
        for number in range(100):
            submit(hub_api, f"brief-{number}", theirs if number % 2 else None)
            time.sleep(PAUSES[number % len(PAUSES)])
            hub_api.request("DELETE", f"{JOBS}/brief-{number}")
        wait_until(lambda: len(waiting_for_theirs()) == len(hub_api.request("GET", JOBS)["items"]) == 50, 90)
        for name in waiting_for_theirs():
            hub_api.request("PATCH", f"{JOBS}/{name}", {"metadata": {"finalizers": None}}, MERGE)
        wait_until(lambda: hub_api.request("GET", JOBS)["items"] == [])
        assert kept_by_garbage_collection(east_api) == []
        assert kept_by_garbage_collection(hub_api) == []
        authorities = f"/api/v1/namespaces/{NAMESPACE}/secrets?{OF_JOBS}"
        assert hub_api.request("GET", authorities)["items"] == []
        assert operator.total("crosscloud_operator_reconcile_errors_total") == before, operator.log.read_text()


def test_secrets_of_other_namespaces_are_out_of_the_operators_reach(narrow: Path, hub_api: ApiServer) -> None:
    for verb in ("list", "watch", "delete", "create"):
        answer = hub_api.kubectl(
            "--kubeconfig", str(narrow), "auth", "can-i", verb, "secrets", "-n", "train", check=False
        )
        assert answer.strip().splitlines()[-1] == "no"
