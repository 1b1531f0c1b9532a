"""Gangs on real clusters: all or nothing, nothing promised twice, nothing made for a job that is being deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud import Cloud, Obj, tiny_job, wait_for

from crosscloud_lab.demo import steps
from crosscloud_lab.errors import LabError


def states(cloud: Cloud, prefix: str) -> dict[str, str]:
    jobs = [job for job in cloud.get("hub", "cctj") if job["metadata"]["name"].startswith(prefix)]
    reason = {}
    for job in jobs:
        conditions = job.get("status", {}).get("conditions", [])
        reason[job["metadata"]["name"]] = next((c["reason"] for c in conditions if c["type"] == "Running"), "")
    return reason


def unschedulable(pods: list[Obj]) -> list[str]:
    """Pods whose gates have gone and that the scheduler finds no node for."""
    ungated = [pod for pod in pods if not pod["spec"].get("schedulingGates")]
    return [
        f"{pod['metadata']['name']}: {condition.get('message')}"
        for pod in ungated
        for condition in pod["status"].get("conditions", ())
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
    ]


def test_six_jobs_at_once_never_share_a_gpu_and_all_finish(cloud: Cloud) -> None:
    names = [f"burst-{number}" for number in range(6)]
    cloud.apply("hub", *(tiny_job(name, gpus=4) for name in names))
    waiting_reasons: set[str] = set()

    def look() -> bool:
        for member in ("east", "west"):  # each has room for one of the jobs at a time
            pods = cloud.get(member, "pods", "-l", "crosscloud.dev/replica")
            assert not unschedulable(pods)
            live = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
            assert len({pod["metadata"]["labels"]["crosscloud.dev/job"] for pod in live}) <= 1, "the others wait"
        for job in cloud.get("hub", "cctj"):
            waiting_reasons.update(item["reason"] for item in job.get("status", {}).get("refused", []))
        return all(state == "Succeeded" for state in states(cloud, "burst-").values())

    wait_for("all jobs to succeed", look, seconds=900, every=1)
    assert any("GPU" in reason for reason in waiting_reasons)
    for name in names:
        assert cloud.job(name)["status"]["attempt"]["number"] == 1, "no try was wasted"
        cloud.delete_job(name)


def test_nothing_is_made_for_a_job_that_is_already_being_deleted(cloud: Cloud) -> None:
    job = tiny_job("doomed")  # it would fit
    job["metadata"]["finalizers"] = ["example.com/mine"]
    cloud.kubectl("hub", "scale", "deployment/crosscloud-operator", "-n", "crosscloud-system", "--replicas=0")
    try:
        wait_for("the operator to be gone", lambda: not cloud.operators(), seconds=120)
        cloud.apply("hub", job)
        cloud.kubectl("hub", "delete", "cctj", "doomed", "-n", "ml", "--wait=false")
    finally:
        cloud.kubectl("hub", "scale", "deployment/crosscloud-operator", "-n", "crosscloud-system", "--replicas=1")
    cloud.kubectl("hub", "rollout", "status", "deployment/crosscloud-operator", "-n", "crosscloud-system")
    probe = tiny_job("probe", gpus=64)  # a job that the new operator must have looked at
    cloud.apply("hub", probe)
    cloud.wait_for_reason("probe", "Waiting")
    assert cloud.job("doomed")["metadata"]["finalizers"] == ["example.com/mine"]
    assert not cloud.job("doomed").get("status")
    assert not cloud.objects("doomed")
    patch = '{"metadata": {"finalizers": null}}'
    cloud.kubectl("hub", "patch", "cctj", "doomed", "-n", "ml", "--type=merge", "-p", patch)
    wait_for("the job to go", lambda: "doomed" not in states(cloud, "doomed"))
    cloud.delete_job("probe")


def test_a_job_that_fits_nowhere_waits_with_a_reason_for_each_member_and_keeps_no_pod(cloud: Cloud) -> None:
    cloud.apply("hub", tiny_job("huge", gpus=64))
    cloud.wait_for_reason("huge", "Waiting")
    refused = {item["member"]: item["reason"] for item in cloud.job("huge")["status"]["refused"]}
    assert set(refused) >= {"east", "west"}
    assert all("64" in reason for reason in refused.values())
    assert not cloud.pods("huge")
    cloud.delete_job("huge")


@pytest.fixture
def long_member(cloud: Cloud) -> Iterator[str]:
    """East under the longest name that a member may have."""
    name = "east-" + "y" * 58

    def member(*arguments: str | Path) -> None:
        steps.run(steps.tool("crosscloud"), "--kubeconfig", cloud.lab.kubeconfig("hub"), "member", *arguments)

    member("remove", "east")
    try:
        member("add", name, "--kubeconfig", cloud.lab.kubeconfig("east"), "--allow-namespace", "ml")
        yield name
    finally:
        with contextlib.suppress(LabError):  # it may not have been added
            member("remove", name, "--force")
        steps.add_members(cloud.lab, ["east"])


def test_the_longest_names_of_a_job_and_of_a_member_make_pods_and_gateways_and_end_well(
    cloud: Cloud, long_member: str
) -> None:
    name = "long-" + "x" * 58
    pins = [{"name": f"pin-{index}", "index": index, "members": [at]} for index, at in enumerate((long_member, "west"))]
    cloud.apply("hub", tiny_job(name, replicas=2, replicaOverrides=pins))

    def gateways() -> list[Obj]:
        label = ("-l", f"crosscloud.dev/job={name},app.kubernetes.io/component=gateway")
        return [obj for at in ("east", "west") for obj in cloud.get(at, "services,deployments,pods", *label)]

    wait_for("a Service, a Deployment and a pod of it in each member", lambda: len(gateways()) == 6, every=0.5)
    cloud.wait_for_reason(name, "Succeeded", seconds=400)
    status = cloud.job(name)["status"]
    assert [stage["member"] for stage in status["plan"]] == [long_member, "west"]
    assert len({row["digest"] for row in status["replicaStatuses"]}) == 1, "they have met by way of the gateways"
    cloud.delete_job(name)


def test_a_name_that_no_label_can_hold_is_refused_at_once(cloud: Cloud) -> None:
    assert "63" in cloud.refusal("hub", tiny_job("x" * 64))
