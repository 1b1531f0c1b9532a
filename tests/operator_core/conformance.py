"""What the operator relies on from an API server, as functions over a `Cluster`.

They pass on the in-memory API (test_conformance.py) and on a real API server; that is why the first may stand in for
the second. Each takes a cluster and an existing namespace, and uses names of its own: all can run on one server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from operator_core.players import job

from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    EVENT,
    JOB,
    POD,
    SERVICE,
    AlreadyExists,
    Cluster,
    Conflict,
    NotFound,
    Obj,
    Ref,
    Refused,
)

Check = Callable[[Cluster, str], Awaitable[None]]
LABEL = "crosscloud.dev/hub"


def config_map(namespace: str, name: str, *, labels: dict[str, str] | None = None, **more: Any) -> Obj:
    meta = {"name": name, "namespace": namespace, "labels": labels or {}, **more}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"a": "1", "b": "2"}}


def gated_pod(namespace: str, name: str, *gates: str) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "automountServiceAccountToken": False,
            "schedulingGates": [{"name": gate} for gate in gates],
            "containers": [{"name": "trainer", "image": "trainer:1"}],
        },
    }


async def what_is_not_there_is_none(cluster: Cluster, namespace: str) -> None:
    assert await cluster.get(Ref(CONFIG_MAP, "nothing", namespace)) is None


async def a_created_object_has_an_identity_and_can_be_read(cluster: Cluster, namespace: str) -> None:
    created = await cluster.create(config_map(namespace, "created"))
    assert created["metadata"]["uid"]
    assert created["metadata"]["resourceVersion"]
    assert created["metadata"]["creationTimestamp"]
    read = await cluster.get(Ref(CONFIG_MAP, "created", namespace))
    assert read is not None
    assert (read["kind"], read["apiVersion"]) == ("ConfigMap", "v1")
    assert read["metadata"]["uid"] == created["metadata"]["uid"]
    assert read["data"] == {"a": "1", "b": "2"}


async def a_second_object_of_one_name_is_refused_as_already_existing(cluster: Cluster, namespace: str) -> None:
    await cluster.create(config_map(namespace, "twice"))
    with pytest.raises(AlreadyExists):
        await cluster.create(config_map(namespace, "twice"))


async def nothing_can_be_created_in_a_namespace_that_is_not_there(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(NotFound):
        await cluster.create(config_map(f"{namespace}-missing", "lost"))


async def an_invalid_object_is_refused_with_the_servers_words(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(Refused) as refusal:
        await cluster.create(config_map(namespace, "Not_A_Name"))
    assert "Not_A_Name" in refusal.value.message


async def a_list_is_narrowed_by_namespace_value_and_presence_of_labels(cluster: Cluster, namespace: str) -> None:
    await cluster.create(config_map(namespace, "list-1", labels={LABEL: "list", "part": "1"}))
    await cluster.create(config_map(namespace, "list-2", labels={LABEL: "list", "part": "2"}))
    await cluster.create(config_map(namespace, "list-3", labels={LABEL: "list"}))

    async def names(selector: str | None) -> set[str]:
        found = await cluster.list(CONFIG_MAP, namespace=namespace, selector=selector)
        assert all((item["kind"], item["apiVersion"]) == ("ConfigMap", "v1") for item in found)
        return {item["metadata"]["name"] for item in found}

    assert await names(f"{LABEL}=list") == {"list-1", "list-2", "list-3"}
    assert await names(f"{LABEL}=list,part=1") == {"list-1"}
    assert await names(f"{LABEL}=list,part") == {"list-1", "list-2"}
    assert await names(f"{LABEL}=other") == set()
    assert await names(None) >= {"list-1", "list-2", "list-3"}


async def a_merge_patch_on_an_older_version_is_a_conflict(cluster: Cluster, namespace: str) -> None:
    first = await cluster.create(config_map(namespace, "versions"))
    ref = Ref(CONFIG_MAP, "versions", namespace)
    version = first["metadata"]["resourceVersion"]
    second = await cluster.merge_patch(ref, {"metadata": {"resourceVersion": version}, "data": {"a": "3", "b": None}})
    assert second["data"] == {"a": "3"}
    assert second["metadata"]["resourceVersion"] != version
    with pytest.raises(Conflict):
        await cluster.merge_patch(ref, {"metadata": {"resourceVersion": version}, "data": {"a": "4"}})
    with pytest.raises(Conflict):
        await cluster.merge_patch(
            ref, {"metadata": {"uid": "11111111-1111-1111-1111-111111111111"}, "data": {"a": "4"}}
        )
    unchanged = await cluster.get(ref)
    assert unchanged is not None
    assert unchanged["data"] == {"a": "3"}


async def a_patch_that_changes_nothing_makes_no_new_version(cluster: Cluster, namespace: str) -> None:
    first = await cluster.create(config_map(namespace, "same"))
    second = await cluster.merge_patch(Ref(CONFIG_MAP, "same", namespace), {"data": {"a": "1"}})
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def what_is_not_there_cannot_be_patched(cluster: Cluster, namespace: str) -> None:
    ref = Ref(CONFIG_MAP, "nothing", namespace)
    with pytest.raises(NotFound):
        await cluster.merge_patch(ref, {"data": {"a": "1"}})
    with pytest.raises(NotFound):
        await cluster.json_patch(ref, [{"op": "remove", "path": "/data/a"}])


async def a_gate_is_lifted_once_and_only_where_it_stands(cluster: Cluster, namespace: str) -> None:
    with contextlib.suppress(AlreadyExists):
        meta = {"name": "default", "namespace": namespace}
        await cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    pod = await cluster.create(gated_pod(namespace, "gated", "example.org/first", "crosscloud.dev/gang"))
    assert pod["status"]["phase"] == "Pending"
    ref = Ref(POD, "gated", namespace)

    def lift(place: int, uid: str = pod["metadata"]["uid"]) -> list[Obj]:
        return [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "test", "path": f"/spec/schedulingGates/{place}/name", "value": "crosscloud.dev/gang"},
            {"op": "remove", "path": f"/spec/schedulingGates/{place}"},
        ]

    with pytest.raises(Conflict):
        await cluster.json_patch(ref, lift(0))
    with pytest.raises(Conflict):
        await cluster.json_patch(ref, lift(1, "11111111-1111-1111-1111-111111111111"))
    lifted = await cluster.json_patch(ref, lift(1))
    assert lifted["spec"]["schedulingGates"] == [{"name": "example.org/first"}]
    with pytest.raises(Conflict):
        await cluster.json_patch(ref, lift(1))
    await cluster.delete(ref, uid=pod["metadata"]["uid"])


async def the_last_gate_leaves_a_pod_that_may_be_bound(cluster: Cluster, namespace: str) -> None:
    with contextlib.suppress(AlreadyExists):
        meta = {"name": "default", "namespace": namespace}
        await cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    pod = await cluster.create(gated_pod(namespace, "free", "crosscloud.dev/gang"))
    ref = Ref(POD, "free", namespace)
    lifted = await cluster.json_patch(ref, [{"op": "remove", "path": "/spec/schedulingGates/0"}])
    assert not lifted["spec"].get("schedulingGates")
    await cluster.delete(ref, uid=pod["metadata"]["uid"])
    assert await cluster.get(ref) is None, "a pod that no node has goes at once"


async def only_the_object_of_a_uid_is_deleted(cluster: Cluster, namespace: str) -> None:
    created = await cluster.create(config_map(namespace, "mine"))
    ref = Ref(CONFIG_MAP, "mine", namespace)
    with pytest.raises(Conflict):
        await cluster.delete(ref, uid="11111111-1111-1111-1111-111111111111")
    assert await cluster.get(ref) is not None
    await cluster.delete(ref, uid=created["metadata"]["uid"])
    assert await cluster.get(ref) is None
    await cluster.delete(ref, uid=created["metadata"]["uid"])  # gone already is fine


async def a_finalizer_holds_an_object_and_none_can_be_added_to_one_that_is_leaving(
    cluster: Cluster, namespace: str
) -> None:
    held = await cluster.create(config_map(namespace, "held", finalizers=["crosscloud.dev/cleanup"]))
    ref = Ref(CONFIG_MAP, "held", namespace)
    await cluster.delete(ref, uid=held["metadata"]["uid"])
    leaving = await cluster.get(ref)
    assert leaving is not None
    assert leaving["metadata"]["deletionTimestamp"]
    with pytest.raises(Refused):
        await cluster.merge_patch(ref, {"metadata": {"finalizers": ["crosscloud.dev/cleanup", "example.org/other"]}})
    version = leaving["metadata"]["resourceVersion"]
    await cluster.merge_patch(ref, {"metadata": {"resourceVersion": version, "finalizers": []}})
    assert await cluster.get(ref) is None


async def a_job_keeps_spec_and_status_apart(cluster: Cluster, namespace: str) -> None:
    obj = job("apart")
    obj["metadata"]["namespace"] = namespace
    created = await cluster.create({**obj, "status": {"restarts": 7}})
    assert not created.get("status"), "a status can't be created"
    ref = Ref(JOB, "apart", namespace)
    status = {"restarts": 1, "attemptsCounted": 0, "observedGeneration": 1}
    patch = {"metadata": {"resourceVersion": created["metadata"]["resourceVersion"]}, "status": status}
    told = await cluster.merge_patch(ref, patch, subresource="status")
    assert told["status"]["restarts"] == 1
    assert told["metadata"]["generation"] == created["metadata"]["generation"]
    marked = await cluster.merge_patch(ref, {"metadata": {"labels": {"a": "b"}}, "status": {"restarts": 5}})
    assert marked["status"]["restarts"] == 1, "the status has a door of its own"
    with pytest.raises(Conflict):
        await cluster.merge_patch(ref, patch, subresource="status")
    gone = await cluster.merge_patch(ref, {"status": {"restarts": None}}, subresource="status")
    assert "restarts" not in gone["status"]
    await cluster.delete(ref, uid=created["metadata"]["uid"])


async def a_node_port_is_given_when_the_service_is_made(cluster: Cluster, namespace: str) -> None:
    spec = {"type": "NodePort", "selector": {"a": "b"}, "ports": [{"name": "link", "port": 7443}]}
    meta = {"name": "ports", "namespace": namespace}
    service = await cluster.create({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})
    assert service["spec"]["ports"][0]["nodePort"] >= 30000
    await cluster.delete(Ref(SERVICE, "ports", namespace), uid=service["metadata"]["uid"])


async def an_event_is_told_once(cluster: Cluster, namespace: str) -> None:
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "told", "namespace": namespace},
        "involvedObject": {"kind": "ConfigMap", "name": "a", "namespace": namespace},
        "type": "Normal",
        "reason": "Planned",
        "message": "words",
        "source": {"component": "crosscloud-operator"},
    }
    await cluster.create(event)
    with pytest.raises(AlreadyExists):
        await cluster.create(event)
    assert [item["reason"] for item in await cluster.list(EVENT, namespace=namespace)].count("Planned") == 1


CHECKS: tuple[Check, ...] = (
    what_is_not_there_is_none,
    a_created_object_has_an_identity_and_can_be_read,
    a_second_object_of_one_name_is_refused_as_already_existing,
    nothing_can_be_created_in_a_namespace_that_is_not_there,
    an_invalid_object_is_refused_with_the_servers_words,
    a_list_is_narrowed_by_namespace_value_and_presence_of_labels,
    a_merge_patch_on_an_older_version_is_a_conflict,
    a_patch_that_changes_nothing_makes_no_new_version,
    what_is_not_there_cannot_be_patched,
    a_gate_is_lifted_once_and_only_where_it_stands,
    the_last_gate_leaves_a_pod_that_may_be_bound,
    only_the_object_of_a_uid_is_deleted,
    a_finalizer_holds_an_object_and_none_can_be_added_to_one_that_is_leaving,
    a_job_keeps_spec_and_status_apart,
    a_node_port_is_given_when_the_service_is_made,
    an_event_is_told_once,
)
