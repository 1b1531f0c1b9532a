"""An attempt that runs elsewhere than the one before: peer table, home and register follow the new plan (C51)."""

from __future__ import annotations

import pytest
from operator_core.memory import MemoryWorld
from operator_core.players import Lab, job

from crosscloud_operator.kube.api import CONFIG_MAP, MEMBER, NODE, SERVICE, Obj, Ref
from crosscloud_trainer.contract import ExitCode, Home, read_peer_table, read_run_document


def environment(pod: Obj) -> dict[str, str]:
    return {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"]}


def numbers(pod: Obj) -> tuple[int, int, int]:
    replica, stage, node = (
        int(pod["metadata"]["labels"][f"crosscloud.dev/{key}"]) for key in ("replica", "stage", "node")
    )
    return replica, stage, node


def pods_of(scene: Lab, attempt: int) -> dict[tuple[int, int, int], Obj]:
    """By (replica, stage, node)."""
    pods = [pod for pod in scene.pods() if pod["metadata"]["labels"]["crosscloud.dev/attempt"] == str(attempt)]
    return {numbers(pod): pod for pod in pods}


def gateway_of(scene: Lab, member: str) -> str:
    """What the others dial: the first node's address and the port of the Service there."""
    cluster = scene.world.clusters[member]
    service = cluster.find(SERVICE, "demo-gateway")
    assert service is not None
    (address,) = cluster.all(NODE)[0]["status"]["addresses"]
    return f"{address['address']}:{service['spec']['ports'][0]['nodePort']}"


def assert_pods_are_told_where_they_are(scene: Lab, attempt: int, home: Home) -> None:
    """What each pod mounts and has in its environment, against where the pods are."""
    pods = pods_of(scene, attempt)
    members = {number: scene.cluster_of(pod).name for number, pod in pods.items()}
    hosts = {
        number: f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}.ml.svc.cluster.local"
        for number, pod in pods.items()
    }
    spans = len(set(members.values())) > 1
    gateways = {number: gateway_of(scene, member) if spans else None for number, member in members.items()}
    for number, pod in pods.items():
        mounted = {item["name"]: item["configMap"]["name"] for item in pod["spec"]["volumes"] if "configMap" in item}
        cluster = scene.cluster_of(pod)
        run = cluster.find(CONFIG_MAP, mounted["crosscloud-run"])
        table = cluster.find(CONFIG_MAP, mounted["crosscloud-peers"])
        assert run is not None
        assert table is not None
        document, peers = read_run_document(run["data"]["run.json"]), read_peer_table(table["data"]["peers.json"])
        assert (document.attempt, document.home, peers.attempt) == (attempt, home, attempt)
        told = {(peer.replica, peer.stage, peer.node): peer for peer in peers.peers}
        assert {each: peer.member for each, peer in told.items()} == members
        assert {each: peer.direct for each, peer in told.items()} == hosts
        assert {each: peer.gateway for each, peer in told.items()} == gateways
        opens_view = number[1:] == (0, 0) and cluster.name == home.member
        assert environment(pod).get("CROSSCLOUD_REGISTER") == ("configmap:ml/demo-view" if opens_view else None)
    assert scene.world.clusters[home.member].find(CONFIG_MAP, "demo-view") is not None


@pytest.mark.parametrize(
    ("member", "gpus"),
    [("west", (2, 2, 2)), ("north", (6,)), ("north", (3, 3))],
    ids=["all in west", "a third member", "other nodes in a third member"],
)
async def test_after_the_loss_of_east_all_pods_are_told_of_the_new_places_and_the_new_home(
    member: str, gpus: tuple[int, ...]
) -> None:
    world = MemoryWorld("east", "north", "west")
    world.add_node("east", "e1", 6)
    for number in range(3):
        world.add_node("west", f"w{number}", 2)
    scene = Lab(world)
    unequal = job(gpus=6)  # one pod in east, three in west
    unequal["spec"]["training"]["batchSize"] = 12
    scene.submit(unequal)
    await scene.until(lambda: scene.status().is_true("Running"))
    places = {(0, 0, 0): "east", (1, 0, 0): "west", (1, 0, 1): "west", (1, 0, 2): "west"}
    assert {number: scene.cluster_of(pod).name for number, pod in pods_of(scene, 1).items()} == places
    assert_pods_are_told_where_they_are(scene, 1, Home(1, "east"))

    world.lose("east")
    for pod in pods_of(scene, 1).values():
        if scene.cluster_of(pod).name == "west":
            scene.end(pod, ExitCode.PEER_LOST)
    await scene.until(lambda: "waiting for east to answer" in scene.condition("Running").message)
    world.real_hub.remove(Ref(MEMBER, "east"))
    for number, count in enumerate(gpus):
        world.add_node(member, f"x{number}", count)
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    moved = pods_of(scene, 2)
    assert {replica for replica, _, _ in moved} == {0, 1}
    assert {scene.cluster_of(pod).name for pod in moved.values()} == {"west", member}
    for replica in (0, 1):
        nodes = sorted(node for found, _, node in moved if found == replica)
        assert nodes == list(range(len(nodes))), "numbered from 0, without a gap"
    assert_pods_are_told_where_they_are(scene, 2, Home(2, member))
