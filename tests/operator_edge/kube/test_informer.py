"""The informer on a real API server, behind a proxy that misbehaves in each way that networks and servers do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from apiserver import ApiServer
from faultproxy import EXPIRED, FaultProxy
from waiting import until

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import CONFIG_MAP, NODE, POD, Obj
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.informer import Informer, Times
from crosscloud_operator.kube.projection import projection, whole

FAST = Times(inactivity=1.0, watch_least=20, watch_most=30, first_pause=0.05, last_pause=0.4, grace=0.1)


class Seen:
    """An informer at work, and what it told."""

    def __init__(self, informer: Informer, changes: list[tuple[str | None, str | None]]) -> None:
        self.informer = informer
        self.changes = changes

    def names(self) -> set[str]:
        return {obj["metadata"]["name"] for obj in self.informer.objects()}


@contextlib.asynccontextmanager
async def watching(url: str, namespace: str, selector: str | None = None, times: Times = FAST) -> AsyncIterator[Seen]:
    changes: list[tuple[str | None, str | None]] = []

    def changed(before: Obj | None, after: Obj | None) -> None:
        changes.append((before and before["metadata"]["name"], after and after["metadata"]["name"]))

    cluster = HttpCluster("east", Access(url))
    informer = Informer(
        cluster, CONFIG_MAP, project=whole, changed=changed, namespace=namespace, selector=selector, times=times
    )
    task = asyncio.create_task(informer.run())
    try:
        yield Seen(informer, changes)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.close()


def config_map(api: ApiServer, namespace: str, name: str, **labels: str) -> None:
    body = {"metadata": {"name": name, "labels": labels}, "data": {"n": "1"}}
    api.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)


def delete(api: ApiServer, namespace: str, name: str) -> None:
    api.request("DELETE", f"/api/v1/namespaces/{namespace}/configmaps/{name}")


async def test_lists_then_follows_every_change(east_api: ApiServer, proxy: FaultProxy, namespace: str) -> None:
    config_map(east_api, namespace, "first")
    async with watching(proxy.url, namespace) as seen:
        assert not seen.informer.synced
        await until(lambda: seen.informer.synced)
        assert seen.names() == {"first"}
        config_map(east_api, namespace, "second")
        await until(lambda: "second" in seen.names())
        delete(east_api, namespace, "first")
        await until(lambda: seen.names() == {"second"})
        assert seen.changes == [(None, "first"), (None, "second"), ("first", None)]


async def test_sees_only_what_its_selector_matches(east_api: ApiServer, proxy: FaultProxy, namespace: str) -> None:
    config_map(east_api, namespace, "ours", team="ml")
    config_map(east_api, namespace, "theirs")
    async with watching(proxy.url, namespace, selector="team=ml") as seen:
        await until(lambda: seen.informer.synced)
        assert seen.names() == {"ours"}
        path = f"/api/v1/namespaces/{namespace}/configmaps/ours"
        east_api.request("PATCH", path, {"metadata": {"labels": {"team": None}}}, "application/merge-patch+json")
        await until(lambda: seen.names() == set())


async def test_after_a_silent_watch_a_list_finds_what_it_hid_and_nobody_is_alarmed(
    east_api: ApiServer, proxy: FaultProxy, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.hang_watches = True
    with caplog.at_level(logging.DEBUG, "crosscloud_operator"):
        async with watching(proxy.url, namespace) as seen:
            await until(lambda: proxy.count(watch=True) == 1)
            config_map(east_api, namespace, "hidden")
            await until(lambda: seen.names() == {"hidden"})
            assert seen.informer.unreachable_since is None
    assert [item.levelname for item in caplog.records if "nothing came for" in item.getMessage()] == ["DEBUG"]
    assert not [item for item in caplog.records if item.levelno > logging.DEBUG]


async def test_a_server_that_answers_no_list_after_a_silent_watch_is_lost(
    proxy: FaultProxy, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.hang_watches = True
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: proxy.count(watch=True) == 1)
        contact = seen.informer.last_contact
        proxy.list_status = 503
        await until(lambda: seen.informer.unreachable_since is not None)
        assert seen.informer.unreachable_since == contact
    warnings = [item.getMessage() for item in caplog.records if item.levelname == "WARNING"]
    assert [text.split(":")[1] for text in warnings] == [" lost sight of configmaps"]


async def test_a_cut_stream_is_resumed_where_it_was(east_api: ApiServer, proxy: FaultProxy, namespace: str) -> None:
    async with watching(proxy.url, namespace, times=Times(first_pause=0.05, last_pause=0.4)) as seen:
        await until(lambda: proxy.count(watch=True) == 1)
        config_map(east_api, namespace, "before")
        await until(lambda: seen.names() == {"before"})
        lists = proxy.count()
        proxy.cut()
        config_map(east_api, namespace, "meanwhile")
        await until(lambda: seen.names() == {"before", "meanwhile"})
        assert proxy.count() == lists  # by a watch from the last version, not by a new list
        assert seen.informer.unreachable_since is None  # a stream that breaks is no loss of contact


@pytest.mark.parametrize("way", ["as the answer's status", "as an event in the stream"])
async def test_an_expired_version_leads_to_a_new_list(
    way: str, east_api: ApiServer, proxy: FaultProxy, namespace: str
) -> None:
    config_map(east_api, namespace, "old")
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: seen.names() == {"old"})
        if way == "as the answer's status":
            proxy.watch_status = 410
        else:
            proxy.watch_event = EXPIRED
        proxy.cut()
        delete(east_api, namespace, "old")
        config_map(east_api, namespace, "new")
        await until(lambda: seen.names() == {"new"})  # the new list alone shows it: every watch expires
        assert ("old", None) in seen.changes
        assert seen.informer.unreachable_since is None
        proxy.watch_status, proxy.watch_event = 0, None
        config_map(east_api, namespace, "later")
        await until(lambda: seen.names() == {"new", "later"})


async def test_a_watch_that_always_expires_does_not_run_hot(proxy: FaultProxy, namespace: str) -> None:
    proxy.watch_status = 410
    times = Times(first_pause=0.2, last_pause=0.4)
    async with watching(proxy.url, namespace, times=times):
        await until(lambda: proxy.count(watch=True) >= 2)
        began, before = time.monotonic(), proxy.count()
        await until(lambda: proxy.count() >= before + 4)
        # Each round waits half of the bound at least: four of them can't be faster, on any machine.
        assert time.monotonic() - began >= 3 * 0.1


async def test_a_snapshot_that_expires_between_two_pages_is_listed_again(
    east_api: ApiServer, proxy: FaultProxy, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosscloud_operator.kube.cluster.PAGE_ITEMS", 2)
    for number in range(5):
        config_map(east_api, namespace, f"c{number}")
    proxy.expire_continue = 2
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: seen.informer.synced)
        assert seen.names() == {f"c{number}" for number in range(5)}
        assert proxy.expire_continue == 0


async def test_pages_that_always_expire_end_in_one_list_without_pages(
    east_api: ApiServer, proxy: FaultProxy, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosscloud_operator.kube.cluster.PAGE_ITEMS", 2)
    for number in range(5):
        config_map(east_api, namespace, f"c{number}")
    proxy.expire_continue = 10**6
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: seen.informer.synced)
        assert len(seen.names()) == 5


@pytest.mark.parametrize(
    "garbage",
    [b"hello\n", b"[]\n", b'{"type":"ADDED"}\n', b'{"type":"ADDED","object":{}}\n', b'{"type":"ADDED","object":5}\n'],
)
async def test_nonsense_ends_nothing(garbage: bytes, east_api: ApiServer, proxy: FaultProxy, namespace: str) -> None:
    proxy.garbage = garbage
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: proxy.count(watch=True) >= 2)
        proxy.garbage = b""
        config_map(east_api, namespace, "sense")
        await until(lambda: seen.names() == {"sense"})


async def test_a_refused_list_says_why_and_is_tried_again(proxy: FaultProxy, namespace: str) -> None:
    proxy.list_status = 403
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: seen.informer.fault is not None)
        assert not seen.informer.synced
        assert seen.informer.unreachable_since is not None
        proxy.list_status = 0
        await until(lambda: seen.informer.synced and seen.informer.unreachable_since is None)


async def test_objects_stay_as_last_seen_while_contact_is_lost(
    east_api: ApiServer, proxy: FaultProxy, namespace: str
) -> None:
    config_map(east_api, namespace, "kept")
    async with watching(proxy.url, namespace) as seen:
        await until(lambda: seen.informer.synced)
        lost = time.time()
        proxy.list_status = proxy.watch_status = 503
        proxy.cut()
        await until(lambda: seen.informer.unreachable_since is not None)
        assert seen.names() == {"kept"}
        assert seen.informer.synced
        assert seen.informer.unreachable_since <= lost + 5  # the last contact, not the last try


async def test_an_event_of_a_megabyte_comes_through(east_api: ApiServer, proxy: FaultProxy, namespace: str) -> None:
    async with watching(proxy.url, namespace, times=Times()) as seen:
        await until(lambda: proxy.count(watch=True) == 1)
        body = {"metadata": {"name": "large"}, "data": {"x": "y" * 900_000}}
        east_api.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)
        await until(lambda: seen.names() == {"large"})


def test_a_nodes_heartbeat_is_no_change() -> None:
    def node(beat: str, version: str) -> dict[str, Any]:
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": beat, "lastTransitionTime": "t"}
        meta = {"name": "n", "resourceVersion": version, "managedFields": [beat], "annotations": {"beat": beat}}
        return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "status": {"conditions": [ready]}}

    assert projection(NODE)(node("1", "10")) == projection(NODE)(node("2", "20"))


def test_pods_of_others_are_kept_by_what_they_take_only() -> None:
    container = {"name": "c", "image": "i", "env": [{"name": "SECRET"}], "resources": {"requests": {"cpu": "1"}}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {"nodeName": "node", "containers": [container], "volumes": [{}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }
    assert projection(POD)(pod) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"nodeName": "node", "containers": [{"resources": {"requests": {"cpu": "1"}}}]},
        "status": {"phase": "Running"},
    }


def test_of_our_pods_the_words_of_all_containers_are_kept() -> None:
    waiting = {"name": "mesh", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    status = {"phase": "Pending", "containerStatuses": [{"name": "trainer"}], "initContainerStatuses": [waiting]}
    meta = {"name": "p", "namespace": "n", "uid": "u", "labels": {"crosscloud.dev/hub": "h"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {**status, "podIP": "10.0.0.1"}}
    assert projection(POD)(pod)["status"] == status
