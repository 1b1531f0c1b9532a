"""The world on two real API servers: members come and go with their MemberClusters and Secrets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from apiserver import ApiServer
from crdfiles import JOBS, job, minimal_spec
from faultproxy import fault_proxy
from operator_edge.kube.hubworld import HUB_ID, OPERATOR, TIMES, Running, account, node, pod, running, token
from waiting import until

from crosscloud_operator.domain.record import seconds
from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import CONFIG_MAP, MEMBER, NODE, POD
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.credentials import life_of
from crosscloud_operator.kube.kubeconfig import render, vet
from crosscloud_operator.kube.member import Member


@pytest.fixture(autouse=True)
def clean(hub_api: ApiServer, east_api: ApiServer) -> Iterator[None]:
    """Each test finds a hub without members and a member without nodes."""
    yield
    hub_api.request("DELETE", "/apis/crosscloud.dev/v1alpha1/memberclusters")
    hub_api.request("DELETE", f"/api/v1/namespaces/{OPERATOR}/secrets")
    hub_api.raw("DELETE", JOBS)
    east_api.request("DELETE", "/api/v1/nodes")


@pytest.fixture
async def at_work(hub: HttpCluster, hub_api: ApiServer) -> AsyncIterator[Running]:
    async with running(hub, hub_api) as found:
        yield found


async def test_a_member_shows_its_pools_and_free_gpus_node_by_node(
    at_work: Running, east_api: ApiServer, namespace: str
) -> None:
    node(east_api, "n1", 4)
    node(east_api, "n2", 2, "NVIDIA-L4")
    at_work.add("east", east_api.kubeconfig.read_text())
    await at_work.ready("east")
    status = at_work.status("east")
    assert status["version"].startswith("v1.")
    assert status["nodePools"] == [
        {"name": "NVIDIA-A100-SXM4-80GB", "gpu": "NVIDIA-A100-SXM4-80GB", "nodes": 1, "gpus": 4, "freeGpus": 4},
        {"name": "NVIDIA-L4", "gpu": "NVIDIA-L4", "nodes": 1, "gpus": 2, "freeGpus": 2},
    ]
    pod(east_api, namespace, "busy", "n1", gpus=3)
    await until(lambda: at_work.status("east")["freeGpus"] == 3)
    finished = {"status": {"phase": "Succeeded"}}
    path = f"/api/v1/namespaces/{namespace}/pods/busy/status"
    east_api.request("PATCH", path, finished, "application/merge-patch+json")
    await until(lambda: at_work.status("east")["freeGpus"] == 6)
    assert at_work.status("east")["observedGeneration"] == 1


async def test_a_kubeconfig_that_is_a_trap_is_refused_while_others_go_on_and_can_be_mended(
    at_work: Running, east_api: ApiServer
) -> None:
    trap = json.loads(east_api.kubeconfig.read_text())
    trap["users"][0]["user"] = {"exec": {"command": "sh", "args": ["-c", "touch /tmp/pwned"]}}
    at_work.add("trap", json.dumps(trap))
    at_work.add("east", east_api.kubeconfig.read_text())
    await at_work.ready("east")
    await until(lambda: at_work.condition("trap")[0] == "False")
    _, reason, message = at_work.condition("trap")
    assert reason == "KubeconfigRefused"
    assert "users[0].user.exec" in message
    assert "crosscloud member add" in message
    assert at_work.condition("trap", "CredentialsValid")[0] == "False"
    assert at_work.world.member("trap") is None
    assert at_work.world.cache("trap", POD) is None
    at_work.api.request("DELETE", "/apis/crosscloud.dev/v1alpha1/memberclusters/east")
    at_work.store("trap", east_api.kubeconfig.read_text())
    await at_work.ready("trap")
    assert at_work.world.member("trap") is not None


async def test_one_cluster_under_two_names_is_ready_under_the_older_one_until_that_is_removed(
    at_work: Running, east_api: ApiServer
) -> None:
    node(east_api, "n1", 4)
    uid = east_api.request("GET", "/api/v1/namespaces/kube-system")["metadata"]["uid"]
    at_work.add("b-first", east_api.kubeconfig.read_text())
    await at_work.ready("b-first")
    made = at_work.api.request("GET", "/apis/crosscloud.dev/v1alpha1/memberclusters/b-first")["metadata"]
    await until(lambda: time.time() > seconds(made["creationTimestamp"]) + 1)  # ages are whole seconds
    at_work.add("a-second", east_api.kubeconfig.read_text())
    await until(lambda: at_work.condition("a-second")[1] == "DuplicateCluster")
    status, _, message = at_work.condition("a-second")
    assert status == "False"
    assert "is the member b-first already" in message
    assert "crosscloud member remove a-second" in message
    assert {at_work.status(name)["clusterId"] for name in ("a-second", "b-first")} == {uid}
    await until(lambda: at_work.status("b-first")["gpus"] == 4)
    assert "gpus" not in at_work.status("a-second")
    assert at_work.condition("b-first")[:2] == ("True", "Connected")

    at_work.api.request("DELETE", "/apis/crosscloud.dev/v1alpha1/memberclusters/b-first")
    await at_work.ready("a-second")
    assert at_work.status("a-second")["gpus"] == 4


async def test_a_secret_may_come_later_than_its_member(at_work: Running, east_api: ApiServer) -> None:
    at_work.add("east", None)
    await until(lambda: at_work.condition("east")[1] == "SecretMissing")
    at_work.store("east", east_api.kubeconfig.read_text())
    await at_work.ready("east")


async def test_a_hub_can_be_its_own_member(at_work: Running) -> None:
    body = {"apiVersion": MEMBER.api_version, "kind": MEMBER.kind, "metadata": {"name": "hub"}}
    path = "/apis/crosscloud.dev/v1alpha1/memberclusters"
    at_work.api.request("POST", path, {**body, "spec": {"access": {"inCluster": {}}}})
    await at_work.ready("hub")
    member = at_work.world.member("hub")
    assert isinstance(member, HttpCluster)
    assert member.access == vet(at_work.api.kubeconfig.read_text())


async def test_a_deleted_member_is_no_longer_watched(at_work: Running, east_api: ApiServer) -> None:
    at_work.add("east", east_api.kubeconfig.read_text())
    await at_work.ready("east")
    at_work.api.request("DELETE", "/apis/crosscloud.dev/v1alpha1/memberclusters/east")
    await until(lambda: at_work.world.member("east") is None)
    assert at_work.world.last_contact().keys() == {"hub"}


async def test_a_token_rotated_by_hand_is_used_at_once_and_nothing_is_forgotten(
    at_work: Running, east_api: ApiServer, namespace: str
) -> None:
    old, new = account(east_api, namespace, "old"), account(east_api, namespace, "new")
    node(east_api, "n1", 1)
    at_work.add("east", render(old, "east", old.token or ""))
    await at_work.ready("east")
    cache = at_work.world.cache("east", NODE)
    at_work.store("east", render(new, "east", new.token or ""))
    member = at_work.world.member("east")
    assert isinstance(member, HttpCluster)
    await until(lambda: member.access.token == new.token)
    east_api.request("DELETE", f"/api/v1/namespaces/{namespace}/serviceaccounts/old")  # ends the old token
    node(east_api, "n2", 1)
    await until(lambda: at_work.status("east")["gpus"] == 2)
    assert at_work.world.cache("east", NODE) is cache
    await member.list(POD)  # the new token is good for it


async def test_a_token_is_renewed_at_half_of_its_life_and_kept_in_the_secret(
    hub: HttpCluster, hub_api: ApiServer, east_api: ApiServer, namespace: str
) -> None:
    ahead = 0.0
    async with running(hub, hub_api, clock=lambda: time.time() + ahead) as at_work:
        access = account(east_api, namespace, "me")
        at_work.add("east", render(access, "east", access.token or ""))
        await at_work.ready("east")
        before = life_of(access)
        assert before.expires is not None
        assert at_work.condition("east", "CredentialsValid")[1] == "Valid"
        second = token(east_api, namespace, "me")
        ahead = 301.0  # of the ten minutes that the tokens live
        at_work.store("east", render(access, "east", second))
        member = at_work.world.member("east")
        assert isinstance(member, HttpCluster)
        await until(lambda: member.access.token not in (access.token, second))
        await until(lambda: vet(at_work.stored("east")).token == member.access.token)
        after = life_of(member.access)
        assert after.expires is not None
        assert after.expires >= before.expires
        assert after.account == before.account
        await member.list(POD)


async def test_a_member_that_takes_connections_and_never_answers_slows_no_other(
    at_work: Running, east_api: ApiServer
) -> None:
    held: list[asyncio.StreamWriter] = []

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    document = json.loads(east_api.kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    try:
        at_work.add("black-hole", json.dumps(document))
        at_work.add("east", east_api.kubeconfig.read_text())
        await at_work.ready("east")
        await until(lambda: at_work.condition("black-hole")[1] == "Unreachable", 60)
        node(east_api, "n1", 1)
        await until(lambda: at_work.status("east")["gpus"] == 1)
    finally:
        for writer in held:
            writer.close()
        server.close()


async def test_an_account_without_rights_is_told_apart_from_a_dead_server(
    at_work: Running, east_api: ApiServer, namespace: str
) -> None:
    access = account(east_api, namespace, "poor")
    path = f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{namespace}-poor"
    east_api.request("DELETE", path)
    at_work.add("east", render(access, "east", access.token or ""))
    await until(lambda: at_work.condition("east")[1] == "Forbidden")
    assert "crosscloud member add" in at_work.condition("east")[2]
    at_work.add("west", render(access, "west", "no.such.token"))
    await until(lambda: at_work.condition("west")[1] == "Unauthorized")
    assert at_work.condition("west", "CredentialsValid")[1] == "Rejected"


async def test_what_belongs_to_a_job_wakes_that_job_and_room_wakes_those_that_have_not_ended(
    at_work: Running, east_api: ApiServer, namespace: str
) -> None:
    at_work.api.namespace("ml")
    for name in ("mine", "other", "ended"):
        at_work.api.request("POST", JOBS, job(minimal_spec(), name))
    condition = {
        "type": "Succeeded",
        "status": "True",
        "reason": "Done",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    at_work.api.request(
        "PATCH", f"{JOBS}/ended/status", {"status": {"conditions": [condition]}}, "application/merge-patch+json"
    )
    node(east_api, "n1", 4)
    at_work.add("east", east_api.kubeconfig.read_text())
    await at_work.ready("east")
    await until(lambda: ("ml", "other") in at_work.woken)

    at_work.woken.clear()
    uid = at_work.api.request("GET", f"{JOBS}/mine")["metadata"]["uid"]
    marks = {"crosscloud.dev/hub": HUB_ID, "crosscloud.dev/job-uid": uid}
    report = {"metadata": {"name": "report", "labels": marks}, "data": {}}
    east_api.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", report)
    await until(lambda: at_work.woken)
    assert set(at_work.woken) == {("ml", "mine")}

    at_work.woken.clear()
    pod(east_api, namespace, "foreign", "n1", gpus=1)
    await until(lambda: {("ml", "mine"), ("ml", "other")} <= set(at_work.woken))
    assert ("ml", "ended") not in at_work.woken


async def test_pools_count_what_the_settings_call_a_gpu(
    hub: HttpCluster, hub_api: ApiServer, east_api: ApiServer
) -> None:
    amount, ready = {"amd.com/gpu": "8"}, {"type": "Ready", "status": "True"}
    meta = {"name": "n1", "labels": {"amd.com/gpu.product-name": "MI300X"}}
    status = {"capacity": amount, "allocatable": amount, "conditions": [ready]}
    east_api.request("POST", "/api/v1/nodes", {"metadata": meta, "spec": {}, "status": status})
    names = {"gpu_resource": "amd.com/gpu", "gpu_product_label": "amd.com/gpu.product-name"}
    async with running(hub, hub_api, **names) as found:
        found.add("east", east_api.kubeconfig.read_text())
        await found.ready("east")
        pool = {"name": "MI300X", "gpu": "MI300X", "nodes": 1, "gpus": 8, "freeGpus": 8}
        await until(lambda: found.status("east").get("nodePools") == [pool])


async def test_only_our_config_maps_are_held(at_work: Running, east_api: ApiServer, namespace: str) -> None:
    for name, hub_id in (("ours", HUB_ID), ("of-another-hub", "else")):
        meta = {"name": name, "labels": {"crosscloud.dev/hub": hub_id}}
        east_api.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": meta})
    east_api.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "plain"}})
    at_work.add("east", east_api.kubeconfig.read_text())
    await at_work.ready("east")
    cache = at_work.world.cache("east", CONFIG_MAP)
    assert cache is not None
    names = [obj["metadata"]["name"] for obj in cache.objects() if obj["metadata"]["namespace"] == namespace]
    assert names == ["ours"]


async def test_contact_lost_is_told_with_its_time_and_so_is_its_return(east_api: ApiServer) -> None:
    told: list[bool] = []
    async with fault_proxy(east_api) as proxy:
        member = Member(
            "east",
            Access(proxy.url),
            hub_id=HUB_ID,
            changed=lambda *_: None,
            contact_changed=lambda: told.append(True),
            times=TIMES,
        )
        member.start(member.cluster, None, 600)
        try:
            await until(lambda: member.synced)
            began = time.time()
            proxy.list_status = proxy.watch_status = 503
            proxy.cut()
            await until(lambda: member.unreachable_since is not None)
            assert member.unreachable_since is not None
            assert member.unreachable_since <= began + 1
            assert member.facts().synced
            told.clear()
            proxy.list_status = proxy.watch_status = 0
            await until(lambda: member.unreachable_since is None)
            assert told
        finally:
            await member.stop()


async def test_no_secret_but_a_kubeconfig_is_kept_in_memory(at_work: Running, east_api: ApiServer) -> None:
    path, data = f"/api/v1/namespaces/{OPERATOR}/secrets", {"key": "aHVudGVyMg=="}
    at_work.api.request("POST", path, {"metadata": {"name": "authority"}, "data": data})
    informer = at_work.world._secret_informer
    await until(lambda: any(obj["metadata"]["name"] == "authority" for obj in informer.objects()))
    assert "aHVudGVyMg==" not in json.dumps(list(informer.objects()))
