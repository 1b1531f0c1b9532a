"""The life of a job against the in-memory API: what a user would see, from apply to success."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from cryptography import x509
from operator_core.players import Lab, job, keys_of, lab, report, running

from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    POD,
    SECRET,
    Cluster,
    Obj,
    Ref,
    Refused,
)


async def test_a_job_over_two_members_runs_to_its_end() -> None:
    scene = await running()
    status = scene.status()
    assert [(stage.member, [node.name for node in stage.nodes]) for stage in status.plan] == [
        ("east", ["e1"]),
        ("west", ["w1", "w2"]),
    ]
    assert status.home is not None
    assert status.home.member == "east"
    for pod in scene.pods():
        assert "schedulingGates" not in pod["spec"]
    scene.finish()
    await scene.until(lambda: scene.status().is_true("Succeeded"))
    await scene.until(lambda: scene.attempt().gone_at is not None)
    assert scene.status().started_at == status.attempt.bound_at  # type: ignore[union-attr]
    assert scene.status().finished_at is not None
    assert scene.status().result.uri == "s3://models/demo/result"  # type: ignore[union-attr]
    assert len(scene.pods()) == 3, "finished pods stay for their logs"
    assert not any(cluster.all(DEPLOYMENT) for cluster in scene.world.clusters.values()), "the gateways are gone"
    scene.delete()
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    for cluster in scene.world.clusters.values():
        cluster.collect_garbage()
        left = [key for key in cluster.objects if key[0] not in ("Namespace", "Node")]
        assert left == []
    assert scene.world.real_hub.all(SECRET) == []


async def test_every_fault_of_a_spec_is_in_the_status_at_once() -> None:
    scene = Lab(lab())
    broken = job(
        replicas=0,
        podTemplate={"spec": {"nodeName": "e1", "containers": [{"name": "trainer", "command": ["sh"], "args": []}]}},
    )
    scene.submit(broken)
    assert await scene.look() is None
    condition = scene.condition("Running")
    assert condition.reason == "InvalidSpec"
    assert "spec.replicas: found 0" in condition.message
    template = copy.deepcopy(broken)
    template["metadata"] = {"name": "second", "namespace": "ml"}
    template["spec"]["replicas"] = 1
    scene.submit(template)
    await scene.look("second")
    message = scene.condition("Running", "second").message
    for field in ("nodeName", "containers[0].command", "containers[0].args"):
        assert f"spec.podTemplate.spec.{field}: found" in message


@pytest.mark.parametrize("written", [{}, {"conditions": [{"status": "True"}]}], ids=str)
async def test_a_status_that_somebody_else_has_written_is_told_and_nothing_is_done_until_it_is_put_right(
    written: Obj,
) -> None:
    scene = await running()
    obj = scene.world.real_hub.find(JOB, "demo")
    assert obj is not None
    right = copy.deepcopy(obj["status"])
    scene.world.real_hub.change(obj, attempt={"plannedAt": "2026-01-01T00:00:00Z"}, **written)
    before = {name: len(cluster.created) for name, cluster in scene.world.clusters.items()}
    for _ in range(3):
        assert await scene.look() is None
    obj = scene.world.real_hub.find(JOB, "demo")
    assert obj is not None
    told = [item for item in obj["status"]["conditions"] if item["type"] == "Running"]
    assert [(item["status"], item["reason"]) for item in told] == [("Unknown", "InvalidStatus")]
    assert told[0]["message"].endswith("put back what it wrote, or delete the job and apply it again")
    events = [item for item in scene.world.real_hub.all(EVENT) if item["reason"] == "InvalidStatus"]
    assert told[0]["message"] in {item["message"] for item in events}
    assert "Attempt missing 1 required" in told[0]["message"]
    assert before == {name: len(cluster.created) for name, cluster in scene.world.clusters.items()}
    scene.world.real_hub.change(obj, **right)
    await scene.turn()
    assert scene.status().is_true("Running")


# What an API server takes for a date-time (tried on 1.34), and Python doesn't; and what an older CRD would let through.
NO_TIMES = ["0000-01-01T00:00:00Z", "2026-01-01T00:00:00+24:00", "garbage", "2026-02-31T00:00:00Z", ""]


@pytest.mark.parametrize("text", NO_TIMES)
async def test_times_that_somebody_else_has_written_are_passed_over_told_once_and_put_right(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await running()
    obj = scene.world.real_hub.find(JOB, "demo")
    assert obj is not None
    for place in ("boundAt", "admittedAt", "retryAt"):
        obj["status"]["attempt"][place] = text
    obj["status"]["startedAt"] = text
    obj["status"]["replicaStatuses"] = [{"index": 0, "activity": "Training", "reportedAt": text, "waitingSince": text}]
    obj["status"]["members"][0]["unreachableSince"] = text
    scene.world.real_hub.touch(obj)
    for pod in scene.writers():
        report(scene.world, pod, "Training")
    await scene.until(lambda: scene.reason() == "Training")
    assert scene.attempt().number == 1
    saved = scene.world.real_hub.find(JOB, "demo")
    assert saved is not None
    assert "retryAt" not in saved["status"]["attempt"]
    assert saved["status"]["attempt"]["boundAt"].startswith("20")
    told = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(told) == 7
    assert f"ml/demo: status.attempt.boundAt: found {text!r}; must be a time like" in " ".join(told)


async def test_a_member_that_says_nonsense_for_the_time_of_an_end_stops_no_job() -> None:
    scene = await running(failurePolicy={"attempts": 1})
    victim = scene.pods()[0]
    ended = {"exitCode": 71, "reason": "Error", "finishedAt": "yesterday"}
    container = {"name": "trainer", "state": {"terminated": ended}}
    scene.cluster_of(victim).change(victim, phase="Failed", containerStatuses=[container])
    await scene.until(lambda: scene.attempt().ended_at is not None)


async def test_a_report_with_a_day_that_does_not_exist_brings_no_time_into_the_status() -> None:
    scene = await running()
    pod = scene.writers()[0]
    report(scene.world, pod, "Training")
    waits(scene, pod, 0, "2026-02-31T00:00:00Z")
    await scene.until(lambda: scene.reason() == "WaitingForPeers")
    assert scene.status().replica_statuses[0].waiting_since is None


async def test_a_job_whose_status_can_t_be_read_is_removed_from_all_members_when_it_is_deleted() -> None:
    scene = await running()
    obj = scene.world.real_hub.find(JOB, "demo")
    assert obj is not None
    scene.world.real_hub.change(obj, attempt={}, members=[{}])
    await scene.look()
    scene.delete()
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    for cluster in scene.world.clusters.values():
        cluster.collect_garbage()
        assert [key for key in cluster.objects if key[0] not in ("Namespace", "Node", "Pod")] == []


async def test_each_pod_can_mount_its_own_key_and_no_member_holds_anothers() -> None:
    scene = await running()
    for name, cluster in scene.world.clusters.items():
        secret = cluster.find(SECRET, "demo-a1-keys")
        assert secret is not None
        own = {item for pod in cluster.all(POD) for item in keys_of(pod)}
        assert set(secret["data"]) == own | {"ca.crt"}
        for pod in cluster.all(POD):
            assert len(keys_of(pod)) == 2
            certificate = x509.load_pem_x509_certificate(base64.b64decode(secret["data"][sorted(keys_of(pod))[0]]))
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
            labels = pod["metadata"]["labels"]
            where = {key: labels[f"crosscloud.dev/{key}"] for key in ("attempt", "replica", "stage", "node")}
            path = "/".join(f"{key}/{value}" for key, value in where.items())
            assert uri == f"crosscloud://{labels['crosscloud.dev/job-uid']}/{path}/incarnation/1", name


async def test_waiting_replicas_and_progress_are_told_by_reports_of_this_attempt_only() -> None:
    scene = await running()
    for pod in scene.writers():
        report(scene.world, pod, "Training", step=3)
    await scene.turn()
    status = scene.status()
    assert scene.reason() == "Training"
    assert status.progress is not None
    assert (status.progress.step, status.progress.total_steps, status.progress.tokens) == (3, 10, 600)
    assert status.progress.loss == "2.5000"
    stale = scene.world.clusters["east"].find(CONFIG_MAP, "demo-r0-report")
    assert stale is not None
    document = json.loads(stale["data"]["report.json"])
    stale["data"]["report.json"] = json.dumps({**document, "attempt": 7})
    scene.world.clock += 100
    await scene.turn()
    assert [item.activity for item in scene.status().replica_statuses] == ["Starting", "Training"]
    waiting = {**document, "activity": "Waiting", "sequence": 10**12}
    waiting["progress"] = {**document["progress"], "waitingFor": [1], "waitingSince": "2026-01-01T00:00:00Z"}
    waiting["progress"]["wanBytesSent"] = 4_500_000
    stale["data"]["report.json"] = json.dumps(waiting)
    await scene.turn()
    condition = scene.condition("Running")
    assert condition.reason == "WaitingForPeers"
    assert scene.status().progress.wan_per_step == "1.5 MB"  # type: ignore[union-attr]  # in 3 steps
    assert condition.message == "replica 0 waits for replica 1"
    assert scene.status().replica_statuses[0].waiting_since == "2026-01-01T00:00:00Z"
    waiting["progress"] = {**waiting["progress"], "waitingFor": [], "waitingForStages": [1]}
    stale["data"]["report.json"] = json.dumps({**waiting, "sequence": 10**12 + 1})
    await scene.turn()
    condition = scene.condition("Running")
    assert (condition.reason, condition.message) == ("WaitingForPeers", "replica 0 waits for its own stage 1")
    stale["data"]["report.json"] = "{not json"
    await scene.turn()
    assert scene.attempt().number == 1


@pytest.mark.parametrize("length", [63, 64, 200, 253])
async def test_a_job_with_a_long_name_runs_like_any_other(length: int) -> None:
    # C01: all derived names and labels are shortened.
    name = "n" * length
    scene = Lab(lab())
    scene.submit(job(name))
    await scene.until(lambda: scene.status(name).is_true("Running"))
    for cluster in scene.world.clusters.values():
        for kind, made in cluster.created:
            assert len(made) <= 63, kind


async def test_each_step_of_a_jobs_life_is_one_event() -> None:
    scene = await running()
    scene.finish()
    await scene.until(lambda: scene.status().is_true("Succeeded"))
    reasons = sorted(event["reason"] for event in scene.world.real_hub.all(EVENT))
    assert reasons == ["Admitted", "Planned", "Preparing", "Started", "Succeeded"]


def waits(scene: Lab, pod: Obj, replica: int, since: str) -> None:
    """The replica's last report, but that it waits for the other one."""
    found = scene.cluster_of(pod).find(CONFIG_MAP, f"demo-r{replica}-report")
    assert found is not None
    document = json.loads(found["data"]["report.json"])
    document |= {"activity": "Waiting", "sequence": document["sequence"] + 1}
    document["progress"] |= {"waitingFor": [1 - replica], "waitingSince": since}
    found["data"]["report.json"] = json.dumps(document)


async def test_waits_for_peers_are_one_counted_warning_and_one_counted_word_that_they_are_over() -> None:
    scene = await running()
    first, second = scene.writers()
    for time in ("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", "2026-01-01T00:02:00Z"):
        for step in (1, 2):
            report(scene.world, first, "Training", step=step)
            report(scene.world, second, "Training", step=step)
            await scene.turn(seconds=20)
        waits(scene, first, 0, time)
        for _ in range(3):
            await scene.turn(seconds=20)
            assert scene.reason() == "WaitingForPeers"
    report(scene.world, first, "Training", step=9)
    await scene.turn()
    told = {
        event["reason"]: (event["type"], event["message"], event["count"])
        for event in scene.world.real_hub.all(EVENT)
        if event["reason"] in ("WaitingForPeers", "PeersBack")
    }
    assert told == {
        "WaitingForPeers": ("Warning", "replica 0 waits for replica 1", 3),
        "PeersBack": ("Normal", "no replica waits for another any more", 3),
    }


async def test_progress_alone_is_written_every_ten_seconds_and_what_replicas_do_at_once() -> None:
    scene = await running()
    first, second = scene.writers()
    for pod in (first, second):
        report(scene.world, pod, "Training", step=1)
    await scene.turn()

    def version() -> str:
        found = scene.world.real_hub.find(JOB, "demo")
        assert found is not None
        return str(found["metadata"]["resourceVersion"])

    seen = {version()}
    for second_of_minute in range(60):
        report(scene.world, second if second_of_minute % 2 else first, "Training", step=2 + second_of_minute // 2)
        await scene.turn()
        seen.add(version())
    assert 5 <= len(seen) - 1 <= 6
    before = version()
    waits(scene, first, 0, "2026-01-01T00:00:00Z")
    await scene.turn()
    assert version() != before
    assert scene.reason() == "WaitingForPeers"


class Denying:
    """A hub whose admission policies deny every change of a job but that of its status."""

    def __init__(self, hub: Cluster) -> None:
        self._hub = hub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)

    async def merge_patch(self, ref: Ref, patch: Obj, *, subresource: str | None = None) -> Obj:
        if subresource is None:
            raise Refused("ValidatingAdmissionPolicy 'other' denied request", reason="Invalid")
        return await self._hub.merge_patch(ref, patch, subresource=subresource)


async def test_a_job_that_a_policy_lets_nobody_change_is_no_conflict_but_told_in_the_policys_words() -> None:
    scene = Lab(lab())
    scene.submit(job())
    scene.world.restart(Denying)
    with pytest.raises(Refused, match="ValidatingAdmissionPolicy 'other' denied request"):
        await scene.look()
    assert not scene.pods(), "nothing is made before the finalizer is there"
