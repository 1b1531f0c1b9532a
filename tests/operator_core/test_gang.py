"""All pods or none: planning, admission and binding over several members."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from operator_core.memory import MemoryWorld
from operator_core.players import Flaky, Lab, job, keys_of, lab

from crosscloud_operator.domain.record import seconds
from crosscloud_operator.kube.api import (
    NODE,
    POD,
    SECRET,
    Ref,
    Unreachable,
)
from crosscloud_trainer.contract import ExitCode


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
    assert scene.attempt().number == 1


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
    for _ in range(63):
        await scene.turn()
        assert all(pod["spec"].get("schedulingGates") for pod in scene.pods())
    cause = scene.attempt().cause
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
        attempts.add(scene.attempt().number if scene.status().attempt else 0)
        placed = scene.condition("Placed")
        assert placed.reason in ("Refused", "Retrying", "Preparing", "Planned")
        assert f"no {kind}" in placed.message + scene.condition("Running").message
    assert len(versions) <= 4 * len(attempts)
    scene.world.clusters["west"].judges = []
    await scene.until(lambda: scene.status().is_true("Running"), seconds=10)


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


async def test_a_hub_that_fails_while_keys_are_made_is_not_taken_for_a_member() -> None:
    scene = Lab(lab())

    class Hub(Flaky):
        async def get(self, ref: Ref) -> Any:
            if ref.kind is SECRET and scene.status().attempt is not None:
                raise Unreachable("the hub's own trouble")
            return await super().get(ref)

    hub = scene.world.real_hub
    scene.world.restart(lambda cluster: Hub(hub, lambda _: None) if cluster is hub else cluster)
    scene.submit(job())
    with pytest.raises(Unreachable, match="the hub's own trouble"):
        await scene.look()
    assert scene.pods() == []
    assert scene.reason() == "Admitting"
    assert [item.unreachable_since for item in scene.status().members] == [None, None]
    [authority] = hub.all(SECRET)
    hub.remove(Ref(SECRET, authority["metadata"]["name"], "crosscloud"))
    scene.world.restart()
    await scene.until(lambda: scene.status().is_true("Running"))
    for pod in scene.pods():
        [keys] = scene.cluster_of(pod).all(SECRET)
        assert keys_of(pod) <= set(keys["data"])


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
    cause = scene.attempt().cause
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
    assert "crosscloud member add" in scene.condition("Placed").message


async def test_the_storage_secret_of_the_hub_is_copied_to_where_pods_need_it() -> None:
    scene = Lab(lab())
    scene.submit(job(storage={"uri": "s3://models/demo", "secretName": "s3"}))
    await scene.turn()
    assert scene.condition("Placed").reason == "StorageSecretMissing"
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
    scene.end(victim, ExitCode.STORAGE_UNREACHABLE)
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    for cluster in scene.world.clusters.values():
        assert cluster.find(SECRET, "demo-storage")["data"] == {"B": "eQ=="}  # type: ignore[index]


@pytest.mark.parametrize(("gpus_east", "reason"), [(8, "Starting"), (4, "Waiting")])
async def test_only_a_job_over_several_members_needs_addresses_of_nodes(gpus_east: int, reason: str) -> None:
    scene = Lab(lab(gpus_east=gpus_east))
    for cluster in scene.world.clusters.values():
        for node in cluster.all(NODE):
            cluster.change(node, addresses=[])
    scene.submit(job())
    for _ in range(10):
        await scene.turn()
    assert scene.reason() == reason
    if reason == "Waiting":
        assert "no ready node has an address" in scene.condition("Running").message


async def test_twenty_jobs_at_once_get_exactly_the_room_there_is() -> None:
    # C09: two members with two slots each, twenty jobs of one slot, looked at by concurrent workers.
    world = MemoryWorld("a", "b")
    for name in world.clusters:
        world.add_node(name, f"{name}1", 2)
    scene = Lab(world)
    names = [f"job-{number:02}" for number in range(20)]
    for name in names:
        scene.submit(job(name, replicas=1, gpus=1))
    await asyncio.gather(*(scene.look(name) for name in names))
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
