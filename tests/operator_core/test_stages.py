"""Replicas of two stages against the in-memory API: one lies in a member, the other one over both."""

from __future__ import annotations

import copy
import re

import pytest
from operator_core.players import TWO_STAGES, Lab, job, lab, report, split_lab

from crosscloud_operator.domain.documents import choose_home
from crosscloud_operator.domain.record import PlacedNode, PlacedStage
from crosscloud_operator.kube.api import CONFIG_MAP, EVENT, POD, Obj, Ref
from crosscloud_trainer.contract import ExitCode


async def running() -> Lab:
    scene = Lab(split_lab())
    scene.submit(job(**TWO_STAGES))
    await scene.until(lambda: scene.status().is_true("Running"))
    return scene


def pod_of(scene: Lab, replica: int, stage: int) -> Obj:
    wanted = {"crosscloud.dev/replica": str(replica), "crosscloud.dev/stage": str(stage)}
    return next(pod for pod in scene.pods() if wanted.items() <= pod["metadata"]["labels"].items())


async def test_status_and_events_say_where_each_stage_is() -> None:
    scene = await running()
    await scene.turn()
    status = scene.status()
    assert [(stage.replica, stage.stage, stage.member) for stage in status.plan] == [
        (0, 0, "east"),
        (0, 1, "east"),
        (1, 0, "east"),
        (1, 1, "west"),
    ]
    assert status.replicas == 2
    placed = status.condition("Placed")
    assert placed is not None
    assert placed.message == "replica 0 on east, replica 1 on east (stage 0) and west (stage 1)"
    planned = next(event for event in scene.world.real_hub.all(EVENT) if event["reason"] == "Planned")
    assert planned["message"] == (
        "attempt 1: replica 0 on east (e1), replica 1 on east (stage 0: e1) and west (stage 1: w1)"
    )


async def test_a_replica_counts_as_running_when_the_pods_of_all_its_stages_run() -> None:
    scene = await running()
    pod = pod_of(scene, 1, 1)
    container = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    scene.cluster_of(pod).change(pod, phase="Pending", containerStatuses=[container])
    await scene.look()
    assert scene.status().replicas == 1
    assert "ImagePullBackOff" in (scene.status().replica_statuses[1].message or "")


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_lost_pod_of_any_stage_ends_the_attempt(stage: int) -> None:
    scene = await running()
    pod = pod_of(scene, 1, stage)
    scene.cluster_of(pod).remove(Ref(POD, pod["metadata"]["name"], "ml"))
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    assert scene.status().attempts_counted == 0
    assert scene.status().restarts == 1


async def test_the_exit_code_of_a_later_stage_is_the_cause_though_the_first_one_lost_its_peer() -> None:
    scene = await running()
    first, second = pod_of(scene, 1, 0), pod_of(scene, 1, 1)
    scene.end(first, ExitCode.PEER_LOST)
    scene.world.clock += 1
    scene.end(second, ExitCode.STORAGE_UNREACHABLE)
    await scene.look()
    cause = scene.attempt().cause
    assert cause is not None
    assert (cause.member, cause.pod, cause.exit_code) == (
        "west",
        "demo-a1-r1-i1-s1-n0",
        ExitCode.STORAGE_UNREACHABLE,
    )


async def test_a_replica_has_done_its_work_when_its_first_stage_says_so() -> None:
    scene = await running()
    later = [pod_of(scene, replica, 1) for replica in (0, 1)]
    for pod in later:
        scene.end(pod, 0)
    for _ in range(3):
        await scene.turn()
    assert scene.status().is_true("Running"), "a later stage may end before the first one has spoken"
    for replica in (0, 1):
        report(scene.world, pod_of(scene, replica, 0), "Ended", "Succeeded", step=10)
    await scene.until(lambda: scene.status().is_true("Succeeded"))


async def test_only_the_member_of_the_first_stage_is_believed_about_a_replica() -> None:
    scene = await running()
    report(scene.world, pod_of(scene, 1, 0), "Training", step=7)
    east, west = scene.world.clusters["east"], scene.world.clusters["west"]
    told = east.find(CONFIG_MAP, "demo-r1-report")
    assert told is not None
    lie = copy.deepcopy(told)
    lie["data"]["report.json"] = lie["data"]["report.json"].replace('"step": 7', '"step": 9')
    lie["data"]["report.json"] = re.sub(r'"sequence": (\d+)', r'"sequence": 9\1', lie["data"]["report.json"])
    west.put(lie)
    await scene.look()
    assert scene.status().replica_statuses[1].step == 7


async def test_later_stages_that_no_member_has_room_for_keep_the_job_waiting() -> None:
    scene = Lab(lab(gpus_east=3, gpus_west=(2, 2)))
    scene.submit(job(**TWO_STAGES))
    await scene.look()
    assert scene.reason() == "Waiting"
    assert scene.pods() == []
    assert [(item.member, item.reason) for item in scene.status().refused] == [
        ("east", "room for 1 of the 2 stages of replica 0, not for all of the job; free GPUs: e1 3"),
        ("west", "room for 2 of the 2 stages of replica 0, not for all of the job; free GPUs: w1 2, w2 2"),
    ]


def test_the_home_is_a_member_in_which_a_first_stage_runs() -> None:
    def stage(replica: int, number: int, member: str) -> PlacedStage:
        return PlacedStage(replica, 1, number, member, "gpu", 1, (PlacedNode("n", 1),))

    over_both = [stage(0, 0, "east"), stage(0, 1, "west"), stage(1, 0, "north"), stage(1, 1, "west")]
    assert choose_home(over_both, None) == "east"
    assert choose_home(over_both, "east") == "north"
    assert choose_home([*over_both, stage(2, 0, "north")], None) == "north"
