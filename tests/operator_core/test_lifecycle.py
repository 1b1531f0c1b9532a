"""The life of a job against the in-memory API: what a user would see, from apply to delete."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from typing import Any

import pytest
from cryptography import x509
from operator_core.memory import MemoryWorld
from operator_core.players import Flaky, Lab, end_pod, job, lab, report, trainer_container

from crosscloud_operator.domain.record import rfc3339, seconds
from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    KINDS,
    MEMBER,
    NAMESPACE,
    NODE,
    POD,
    SECRET,
    Ref,
)
from crosscloud_trainer.contract import ExitCode


async def running(**spec: object) -> Lab:
    """A lab in which `demo` runs."""
    scene = Lab(lab())
    scene.submit(job(**spec))  # type: ignore[arg-type]
    await scene.until(lambda: scene.status().is_true("Running"))
    return scene


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
    await scene.until(lambda: scene.status().attempt.gone_at is not None)  # type: ignore[union-attr]
    assert scene.status().result.uri == "s3://models/demo/result"  # type: ignore[union-attr]
    assert len(scene.pods()) == 3, "finished pods stay for their logs"
    assert not any(cluster.all(DEPLOYMENT) for cluster in scene.world.clusters.values()), "the gateways are gone"
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    for cluster in scene.world.clusters.values():
        cluster.collect_garbage()
        left = [key for key in cluster.objects if key[0] not in ("Namespace", "Node")]
        assert left == []
    assert scene.world.real_hub.all(SECRET) == []


async def test_the_plan_is_saved_before_the_first_object_of_the_attempt() -> None:
    scene = Lab(lab())
    calls: list[str] = []

    def witness(cluster: Any) -> Any:
        return Flaky(cluster, lambda _: calls.append(f"{cluster.name}: {scene.status().attempt is not None}"))

    scene.world.restart(witness)
    scene.submit(job())
    judge = [
        lambda obj: (
            None if "crosscloud.dev/attempt" not in obj["metadata"]["labels"] or scene.status().plan else "early"
        )
    ]
    for cluster in scene.world.clusters.values():
        cluster.judges = judge
    await scene.until(lambda: scene.status().is_true("Running"))
    assert scene.status().attempt.number == 1  # type: ignore[union-attr]


async def test_no_gate_is_lifted_before_every_member_has_accepted_every_pod() -> None:
    scene = Lab(lab())
    scene.submit(job())
    west = scene.world.clusters["west"]
    west.judges = [lambda obj: "exceeded quota: pods=0" if obj["kind"] == "Pod" else None]
    for _ in range(30):
        await scene.turn()
        assert all(pod["spec"].get("schedulingGates") for pod in scene.pods())
        assert scene.reason() in ("Admitting", "Stopping", "Retrying", "Preparing", "Waiting")
    status = scene.status()
    assert status.attempt is not None
    assert status.attempt.number > 1
    assert status.attempts_counted == 0, "an attempt that never ran doesn't count"
    cause = status.attempt.cause
    assert cause is not None
    assert cause.reason == "Refused"
    assert "west" in cause.message
    assert "exceeded quota: pods=0" in cause.message
    west.judges = []
    await scene.until(lambda: scene.status().is_true("Running"), turns=100)
    assert scene.status().restarts == 0


async def test_gates_stay_while_a_member_does_not_answer_and_all_is_taken_back_in_time() -> None:
    scene = Lab(lab())
    scene.submit(job())
    west = scene.world.clusters["west"]
    made = {"left": 1}

    def fate(call: str) -> str | None:
        pods = [name for kind, name in west.created if kind == "Pod"]
        return "fail before" if call == "create" and len(pods) >= made["left"] else None

    scene.world.restart(lambda cluster: Flaky(cluster, fate) if cluster is west else cluster)
    await scene.look()
    assert scene.reason() == "Admitting"
    assert len(scene.pods()) == 2, "one of the two pods in west is missing"
    for _ in range(70):
        await scene.turn()
        assert all(pod["spec"].get("schedulingGates") for pod in scene.pods())
    cause = scene.status().attempt.cause  # type: ignore[union-attr]
    assert cause is not None
    assert (cause.reason, cause.counted) == ("AdmissionTimeout", False)
    assert "west/demo-a1-r1-i1-s0-n1" in cause.message
    assert scene.pods() == []
    made["left"] = 10
    await scene.until(lambda: scene.status().is_true("Running"))


@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "Pod"])
async def test_a_refusal_that_stays_is_written_once_and_not_at_every_try(kind: str) -> None:
    # Each write of a status wakes the job again: a status that flaps would be a loop without a pause.
    scene = Lab(lab())
    obj = scene.submit(job())
    scene.world.clusters["west"].judges = [lambda obj: f"no {kind}" if obj["kind"] == kind else None]
    versions, attempts = set(), set()
    for _ in range(30):
        await scene.turn(seconds=10)
        await scene.look()
        obj = scene.world.jobs()[0]
        versions.add(obj["metadata"]["resourceVersion"])
        attempts.add(scene.status().attempt.number if scene.status().attempt else 0)  # type: ignore[union-attr]
        placed = scene.status().condition("Placed")
        assert placed is not None
        assert placed.reason in ("Refused", "Retrying", "Preparing", "Planned")
        assert f"no {kind}" in placed.message + scene.status().condition("Running").message  # type: ignore[union-attr]
    assert len(versions) <= 4 * len(attempts)
    scene.world.clusters["west"].judges = []
    await scene.until(lambda: scene.status().is_true("Running"), seconds=10)


async def test_an_anchor_deleted_by_hand_costs_an_attempt_and_nothing_else() -> None:
    scene = await running()
    west = scene.world.clusters["west"]
    collect, west.collect_garbage = west.collect_garbage, lambda: None  # type: ignore[method-assign]
    west.remove(Ref(CONFIG_MAP, "demo-anchor", "ml"))
    victim = scene.pods()[0]
    end_pod(scene.cluster_of(victim), victim, 1, scene.world.clock, "Error")
    for _ in range(20):
        await scene.turn()
    assert "is being deleted" in scene.status().condition("Running").message, "what the old anchor owned will go"  # type: ignore[union-attr]
    west.collect_garbage = collect  # type: ignore[method-assign]
    await scene.until(lambda: scene.status().is_true("Running"))
    anchor = west.find(CONFIG_MAP, "demo-anchor")
    assert anchor is not None
    owners = {owner["uid"] for pod in west.all(POD) for owner in pod["metadata"]["ownerReferences"]}
    assert owners == {anchor["metadata"]["uid"]}


async def test_pauses_between_attempts_grow_up_to_a_limit() -> None:
    scene = Lab(lab())
    scene.submit(job())
    scene.world.clusters["west"].judges = [lambda obj: "no" if obj["kind"] == "Pod" else None]
    pauses: dict[int, float] = {}
    for _ in range(500):
        await scene.turn(seconds=3)
        attempt = scene.status().attempt
        if attempt and attempt.gone_at and attempt.retry_at:
            pauses[attempt.number] = seconds(attempt.retry_at) - seconds(attempt.gone_at)
    assert [pauses[number] for number in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]


async def test_when_not_all_pods_are_bound_in_time_all_are_taken_back() -> None:
    scene = Lab(lab())
    scene.submit(job())
    west = scene.world.clusters["west"]
    await scene.look()
    assert scene.reason() == "Binding"
    intruder = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "intruder", "namespace": "ml", "labels": {}},
        "spec": {"nodeName": "w2", "containers": [{"name": "a", "resources": {"requests": {"nvidia.com/gpu": "2"}}}]},
        "status": {"phase": "Running"},
    }
    west.put(intruder)
    attempt_one = {pod["metadata"]["uid"] for pod in scene.pods()}
    await scene.until(lambda: scene.reason() == "Stopping", turns=80)
    cause = scene.status().attempt.cause  # type: ignore[union-attr]
    assert cause is not None
    assert cause.reason == "BindTimeout"
    assert "Unschedulable: no room" in cause.message
    assert not cause.counted
    await scene.until(lambda: scene.reason() == "Retrying")
    assert scene.pods() == []
    await scene.until(lambda: scene.reason() == "Waiting")
    west.purge(intruder)
    await scene.until(lambda: scene.status().is_true("Running"))
    assert not attempt_one & {pod["metadata"]["uid"] for pod in scene.pods()}
    assert scene.status().attempts_counted == 0


async def test_a_failed_pod_ends_the_attempt_and_the_next_begins_when_all_its_pods_are_gone() -> None:
    scene = await running()
    victim = scene.pods()[-1]
    end_pod(scene.cluster_of(victim), victim, 1, scene.world.clock, "Error")
    for _ in range(40):
        await scene.turn()
        attempts = {pod["metadata"]["labels"]["crosscloud.dev/attempt"] for pod in scene.pods()}
        assert len(attempts) <= 1, "pods of two attempts never live side by side"
    status = scene.status()
    assert status.is_true("Running")
    assert (status.attempt.number, status.attempts_counted, status.restarts) == (2, 1, 1)  # type: ignore[union-attr]


async def test_the_last_attempt_fails_the_job_and_leaves_its_ended_pods_for_their_logs() -> None:
    scene = await running(failurePolicy={"attempts": 2})
    for _ in range(2):
        await scene.until(lambda: scene.status().is_true("Running"))
        victim = scene.pods()[0]
        end_pod(scene.cluster_of(victim), victim, 1, scene.world.clock, "Error")
        await scene.turn()
    await scene.until(lambda: scene.status().is_true("Failed"))
    status = scene.status()
    assert "ended with exit code 1" in status.condition("Failed").message  # type: ignore[union-attr]
    assert "2 of 2 attempts used" in status.condition("Failed").message  # type: ignore[union-attr]
    assert not status.is_true("Running")
    (left,) = scene.pods()
    assert left["status"]["phase"] == "Failed"
    uid = left["metadata"]["uid"]
    for _ in range(5):
        await scene.turn(seconds=100)
    assert [pod["metadata"]["uid"] for pod in scene.pods()] == [uid]


@pytest.mark.parametrize(
    ("code", "counted", "retried"),
    [
        (ExitCode.INVALID_INPUT, 1, False),
        (ExitCode.CONTRACT_TOO_NEW, 1, False),
        (ExitCode.STORAGE_REFUSED, 1, False),
        (ExitCode.STORAGE_UNREACHABLE, 1, True),
        (ExitCode.PEERS_MISSING, 0, True),
        (ExitCode.DIVERGED, 1, True),
        (1, 1, True),
        (139, 1, True),
    ],
)
async def test_an_exit_code_decides_whether_it_counts_and_whether_it_is_tried_again(
    code: int, counted: int, retried: bool
) -> None:
    scene = await running()
    for victim in scene.pods():
        end_pod(scene.cluster_of(victim), victim, code, scene.world.clock, "Error")
    await scene.until(lambda: scene.status().attempt.gone_at is not None)  # type: ignore[union-attr]
    status = scene.status()
    assert status.attempts_counted == counted
    assert status.is_true("Failed") is not retried
    assert status.attempt.cause.exit_code == code  # type: ignore[union-attr]


async def test_the_cause_is_the_pod_that_failed_by_itself_not_those_that_lost_it() -> None:
    scene = await running()
    first, _, third = scene.pods()
    end_pod(scene.cluster_of(first), first, ExitCode.PEER_LOST, scene.world.clock, "Error")
    await scene.turn(seconds=2)
    assert scene.status().attempt.cause is None, "who has only lost a peer waits for that one's word"  # type: ignore[union-attr]
    end_pod(scene.cluster_of(third), third, ExitCode.INVALID_INPUT, scene.world.clock, "Error")
    await scene.turn()
    cause = scene.status().attempt.cause  # type: ignore[union-attr]
    assert cause is not None
    assert (cause.pod, cause.exit_code) == (third["metadata"]["name"], 64)
    assert "INVALID_INPUT" in cause.message


@pytest.mark.parametrize("reason", ["Evicted", "NodeShutdown", "Preempting", ""])
async def test_a_pod_failed_from_outside_does_not_use_up_the_users_attempts(reason: str) -> None:
    # C17: phase Failed with no containerStatuses at all.
    scene = await running()
    victim = scene.pods()[0]
    cluster = scene.cluster_of(victim)
    cluster.change(victim, phase="Failed", reason=reason, containerStatuses=[])
    await scene.until(lambda: scene.status().attempt.number == 2)  # type: ignore[union-attr]
    assert scene.status().attempts_counted == 0


async def test_a_disruption_target_killed_with_137_does_not_count_but_out_of_memory_does() -> None:
    for conditions, reason, counted in (
        ([{"type": "DisruptionTarget", "status": "True"}], "Error", 0),
        ([], "OOMKilled", 1),
        ([{"type": "DisruptionTarget", "status": "True"}], "OOMKilled", 1),
    ):
        scene = await running()
        victim = scene.pods()[0]
        end_pod(scene.cluster_of(victim), victim, 137, scene.world.clock, reason)
        victim["status"]["conditions"] = conditions
        await scene.until(lambda scene=scene: scene.status().attempt.gone_at is not None)  # type: ignore[misc]
        assert scene.status().attempts_counted == counted


@pytest.mark.parametrize("code", [0, 1])
async def test_the_trainer_container_decides_while_a_sidecar_runs_on(code: int) -> None:
    # C21: phase Running, trainer terminated, sidecar running.
    scene = await running(podTemplate={"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}})
    for pod in scene.pods():
        assert [item["name"] for item in pod["spec"]["containers"]] == ["trainer", "proxy"]
        if any(item["name"] == "CROSSCLOUD_REPORT" for item in pod["spec"]["containers"][0]["env"]) and code == 0:
            report(scene.world, pod, "Ended", "Succeeded")
        ended = {"terminated": {"exitCode": code, "reason": "Done", "finishedAt": rfc3339(scene.world.clock)}}
        statuses = [trainer_container(ended), {"name": "proxy", "state": {"running": {}}}]
        scene.cluster_of(pod).change(pod, phase="Running", containerStatuses=statuses)
    first = {pod["metadata"]["uid"] for pod in scene.pods()}
    await scene.until(lambda: not first & {pod["metadata"]["uid"] for pod in scene.pods()})
    assert scene.status().is_true("Succeeded") is (code == 0)
    assert scene.status().attempts_counted == code


async def test_a_deleted_pod_ends_the_attempt_without_counting() -> None:
    scene = await running()
    victim = scene.pods()[1]
    scene.cluster_of(victim).remove(Ref(POD, victim["metadata"]["name"], "ml"))
    await scene.until(lambda: scene.status().attempt.number == 2 and scene.status().is_true("Running"))  # type: ignore[union-attr]
    assert scene.status().attempts_counted == 0
    assert scene.status().restarts == 1


async def test_finished_pods_that_vanish_while_the_operator_is_away_are_not_run_again() -> None:
    # C25: completion records outlive the pods.
    scene = await running()
    created = {name: list(cluster.created) for name, cluster in scene.world.clusters.items()}
    scene.finish()
    for pod in scene.pods():
        scene.cluster_of(pod).purge(pod)
    scene.world.restart()
    await scene.until(lambda: scene.status().is_true("Succeeded"))
    for name, cluster in scene.world.clusters.items():
        assert cluster.created == created[name]


async def test_pods_that_vanish_between_two_looks_before_the_informer_shows_their_words() -> None:
    scene = await running()
    for name in scene.world.clusters:
        scene.world.cache(name, CONFIG_MAP).freeze()  # type: ignore[union-attr]
    scene.finish()
    for pod in scene.pods():
        scene.cluster_of(pod).purge(pod)
    await scene.turn()
    assert scene.status().is_true("Succeeded")


async def test_pods_that_end_well_without_a_completion_record_are_tried_again_and_counted() -> None:
    scene = await running()
    for pod in scene.pods():
        end_pod(scene.cluster_of(pod), pod, 0, scene.world.clock)
    await scene.until(lambda: scene.status().attempt.number == 2)  # type: ignore[union-attr]
    assert scene.status().attempts_counted == 1


async def test_pods_that_the_informer_does_not_show_yet_are_not_called_lost() -> None:
    scene = Lab(lab())
    scene.submit(job())
    for name in scene.world.clusters:
        scene.world.cache(name, POD).freeze()  # type: ignore[union-attr]
    await scene.until(lambda: scene.status().is_true("Running"))
    for _ in range(5):
        await scene.turn()
    assert scene.status().attempt.number == 1  # type: ignore[union-attr]


async def test_a_member_out_of_reach_is_unknown_and_nothing_is_evicted() -> None:
    scene = await running()
    before = {pod["metadata"]["uid"] for pod in scene.pods()}
    lost_at = rfc3339(scene.world.clock)
    scene.world.lose("west")
    await scene.turn()
    scene.world.restart()
    scene.world.clusters["west"].lost_at = scene.world.clock  # a new process knows only its own first failure
    for _ in range(10):
        await scene.turn(seconds=600)
    status = scene.status()
    running_now = status.condition("Running")
    assert running_now is not None
    assert status.attempt.cause is None  # type: ignore[union-attr]
    assert (running_now.status, running_now.reason) == ("Unknown", "MemberUnreachable")
    assert lost_at in running_now.message, "the clock survives a restart of the operator"
    assert [item.unreachable_since for item in status.members] == [None, lost_at]
    assert {pod["metadata"]["uid"] for pod in scene.pods()} == before
    scene.world.regain("west")
    await scene.turn()
    assert scene.status().is_true("Running")
    assert scene.status().is_true("MembersReachable")
    assert scene.status().attempt.number == 1  # type: ignore[union-attr]
    reasons = [event["reason"] for event in scene.world.real_hub.all(EVENT)]
    assert reasons.count("MemberUnreachable") == 1
    assert reasons.count("MemberBack") == 1


async def test_an_operator_that_starts_while_a_member_is_out_of_reach_calls_nothing_lost() -> None:
    scene = await running()
    scene.world.lose("west")
    scene.world.restart()
    caches = [scene.world.cache("west", kind) for kind in (POD, NODE, NAMESPACE, CONFIG_MAP)]
    for cache in caches:
        assert cache is not None
        cache.blank()
    for _ in range(5):
        await scene.turn(seconds=60)
    assert scene.reason() == "MemberUnreachable"
    scene.world.regain("west")
    await scene.turn()
    assert scene.status().is_true("Running"), "a list is asked for before the informer has one"
    assert scene.status().attempt.number == 1  # type: ignore[union-attr]


async def test_a_job_is_not_planned_on_lists_that_are_not_complete() -> None:
    scene = Lab(lab())
    scene.submit(job())
    cache = scene.world.cache("west", POD)
    assert cache is not None
    cache.blank()
    await scene.look()
    (refused,) = [item for item in scene.status().refused if item.member == "west"]
    assert refused.reason == "unknown: its list of nodes, pods and namespaces isn't complete yet"
    cache.blank(blank=False)
    await scene.until(lambda: scene.status().is_true("Running"))


async def test_no_second_attempt_begins_while_a_member_with_pods_of_the_first_does_not_answer() -> None:
    scene = await running()
    scene.world.lose("west")
    victim = next(pod for pod in scene.pods() if "-r0-" in pod["metadata"]["name"])
    end_pod(scene.cluster_of(victim), victim, 1, scene.world.clock, "Error")
    for _ in range(20):
        await scene.turn(seconds=30)
    assert scene.reason() == "Stopping"
    assert "waiting for west to answer" in scene.status().condition("Running").message  # type: ignore[union-attr]
    assert scene.status().attempt.number == 1  # type: ignore[union-attr]
    scene.world.regain("west")
    await scene.until(lambda: scene.status().is_true("Running"))
    assert scene.status().attempt.number == 2  # type: ignore[union-attr]


async def test_a_member_lost_while_pods_are_being_admitted_does_not_hold_up_the_next_attempt() -> None:
    scene = Lab(lab(gpus_east=8))
    scene.submit(job())
    west = scene.world.clusters["west"]
    west.judges = [lambda obj: "wait" if obj["kind"] == "Pod" else None]
    await scene.look()
    west.judges = []
    scene.world.lose("west")
    await scene.until(lambda: scene.status().is_true("Running"), turns=200)
    assert {stage.member for stage in scene.status().plan} == {"east"}
    scene.world.regain("west")
    for _ in range(5):
        await scene.turn()
    assert [pod for pod in west.all(POD) if pod["metadata"]["labels"].get("crosscloud.dev/attempt") == "1"] == []


@pytest.mark.parametrize(
    "foreign",
    [
        ("ConfigMap", "demo-anchor", {}),
        ("Service", "demo-pods", {"spec": {"ports": [{"port": 1}]}}),
        ("Pod", "demo-a1-r1-i1-s0-n0", {"spec": {"containers": []}, "status": {"phase": "Running"}}),
        ("ConfigMap", "demo-r1-report", {}),
    ],
)
@pytest.mark.parametrize("labels", [{}, {"crosscloud.dev/hub": "hub-2", "crosscloud.dev/job-uid": "other"}])
async def test_objects_of_others_under_our_names_are_reported_and_never_touched(
    foreign: tuple[str, str, dict[str, Any]], labels: dict[str, str]
) -> None:
    # C23: made by hand, or by another hub that shares the member.
    kind, name, rest = foreign
    scene = Lab(lab())
    west = scene.world.clusters["west"]
    meta = {"name": name, "namespace": "ml", "labels": labels}
    theirs = west.put({"apiVersion": "v1", "kind": kind, "metadata": meta, "data": {"theirs": "x"}, **rest})
    before = copy.deepcopy(theirs)
    scene.submit(job())
    said: set[str] = set()
    for _ in range(20):
        await scene.turn()
        condition = scene.status().condition("Running")
        said.add(condition.message if condition else "")
        bound = {
            pod["metadata"]["labels"]["crosscloud.dev/attempt"] for pod in scene.pods() if pod["spec"].get("nodeName")
        }
        assert "1" not in bound, "nothing starts half way"
    assert any(name in text and "isn't ours" in text for text in said)
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    assert west.find(KINDS[kind], name) == before


async def test_a_job_that_is_already_being_deleted_gets_nothing_made_and_no_finalizer() -> None:
    # C33: it carries somebody else's finalizer, and was deleted before the operator saw it.
    scene = Lab(lab())
    mine = job()
    mine["metadata"]["finalizers"] = ["example.org/theirs"]
    obj = scene.submit(mine)
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    for _ in range(5):
        await scene.turn()
    assert obj["metadata"]["finalizers"] == ["example.org/theirs"]
    assert "status" not in obj
    for cluster in scene.world.clusters.values():
        assert {kind for kind, _ in cluster.created} == {"Namespace", "Node"}


async def test_a_job_deleted_between_two_calls_is_left_alone() -> None:
    for moment in range(60):
        scene = Lab(lab())
        mine = job()
        mine["metadata"]["finalizers"] = ["example.org/theirs"]
        scene.submit(mine)
        calls = iter(range(10_000))

        def deleted_now(_: str, scene: Lab = scene, calls: Any = calls, moment: int = moment) -> None:
            if next(calls) == moment:
                scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))

        scene.world.restart(lambda cluster, fate=deleted_now: Flaky(cluster, fate))  # type: ignore[misc]
        for _ in range(12):
            await scene.turn()
        left = scene.world.real_hub.find(JOB, "demo")
        assert left is not None
        if "deletionTimestamp" not in left["metadata"]:
            continue  # its life has fewer calls than this
        assert left["metadata"]["finalizers"] == ["example.org/theirs"], moment
        for cluster in scene.world.clusters.values():
            assert {kind for kind, _, _ in cluster.objects} == {"Namespace", "Node"}, moment


async def test_deleting_a_job_waits_for_a_lost_member_but_not_for_one_that_was_removed() -> None:
    # C31: a member that is gone for good; its MemberCluster goes by `crosscloud member remove`.
    scene = await running()
    scene.world.lose("west")
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    for _ in range(10):
        await scene.turn(seconds=60)
    assert scene.reason() == "Deleting"
    assert "crosscloud member remove" in scene.status().condition("Running").message  # type: ignore[union-attr]
    assert scene.world.clusters["east"].all(POD) == [], "healthy members are cleaned at once"
    scene.world.real_hub.remove(Ref(MEMBER, "west"))
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    left = [event for event in scene.world.real_hub.all(EVENT) if event["reason"] == "LeftBehind"]
    assert len(left) == 1
    assert "west" in left[0]["message"]


async def test_a_job_that_never_touched_a_lost_member_is_deleted_without_it() -> None:
    scene = Lab(lab())
    scene.submit(job(replicas=1))
    await scene.until(lambda: scene.status().is_true("Running"))
    scene.world.lose("west")
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None, turns=10)


async def test_a_job_of_the_same_name_waits_until_the_objects_of_the_first_are_gone() -> None:
    scene = await running()
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    while scene.world.real_hub.find(JOB, "demo") is not None:
        await scene.look()
    scene.submit(job())
    await scene.look()
    assert scene.reason() in ("Leaving", "Waiting")
    await scene.until(lambda: scene.status().is_true("Running"))
    uids = {pod["metadata"]["labels"]["crosscloud.dev/job-uid"] for pod in scene.pods()}
    assert uids == {scene.world.real_hub.find(JOB, "demo")["metadata"]["uid"]}  # type: ignore[index]


async def test_every_fault_of_a_spec_is_in_the_status_at_once() -> None:
    scene = Lab(lab())
    broken = job(
        replicas=0,
        podTemplate={"spec": {"nodeName": "e1", "containers": [{"name": "trainer", "command": ["sh"], "args": []}]}},
    )
    scene.submit(broken)
    assert await scene.look() is None
    condition = scene.status().condition("Running")
    assert condition is not None
    assert condition.reason == "InvalidSpec"
    assert "spec.replicas: found 0" in condition.message
    template = copy.deepcopy(broken)
    template["metadata"] = {"name": "second", "namespace": "ml"}
    template["spec"]["replicas"] = 1
    scene.submit(template)
    await scene.look("second")
    message = scene.status("second").condition("Running").message  # type: ignore[union-attr]
    for field in ("nodeName", "containers[0].command", "containers[0].args"):
        assert f"spec.podTemplate.spec.{field}: found" in message


async def test_a_job_without_room_says_why_and_keeps_nothing_anywhere() -> None:
    scene = Lab(lab(gpus_east=2, gpus_west=(1, 1)))
    scene.submit(job())
    assert await scene.look() == scene.settings.waiting_interval
    status = scene.status()
    placed = status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason) == ("False", "InsufficientCapacity")
    assert {item.member: item.reason for item in status.refused} == {
        "east": "needs 4 GPUs on one node or 2x2 or 4x1; free GPUs: e1 2",
        "west": "needs 4 GPUs on one node or 2x2 or 4x1; free GPUs: w1 1, w2 1",
    }
    for cluster in scene.world.clusters.values():
        assert {kind for kind, _ in cluster.created} == {"Namespace", "Node"}


async def test_without_any_member_a_job_says_how_to_add_one() -> None:
    scene = Lab(MemoryWorld())
    scene.submit(job())
    await scene.look()
    assert "crosscloud member add" in scene.status().condition("Placed").message  # type: ignore[union-attr]


async def test_the_storage_secret_of_the_hub_is_copied_to_where_pods_need_it() -> None:
    scene = Lab(lab())
    scene.submit(job(storage={"uri": "s3://models/demo", "secretName": "s3"}))
    await scene.turn()
    assert scene.status().condition("Placed").reason == "StorageSecretMissing"  # type: ignore[union-attr]
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s3", "namespace": "ml"},
        "data": {"A": "eA=="},
    }
    kept = scene.world.real_hub.put(secret)
    await scene.until(lambda: scene.status().is_true("Running"))
    kept["data"] = {"B": "eQ=="}
    victim = scene.pods()[0]
    end_pod(scene.cluster_of(victim), victim, ExitCode.STORAGE_UNREACHABLE, scene.world.clock, "Error")
    await scene.until(lambda: scene.status().attempt.number == 2 and scene.status().is_true("Running"))  # type: ignore[union-attr]
    for cluster in scene.world.clusters.values():
        assert cluster.find(SECRET, "demo-storage")["data"] == {"B": "eQ=="}  # type: ignore[index]


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
    writers = [pod for pod in scene.pods() if keys_of(pod) and "n0" in pod["metadata"]["name"]]
    for pod in writers:
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
    stale["data"]["report.json"] = json.dumps(waiting)
    await scene.turn()
    condition = scene.status().condition("Running")
    assert condition is not None
    assert condition.reason == "WaitingForPeers"
    assert condition.message == "replica 0 waits in round 2 for replica 1 since 2026-01-01T00:00:00Z"
    stale["data"]["report.json"] = "{not json"
    await scene.turn()
    assert scene.status().attempt.number == 1  # type: ignore[union-attr]


async def test_an_image_that_cannot_be_pulled_is_named_and_ends_the_attempt_in_time() -> None:
    # C47: the cause is what a person sees, not "Running".
    scene = await running()
    pod = scene.pods()[0]
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image trainer:1"}}
    scene.cluster_of(pod).change(pod, phase="Pending", containerStatuses=[trainer_container(waiting)])
    for kubelet in scene.kubelets:
        kubelet.step = lambda: None  # type: ignore[method-assign]
    await scene.turn()
    assert scene.reason() == "Starting"
    assert "ErrImagePull: no such image trainer:1" in scene.status().condition("Running").message  # type: ignore[union-attr]
    scene.world.clock += scene.settings.start_timeout
    await scene.look()
    cause = scene.status().attempt.cause  # type: ignore[union-attr]
    assert cause is not None
    assert (cause.reason, cause.counted) == ("StartTimeout", False)


async def test_twenty_jobs_at_once_get_exactly_the_room_there_is() -> None:
    # C09: two members with two slots each, twenty jobs of one slot, looked at by concurrent workers.
    world = MemoryWorld("a", "b")
    for name in world.clusters:
        world.add_node(name, f"{name}1", 2)
    scene = Lab(world)
    names = [f"job-{number:02}" for number in range(20)]
    for name in names:
        scene.submit(job(name, replicas=1, gpus=1))
    await asyncio.gather(*(scene.look(name) for name in names for _ in range(1)))
    for _ in range(6):
        scene.play()
        await asyncio.gather(*(scene.look(name) for name in names))
    started = [name for name in names if scene.status(name).is_true("Running")]
    waiting = [name for name in names if scene.reason(name) == "Waiting"]
    assert (len(started), len(waiting)) == (4, 16)
    assert all(scene.status(name).refused for name in waiting), "each waits with a reason"
    scene.finish(started[0])
    for _ in range(12):
        await asyncio.gather(*(scene.look(name) for name in names))
        scene.play()
        world.clock += 1
    assert len([name for name in names if scene.status(name).is_true("Running")]) == 4
    assert len([name for name in names if scene.reason(name) == "Waiting"]) == 15
    assert not any(kubelet.overcommitted for kubelet in scene.kubelets), "no pod was ever pending for lack of a GPU"


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


def keys_of(pod: dict[str, Any]) -> set[str]:
    volume = next(item for item in pod["spec"]["volumes"] if item["name"] == "crosscloud-tls")
    return {item["key"] for item in volume["secret"]["items"]} - {"ca.crt"}
