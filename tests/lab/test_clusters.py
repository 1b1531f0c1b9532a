"""The default clusters, seen with kubectl and from inside pods."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from lab.pods import Bench, pod, service
from waiting import eventually

from crosscloud_lab.errors import LabError
from crosscloud_lab.lab import Lab

SLEEP = "sleep 100000"
SERVE = "mkdir /www; echo hello from $HOSTNAME > /www/index.html; exec httpd -f -p 8080 -h /www"


@pytest.fixture
def bench(lab: Lab) -> Iterator[Bench]:
    made = Bench(lab)
    yield made
    made.remove()


def test_kubectl_sees_the_nodes_and_gpus_of_the_lab_file(lab: Lab) -> None:
    seen = {}
    for cluster in ("hub", "east", "west"):
        for node in json.loads(lab.kubectl(cluster, "get", "nodes", "-o", "json"))["items"]:
            conditions = {item["type"]: item["status"] for item in node["status"]["conditions"]}
            seen[node["metadata"]["name"]] = (conditions["Ready"], node["status"]["allocatable"].get("nvidia.com/gpu"))
    assert seen == {
        "hub-0": ("True", None),
        "east-0": ("True", "4"),
        "west-0": ("True", "2"),
        "west-1": ("True", "2"),
    }


def test_the_scheduler_gives_out_gpus_and_no_more_than_there_are(bench: Bench) -> None:
    one = pod("two-a", SLEEP, gpus=2, nodeSelector={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"})
    bench.create("west", one, pod("two-b", SLEEP, gpus=2))
    placed = bench.kubectl("west", "get", "pods", "-o", "jsonpath={.items[*].spec.nodeName}")
    assert sorted(placed.split()) == ["west-0", "west-1"]
    third = pod("one-c", SLEEP, gpus=1)
    bench.kubectl("west", "apply", "-f", "-", stdin=json.dumps(third))

    def refusal() -> str:
        path = "jsonpath={.status.conditions[?(@.type=='PodScheduled')].message}"
        return bench.kubectl("west", "get", "pod", "one-c", "-o", path)

    assert "2 Insufficient nvidia.com/gpu" in eventually(refusal, "the scheduler's answer")


def test_clusters_use_the_same_pod_and_service_ranges(bench: Bench, lab: Lab) -> None:
    for cluster, node in (("east", "east-0"), ("west", "west-0")):
        bench.create(cluster, pod("somewhere", SLEEP, node=node))
        assert bench.address(cluster, "somewhere").startswith("10.244.0.")
    services = {
        lab.kubectl(name, "get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}")
        for name in ("hub", "east", "west")
    }
    assert services == {"10.96.0.1"}


def test_names_services_and_pods_on_other_nodes_are_reached(bench: Bench) -> None:
    member = pod("web", SERVE, node="west-0", hostname="rank-0", subdomain="gang")
    gang = service("gang", "web", 8080, clusterIP="None", publishNotReadyAddresses=True)
    bench.create(
        "west", service("web", "web", 80, ports={"targetPort": 8080}), gang, member, pod("asks", SLEEP, node="west-1")
    )
    for name in ("web", "rank-0.gang:8080", f"{bench.address('west', 'web')}:8080"):
        answer = eventually(lambda name=name: _get(bench, "west", f"http://{name}/"), f"an answer from {name}")
        assert answer == "hello from rank-0\n"


def test_another_cluster_is_reached_by_the_addresses_of_its_nodes_only(bench: Bench, lab: Lab) -> None:
    node_port = service("web", "web", 8080, type="NodePort")
    bench.create("west", node_port, pod("web", SERVE, node="west-0"))
    bench.create("east", pod("asks", SLEEP))
    port = bench.node_port("west", "web")
    for node in lab.plan.cluster("west").nodes:
        url = f"http://{node.address}:{port}/"
        assert eventually(lambda url=url: _get(bench, "east", url), f"an answer from {url}") == "hello from web\n"
    cluster_ip = bench.kubectl("west", "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
    assert _get(bench, "east", f"http://{cluster_ip}:8080/") == ""


def test_pods_of_every_cluster_reach_every_api_server_with_the_hosts_kubeconfig(bench: Bench, lab: Lab) -> None:
    bench.create("east", pod("asks", SLEEP))
    for cluster in lab.plan.clusters:
        said = bench.sh("east", "asks", f"nc -w 5 {cluster.api_address} 6443 </dev/null && echo open")
        assert "open" in said
        assert f"server: {cluster.api_url}" in lab.kubeconfig(cluster.name).read_text()


def test_logs_exec_and_port_forward_work(bench: Bench, lab: Lab) -> None:
    bench.create("east", pod("talks", f"echo first words; {SERVE}"))
    assert bench.kubectl("east", "logs", "talks") == "first words\n"
    assert bench.sh("east", "talks", "echo $((6 * 7))") == "42\n"
    kubectl = [str(lab.binary("kubectl")), f"--kubeconfig={lab.kubeconfig('east')}", f"--namespace={bench.namespace}"]
    with subprocess.Popen(
        [*kubectl, "port-forward", "pod/talks", ":8080"], stdout=subprocess.PIPE, text=True
    ) as forward:
        try:
            assert forward.stdout is not None
            port = re.match(r"Forwarding from 127.0.0.1:(\d+) -> 8080", forward.stdout.readline())
            assert port is not None
            with urlopen(f"http://127.0.0.1:{port[1]}/", timeout=30) as answer:
                assert answer.read() == b"hello from talks\n"
        finally:
            forward.terminate()


def test_the_object_store_is_reached_from_pods_and_host_and_wants_a_key(bench: Bench, lab: Lab) -> None:
    with pytest.raises(HTTPError, match="403"):
        urlopen(lab.s3.endpoint, timeout=10)
    bench.create("west", pod("asks", SLEEP))
    said = bench.sh("west", "asks", f"wget -q -O - {lab.s3.endpoint} 2>&1 || true")
    assert "403 Forbidden" in said
    assert set(lab.s3_environment()) == {
        "AWS_ENDPOINT_URL",
        "AWS_DEFAULT_REGION",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    }


def test_admission_quota_and_limits_are_those_of_a_real_cluster(bench: Bench) -> None:
    bench.create(
        "east",
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none"},
            "spec": {"hard": {"requests.nvidia.com/gpu": "1"}},
        },
    )
    with pytest.raises(LabError, match="exceeded quota"):
        bench.kubectl("east", "apply", "-f", "-", stdin=json.dumps(pod("greedy", SLEEP, gpus=2)))
    bench.kubectl("east", "label", "namespace", bench.namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(LabError, match="violates PodSecurity"):
        bench.kubectl("east", "apply", "-f", "-", stdin=json.dumps(pod("loose", SLEEP)))


def test_a_pod_may_ask_for_a_token_and_the_api_server_keeps_an_audit_log(bench: Bench, lab: Lab) -> None:
    bench.create("east", pod("asks", SLEEP))
    token = bench.sh("east", "asks", "cat /var/run/secrets/kubernetes.io/serviceaccount/token")
    who = bench.kubectl(
        "east", "auth", "whoami", f"--token={token.strip()}", "-o", "jsonpath={.status.userInfo.username}"
    )
    assert who in (f"system:serviceaccount:{bench.namespace}:default", "admin")
    log = lab.cluster("east").files.audit_log
    assert any(json.loads(line)["user"]["username"] == "system:node:east-0" for line in log.read_text().splitlines())


def _get(bench: Bench, cluster: str, url: str) -> str:
    """What a web server answers a pod; nothing when it can't be reached."""
    try:
        return bench.sh(cluster, "asks", f"wget -q -O - {url}")
    except LabError:
        return ""
