"""Golden manifests: everything that a job over two members makes there, reviewed as diffs; two jobs, one of them with
replicas of two stages.

`CROSSCLOUD_GOLDEN=write pytest tests/operator_core/test_manifests.py` writes them anew; look at the diff.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from operator_core.memory import MemoryCluster
from operator_core.players import TWO_STAGES, Lab, job, keys_of, lab, split_lab
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from crosscloud_operator.kube.api import CONFIG_MAP, POD, SECRET
from crosscloud_trainer.contract import read_peer_table, read_run_document

GOLDEN = Path(__file__).parent / "golden"
SPEC: dict[str, Any] = {
    "placement": {"gpu": "NVIDIA-A100"},
    "storage": {"uri": "s3://models/demo", "secretName": "s3"},
    "podTemplate": {
        "metadata": {"annotations": {"example.org/team": "ml"}, "labels": {"example.org/team": "ml"}},
        "spec": {
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100"},
            "tolerations": [{"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}],
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}],
            "initContainers": [{"name": "mesh", "image": "mesh:1", "restartPolicy": "Always"}],
            "containers": [
                {
                    "name": "trainer",
                    "image": "registry.example.org/trainer:2",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "resources": {"limits": {"vpc.amazonaws.com/efa": 1, "memory": "32Gi"}, "requests": {"cpu": "2"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "logs", "image": "logs:1"},
            ],
        },
    },
}


async def admitted() -> Lab:
    scene = Lab(lab())
    meta = {"name": "s3", "namespace": "ml"}
    scene.world.real_hub.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {"AWS_REGION": "eA=="}})
    scene.submit(job(**SPEC))
    await scene.look()
    assert scene.reason() == "Binding"
    return scene


async def admitted_in_stages() -> Lab:
    """Replica 0 has both of its stages in east, replica 1 its first one there and its second one in west."""
    scene = Lab(split_lab())
    scene.submit(job(**TWO_STAGES, activations={"codec": "Int8"}))
    await scene.look()
    assert scene.reason() == "Binding"
    return scene


def as_made(cluster: MemoryCluster) -> list[dict[str, Any]]:
    """What the operator has made, without what differs from run to run."""
    found = []
    anchor = cluster.find(CONFIG_MAP, "demo-anchor")
    assert anchor is not None
    order = {name: number for number, (_, name) in enumerate(cluster.created)}
    for obj in sorted(cluster.objects.values(), key=lambda item: order[item["metadata"]["name"]]):
        if obj["kind"] in ("Namespace", "Node"):
            continue
        meta = {
            key: value
            for key, value in obj["metadata"].items()
            if key not in ("uid", "resourceVersion", "creationTimestamp")
        }
        shown = {**obj, "metadata": meta}
        shown.pop("status", None)
        if meta["labels"]["app.kubernetes.io/component"] == "keys":
            shown["data"] = dict.fromkeys(obj["data"], "(issued)")
        if obj["kind"] == "Pod":
            shown["spec"] = {**obj["spec"], "schedulingGates": [{"name": "crosscloud.dev/gang"}]}
        found.append(json.loads(json.dumps(shown).replace(f'"{anchor["metadata"]["uid"]}"', '"(anchor)"')))
    return found


def as_yaml(objects: list[dict[str, Any]]) -> str:
    yaml = YAML()
    yaml.width = 4096
    yaml.explicit_start = True
    text = io.StringIO()
    yaml.dump_all([_readable(obj) for obj in objects], text)
    return re.sub(r"[ \t]+\n", "\n", text.getvalue())


def _readable(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _readable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_readable(item) for item in data]
    if isinstance(data, str) and data.startswith("{"):
        return LiteralScalarString(json.dumps(json.loads(data), indent=2) + "\n")
    return LiteralScalarString(data) if isinstance(data, str) and "\n" in data else data


@pytest.mark.parametrize(
    ("golden", "scenery"),
    [("", admitted), ("stages-", admitted_in_stages)],
    ids=["one stage", "two stages"],
)
@pytest.mark.parametrize("member", ["east", "west"])
async def test_a_job_over_two_members_makes_just_these_objects(
    golden: str, scenery: Callable[[], Awaitable[Lab]], member: str
) -> None:
    scene = await scenery()
    text = as_yaml(as_made(scene.world.clusters[member]))
    path = GOLDEN / f"{golden}{member}.yaml"
    if os.environ.get("CROSSCLOUD_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("scenery", [admitted, admitted_in_stages], ids=["one stage", "two stages"])
async def test_the_documents_are_what_the_trainer_reads(scenery: Callable[[], Awaitable[Lab]]) -> None:
    scene = await scenery()
    digests = set()
    for cluster in scene.world.clusters.values():
        run = cluster.find(CONFIG_MAP, "demo-a1-run")
        peers = cluster.find(CONFIG_MAP, "demo-a1-peers")
        assert run is not None
        assert peers is not None
        document = read_run_document(run["data"]["run.json"])
        digests.add(document.digest())
        table = read_peer_table(peers["data"]["peers.json"])
        for pod in cluster.all(POD):
            labels = pod["metadata"]["labels"]
            replica, stage, node = (int(labels[f"crosscloud.dev/{key}"]) for key in ("replica", "stage", "node"))
            peer = table.peer(replica, stage, node)
            subdomain, namespace = pod["spec"]["subdomain"], pod["metadata"]["namespace"]
            assert peer.direct == f"{pod['spec']['hostname']}.{subdomain}.{namespace}.svc.cluster.local"
            limits = pod["spec"]["containers"][0]["resources"]["limits"]
            assert int(limits["nvidia.com/gpu"]) == document.replica(replica).stages[stage].gpus_per_node
    assert len(digests) == 1, "all members hold one run document"


async def test_the_pods_of_all_stages_have_keys_routes_and_names_of_their_own() -> None:
    scene = await admitted_in_stages()
    where = {pod["metadata"]["name"]: scene.cluster_of(pod).name for pod in scene.pods()}
    assert where == {
        "demo-a1-r0-i1-s0-n0": "east",
        "demo-a1-r0-i1-s1-n0": "east",
        "demo-a1-r1-i1-s0-n0": "east",
        "demo-a1-r1-i1-s1-n0": "west",
    }
    for name, cluster in scene.world.clusters.items():
        own = [pod for pod in scene.pods() if where[pod["metadata"]["name"]] == name]
        keys, gateway = cluster.find(SECRET, "demo-a1-keys"), cluster.find(CONFIG_MAP, "demo-a1-gateway")
        assert keys is not None
        assert gateway is not None
        assert set(keys["data"]) - {"ca.crt"} == set().union(*map(keys_of, own))
        assert sum(len(keys_of(pod)) for pod in own) == len(keys["data"]) - 1, "no pod has another one's key"
        hosts = re.findall(r"server pod ([^.]+)\.", gateway["data"]["haproxy.cfg"])
        assert sorted(hosts) == sorted(pod["metadata"]["name"] for pod in own for _ in range(2)), "two ranks each"


async def test_only_the_first_stage_of_a_replica_speaks_for_it() -> None:
    scene = await admitted_in_stages()
    speaking = {
        pod["metadata"]["name"]
        for pod in scene.pods()
        if any(volume["name"] == "crosscloud-report" for volume in pod["spec"]["volumes"])
    }
    assert speaking == {"demo-a1-r0-i1-s0-n0", "demo-a1-r1-i1-s0-n0"}
    kinds = {
        name: sorted(obj["metadata"]["name"] for obj in cluster.objects.values() if obj["kind"] == "Role")
        for name, cluster in scene.world.clusters.items()
    }
    assert kinds == {"east": ["demo-r0-report", "demo-r1-report", "demo-view"], "west": []}


async def test_what_the_user_put_into_the_pod_template_is_kept() -> None:
    scene = await admitted()
    for pod in scene.pods():
        spec = pod["spec"]
        assert pod["metadata"]["annotations"] == {"example.org/team": "ml"}
        assert pod["metadata"]["labels"]["example.org/team"] == "ml"
        trainer, logs = spec["containers"]
        assert trainer["image"] == "registry.example.org/trainer:2"
        assert trainer["command"] == ["crosscloud-trainer", "pod"]
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in trainer["env"]
        assert trainer["resources"]["limits"]["vpc.amazonaws.com/efa"] == 1
        assert trainer["resources"]["requests"]["cpu"] == "2"
        assert {"name": "data", "mountPath": "/data"} in trainer["volumeMounts"]
        assert logs == {"name": "logs", "image": "logs:1"}
        assert spec["initContainers"] == SPEC["podTemplate"]["spec"]["initContainers"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}]


async def test_only_rank_0_of_a_replica_can_speak_to_the_api_server() -> None:
    scene = await admitted()
    speaking = {}
    for pod in scene.pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        volumes = {item["name"] for item in pod["spec"]["volumes"]}
        env = {item["name"] for item in pod["spec"]["containers"][0]["env"]}
        speaking[pod["metadata"]["name"]] = ("crosscloud-report" in volumes, "CROSSCLOUD_REGISTER" in env)
    assert speaking == {
        "demo-a1-r0-i1-s0-n0": (True, True),
        "demo-a1-r1-i1-s0-n0": (True, False),
        "demo-a1-r1-i1-s0-n1": (False, False),
    }


async def test_a_member_s_pods_may_write_the_reports_of_its_own_replicas_and_only_the_home_s_the_view() -> None:
    scene = await admitted()
    allowed: dict[str, list[str]] = {}
    for member, cluster in scene.world.clusters.items():
        bound = {
            obj["roleRef"]["name"]
            for obj in cluster.objects.values()
            if obj["kind"] == "RoleBinding" and [item["name"] for item in obj["subjects"]] == ["demo-reporter"]
        }
        roles = [obj for obj in cluster.objects.values() if obj["kind"] == "Role" and obj["metadata"]["name"] in bound]
        allowed[member] = sorted(name for role in roles for rule in role["rules"] for name in rule["resourceNames"])
    assert allowed == {"east": ["demo-r0-report", "demo-view"], "west": ["demo-r1-report"]}


@pytest.mark.parametrize("member", ["east", "west"])
async def test_haproxy_accepts_the_gateways_configuration(member: str, tmp_path: Path) -> None:
    scene = await admitted()
    config = scene.world.clusters[member].find(CONFIG_MAP, "demo-a1-gateway")
    assert config is not None
    path = tmp_path / "haproxy.cfg"
    path.write_text(config["data"]["haproxy.cfg"])
    program = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "haproxy is needed: apt install haproxy"
    command = [program, "-c", "-f", str(path)]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
