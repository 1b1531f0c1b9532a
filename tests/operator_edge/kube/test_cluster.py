"""What HttpCluster makes of answers, and of their absence, beyond what every Cluster must do (conformance)."""

from __future__ import annotations

import asyncio
import time

import pytest
from apiserver import ApiServer
from faultproxy import FaultProxy

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.answers import Expired, error_of
from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    POD,
    AlreadyExists,
    ApiError,
    Conflict,
    NotFound,
    Obj,
    Ref,
    Refused,
    Unreachable,
)
from crosscloud_operator.kube.cluster import HttpCluster, path_of


def by_token(cluster: HttpCluster, token: str) -> HttpCluster:
    """The same server for another user."""
    return HttpCluster("east", Access(cluster.access.server, ca=cluster.access.ca, token=token))


def pod(namespace: str, **spec: object) -> Obj:
    containers = [{"name": "trainer", "image": "example/trainer"}]
    meta = {"name": "p", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": containers, **spec}}


async def test_a_misspelt_field_of_a_pod_is_refused_by_its_name(east: HttpCluster, namespace: str) -> None:
    with pytest.raises(Refused, match="nodeSelektor"):
        await east.create(pod(namespace, nodeSelektor={"a": "b"}))
    assert await east.get(Ref(POD, "p", namespace)) is None


async def test_a_pod_of_the_wrong_type_is_refused_by_its_field(east: HttpCluster, namespace: str) -> None:
    with pytest.raises(Refused, match="priority"):
        await east.create(pod(namespace, priority="high"))


async def test_pod_security_refuses_in_the_servers_words(
    east: HttpCluster, east_api: ApiServer, namespace: str
) -> None:
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    east_api.request("PATCH", f"/api/v1/namespaces/{namespace}", labels, "application/merge-patch+json")
    with pytest.raises(Refused, match="PodSecurity"):
        await east.create(pod(namespace, hostNetwork=True))


async def test_a_limit_range_refuses_in_the_servers_words(
    east: HttpCluster, east_api: ApiServer, namespace: str
) -> None:
    limit = {"type": "Container", "max": {"cpu": "1"}}
    body = {"metadata": {"name": "small"}, "spec": {"limits": [limit]}}
    east_api.request("POST", f"/api/v1/namespaces/{namespace}/limitranges", body)
    containers = [{"name": "trainer", "image": "i", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "2"}}}]
    with pytest.raises(Refused, match="maximum cpu usage per Container is 1"):
        await east.create({**pod(namespace), "spec": {"containers": containers}})


async def test_our_changes_carry_our_name(east: HttpCluster, namespace: str) -> None:
    made = await east.create(pod(namespace))
    assert {entry["manager"] for entry in made["metadata"]["managedFields"]} == {"crosscloud-operator"}


async def test_a_token_is_granted_and_works(east_api: ApiServer, east: HttpCluster, namespace: str) -> None:
    east_api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "me"}})
    granted = await east.request_token(namespace, "me", 600)
    mine = by_token(east, granted["token"])
    try:
        assert (await mine.version()).startswith("v1.")
        with pytest.raises(Refused, match=f"system:serviceaccount:{namespace}:me"):
            await mine.list(POD)
    finally:
        await mine.close()


async def test_a_wrong_token_is_unreachable_not_refused(east: HttpCluster) -> None:
    wrong = by_token(east, "no.such.token")
    try:
        with pytest.raises(Unreachable) as fault:
            await wrong.list(POD)
        assert fault.value.reason == "Unauthorized"
    finally:
        await wrong.close()


async def test_another_authority_is_unreachable(east: HttpCluster, hub_api: ApiServer) -> None:
    wrong = HttpCluster("east", Access(east.access.server, ca=hub_api.ca, token="secret"))
    try:
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await wrong.version()
    finally:
        await wrong.close()


async def test_nobody_listening_is_unreachable() -> None:
    cluster = HttpCluster("gone", Access("https://127.0.0.1:1"))
    try:
        with pytest.raises(Unreachable, match="gone"):
            await cluster.get(Ref(CONFIG_MAP, "a", "b"))
    finally:
        await cluster.close()


async def test_a_hanging_server_costs_one_deadline_then_nothing_for_a_while(
    proxy: FaultProxy, proxied: HttpCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosscloud_operator.kube.cluster.PAGE_SECONDS", 0.3)
    proxy.hang = True
    with pytest.raises(Unreachable, match="no answer in time"):
        await proxied.list(POD)
    for _ in range(20):
        with pytest.raises(Unreachable, match="no answer a moment ago"):
            await proxied.list(POD)
    assert proxy.count() == 1


async def test_a_hanging_server_does_not_slow_another(
    proxy: FaultProxy, proxied: HttpCluster, east: HttpCluster
) -> None:
    proxy.hang = True
    hanging = [asyncio.create_task(proxied.list(POD)) for _ in range(20)]
    try:
        for _ in range(20):
            await east.list(POD)
        assert not any(task.done() for task in hanging)
    finally:
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_new_credentials_are_used_by_the_next_call(east: HttpCluster, namespace: str) -> None:
    cluster = by_token(east, "old")
    try:
        with pytest.raises(Unreachable):
            await cluster.list(POD, namespace=namespace)
        await cluster.replace(east.access)
        assert list(await cluster.list(POD, namespace=namespace)) == []
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    ("method", "status", "reason", "expected"),
    [
        ("GET", 404, "NotFound", NotFound),
        ("POST", 409, "AlreadyExists", AlreadyExists),
        ("POST", 409, "Conflict", Unreachable),  # a quota that is being changed: try again
        ("PATCH", 409, "Conflict", Conflict),
        ("DELETE", 409, "Conflict", Conflict),
        ("POST", 400, "BadRequest", Refused),
        ("POST", 403, "Forbidden", Refused),
        ("POST", 413, "RequestEntityTooLarge", Refused),
        ("POST", 422, "Invalid", Refused),
        ("GET", 401, "Unauthorized", Unreachable),
        ("GET", 302, "", Unreachable),
        ("GET", 408, "Timeout", Unreachable),
        ("GET", 410, "Expired", Expired),
        ("GET", 429, "TooManyRequests", Unreachable),
        ("GET", 500, "InternalError", Unreachable),
        ("GET", 503, "ServiceUnavailable", Unreachable),
        ("GET", 504, "Timeout", Unreachable),
    ],
)
def test_each_status_has_its_meaning(method: str, status: int, reason: str, expected: type[ApiError]) -> None:
    fault = error_of(method, status, f'{{"message": "words", "reason": "{reason}"}}'.encode())
    assert type(fault) is expected
    assert "words" in fault.message


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad Gateway</html>", b"[]", b"\xff\xfe", b'{"details": 5}', b"[" * 10_000]
)
def test_an_answer_that_is_no_status_still_has_a_meaning(body: bytes) -> None:
    assert isinstance(error_of("GET", 502, body), Unreachable)


def test_names_can_not_lead_to_another_path() -> None:
    assert path_of(POD, "ns/../kube-system", "../x") == "/api/v1/namespaces/ns%2F..%2Fkube-system/pods/..%2Fx"


async def test_a_redirect_is_not_followed(east: HttpCluster, namespace: str) -> None:
    from aiohttp import web

    asked: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound(f"{east.access.server}/version")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster = HttpCluster("east", Access(f"http://127.0.0.1:{runner.addresses[0][1]}", token="secret"))
    try:
        with pytest.raises(Unreachable, match="302"):
            await cluster.version()
        assert asked == ["/version"]
    finally:
        await cluster.close()
        await runner.cleanup()


async def test_a_call_never_lasts_longer_than_its_deadline(
    proxy: FaultProxy, proxied: HttpCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosscloud_operator.kube.cluster.CALL_SECONDS", 0.2)
    monkeypatch.setattr(HttpCluster._object, "__kwdefaults__", {**HttpCluster._object.__kwdefaults__, "deadline": 0.2})
    proxy.hang = True
    began = time.monotonic()
    with pytest.raises(Unreachable):
        await proxied.version()
    assert time.monotonic() - began < 10
