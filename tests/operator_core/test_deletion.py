"""Deleting a job: nothing is made any more, everything of ours goes, nobody else's finalizer is in the way."""

from __future__ import annotations

from typing import Any

from operator_core.players import Flaky, Lab, job, lab, running

from crosscloud_operator.kube.api import (
    EVENT,
    JOB,
    MEMBER,
    POD,
    Ref,
)


async def test_a_job_that_is_already_being_deleted_gets_nothing_made_and_no_finalizer() -> None:
    # C33: it carries somebody else's finalizer, and was deleted before the operator saw it.
    scene = Lab(lab())
    mine = job()
    mine["metadata"]["finalizers"] = ["example.org/theirs"]
    obj = scene.submit(mine)
    scene.delete()
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
                scene.delete()

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
    scene.delete()
    for _ in range(10):
        await scene.turn(seconds=60)
    assert scene.reason() == "Deleting"
    assert "crosscloud member remove" in scene.condition("Running").message
    assert scene.world.clusters["east"].all(POD) == [], "healthy members are cleaned at once"
    scene.world.real_hub.remove(Ref(MEMBER, "west"))
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    left = [event for event in scene.world.real_hub.all(EVENT) if event["reason"] == "LeftBehind"]
    assert len(left) == 1
    assert "west" in left[0]["message"]


async def test_a_deleted_job_that_only_anothers_finalizer_keeps_holds_no_gpus() -> None:
    scene = Lab(lab())
    mine = job()
    mine["metadata"]["finalizers"] = ["example.org/theirs"]
    scene.submit(mine)
    await scene.until(lambda: scene.status().is_true("Running"))
    scene.delete()
    scene.submit(job("next"))  # all GPUs, as the first one
    await scene.until(lambda: scene.status("next").is_true("Running"))
    left = scene.world.real_hub.find(JOB, "demo")
    assert left is not None
    assert left["metadata"]["finalizers"] == ["example.org/theirs"]
    assert scene.pods() == []


async def test_a_job_that_never_touched_a_lost_member_is_deleted_without_it() -> None:
    scene = Lab(lab())
    scene.submit(job(replicas=1))
    await scene.until(lambda: scene.status().is_true("Running"))
    scene.world.lose("west")
    scene.delete()
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None, turns=10)


async def test_a_job_of_the_same_name_waits_until_the_objects_of_the_first_are_gone() -> None:
    scene = await running()
    scene.delete()
    while scene.world.real_hub.find(JOB, "demo") is not None:
        await scene.look()
    scene.submit(job())
    await scene.look()
    assert scene.reason() in ("Leaving", "Waiting")
    await scene.until(lambda: scene.status().is_true("Running"))
    uids = {pod["metadata"]["labels"]["crosscloud.dev/job-uid"] for pod in scene.pods()}
    assert uids == {scene.world.real_hub.find(JOB, "demo")["metadata"]["uid"]}  # type: ignore[index]
