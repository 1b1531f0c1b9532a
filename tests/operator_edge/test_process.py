"""The operator as a process, on a real hub: it leads or stands by, takes over, and leaves nothing of kopf's behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import JOBS, job, minimal_spec
from operatorprocess import NAMESPACE, operator_process
from waiting import wait_until

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/crosscloud-operator"


@pytest.fixture(autouse=True)
def clean(hub_api: ApiServer) -> Iterator[None]:
    """Each test finds a hub without jobs and without a lease."""
    yield
    for item in hub_api.request("GET", "/apis/crosscloud.dev/v1alpha1/crosscloudtrainingjobs")["items"]:
        path = f"{JOBS}/{item['metadata']['name']}"
        patch = {"metadata": {"finalizers": None}}
        hub_api.request("PATCH", path, patch, "application/merge-patch+json")
        hub_api.raw("DELETE", path)
    hub_api.raw("DELETE", LEASE)


def submit(hub_api: ApiServer, name: str) -> None:
    hub_api.namespace("ml")
    hub_api.request("POST", JOBS, job(minimal_spec(), name))


def saved(hub_api: ApiServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = hub_api.request("GET", f"{JOBS}/{name}")
    return found


def looked_at(hub_api: ApiServer, name: str) -> bool:
    return bool((saved(hub_api, name).get("status") or {}).get("conditions"))


def test_one_leads_another_stands_by_and_takes_over_when_the_first_is_killed(
    hub_api: ApiServer, tmp_path: Path
) -> None:
    with operator_process(hub_api.kubeconfig, tmp_path, "first") as first:
        wait_until(lambda: first.ready, 60)
        assert first.metric("crosscloud_operator_leader") == 1
        submit(hub_api, "before")
        wait_until(lambda: looked_at(hub_api, "before"))
        with operator_process(hub_api.kubeconfig, tmp_path, "second") as second:
            wait_until(lambda: "standing by" in second.get("/readyz")[1], 60)
            assert second.get("/readyz")[0] == 503
            assert second.get("/healthz")[0] == 200
            assert second.metric("crosscloud_operator_leader") == 0
            assert second.metric("crosscloud_jobs") is None
            first.process.kill()
            wait_until(lambda: second.ready, 60)
            submit(hub_api, "after")
            wait_until(lambda: looked_at(hub_api, "after"))
            holder = hub_api.request("GET", LEASE)["spec"]["holderIdentity"]
            assert holder.startswith("second_")


def test_a_job_is_looked_at_and_carries_nothing_of_kopfs(hub_api: ApiServer, tmp_path: Path) -> None:
    with operator_process(hub_api.kubeconfig, tmp_path, "only") as only:
        wait_until(lambda: only.ready, 60)
        submit(hub_api, "plain")
        wait_until(lambda: looked_at(hub_api, "plain"))
        meta = saved(hub_api, "plain")["metadata"]
        assert "annotations" not in meta
        assert all(name.startswith("crosscloud.dev/") for name in meta.get("finalizers", ()))
        events = hub_api.request("GET", "/api/v1/namespaces/ml/events")["items"]
        assert not [event for event in events if event.get("source", {}).get("component") == "kopf"]
        wait_until(lambda: only.metric("crosscloud_job_info", job="plain") == 1)
        assert (only.metric("crosscloud_operator_reconcile_seconds_count") or 0) >= 1
        hub_api.request("DELETE", f"{JOBS}/plain")
        wait_until(lambda: hub_api.raw("GET", f"{JOBS}/plain")[0] == 404)
        wait_until(lambda: only.metric("crosscloud_job_info", job="plain") is None)


def test_sigterm_ends_it_and_hands_the_lease_over(hub_api: ApiServer, tmp_path: Path) -> None:
    with operator_process(hub_api.kubeconfig, tmp_path, "only", CROSSCLOUD_LEASE_SECONDS="60") as only:
        wait_until(lambda: only.ready, 60)
        only.process.send_signal(signal.SIGTERM)
        assert only.process.wait(30) == 0
        assert hub_api.request("GET", LEASE)["spec"]["holderIdentity"] == ""
        assert "Traceback" not in only.log.read_text()


def test_a_lost_lease_ends_the_process(hub_api: ApiServer, tmp_path: Path) -> None:
    with operator_process(hub_api.kubeconfig, tmp_path, "only") as only:
        wait_until(lambda: only.ready, 60)
        patch = {"spec": {"holderIdentity": "somebody-else"}}
        hub_api.request("PATCH", LEASE, patch, "application/merge-patch+json")
        assert only.process.wait(30) == 3
        assert "the lease was lost" in only.log.read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"CROSSCLOUD_HTTP_PORT": "http"}, ["CROSSCLOUD_HTTP_PORT: found 'http'; must be a number from 0 to 65535"]),
        (
            {"CROSSCLOUD_LOG_LEVEL": "LOUD", "CROSSCLOUD_NAMESPACE": "A_B", "CROSSCLOUD_BIND_TIMEOUT": "-1"},
            ["CROSSCLOUD_LOG_LEVEL: found 'LOUD'", "CROSSCLOUD_NAMESPACE: found 'A_B'", "CROSSCLOUD_BIND_TIMEOUT"],
        ),
        ({"KUBECONFIG": "/nope"}, ["found '/nope', but there is no such file"]),
        ({"CROSSCLOUD_TRAINER_IMAGE": ""}, ["CROSSCLOUD_TRAINER_IMAGE"]),
    ],
)
def test_bad_settings_end_it_at_once_with_one_line_each(
    settings: dict[str, str], words: list[str], hub_api: ApiServer, tmp_path: Path
) -> None:
    with operator_process(hub_api.kubeconfig, tmp_path, "bad", **settings) as bad:
        assert bad.process.wait(60) == 2
        text = bad.log.read_text()
        assert "Traceback" not in text
        for word in words:
            assert word in text
