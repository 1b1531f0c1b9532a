"""Checkpoints between replicas and the job's status: saved, acknowledged, and named by the next attempt."""

from __future__ import annotations

import json
from typing import Any

from operator_core.players import Lab, report, running

from crosscloud_operator.kube.api import CONFIG_MAP


def stored(step: int, attempt: int = 1) -> dict[str, Any]:
    uri = f"s3://models/demo/attempt-{attempt}/home-1/step-{step}/manifest.json"
    return {"uri": uri, "digest": f"{step:064x}", "step": step}


def steps(scene: Lab) -> list[int]:
    return [item.step for item in scene.status().checkpoints]


def acknowledged(scene: Lab, member: str) -> list[dict[str, Any]]:
    """What the anchor in a member says."""
    anchor = scene.world.clusters[member].find(CONFIG_MAP, "demo-anchor")
    assert anchor is not None
    found: list[dict[str, Any]] = json.loads(anchor["data"].get("checkpoints.json", '{"checkpoints": []}'))[
        "checkpoints"
    ]
    return found


def run_document(scene: Lab, attempt: int) -> dict[str, Any]:
    found = scene.world.clusters["east"].find(CONFIG_MAP, f"demo-a{attempt}-run")
    assert found is not None
    document: dict[str, Any] = json.loads(found["data"]["run.json"])
    return document


async def test_the_newest_checkpoints_are_kept_in_the_status_and_then_acknowledged_in_every_member() -> None:
    scene = await running(checkpoint={"everySteps": 10, "keep": 2})
    pod = scene.pods()[0]
    for step in (10, 20, 30):
        report(scene.world, pod, "Training", step=step, checkpoint=stored(step))
        await scene.turn()
    assert steps(scene) == [30, 20]
    for member in ("east", "west"):
        assert acknowledged(scene, member) == [stored(30), stored(20)]


async def test_the_one_with_the_lowest_validation_loss_stays_beside_them_and_is_told_to_the_next_attempt() -> None:
    scene = await running(checkpoint={"everySteps": 10, "keep": 2})
    pods = scene.pods()
    losses = {10: "2.5000", 20: "2.1000", 30: "10.3000", 40: "2.2000"}
    for step, loss in losses.items():
        report(scene.world, pods[0], "Training", step=step, checkpoint={**stored(step), "validationLoss": loss})
        await scene.turn()
    expected = [{**stored(step), "validationLoss": losses[step]} for step in (40, 30, 20)]
    assert steps(scene) == [40, 30, 20]
    assert acknowledged(scene, "west") == expected
    scene.end(pods[-1], 1)
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    assert run_document(scene, 2)["resumeFrom"] == expected


async def test_the_next_attempt_is_told_of_them_newest_first() -> None:
    scene = await running()
    pods = scene.pods()
    for step in (10, 20):
        report(scene.world, pods[0], "Training", step=step, checkpoint=stored(step))
        await scene.turn()
    assert run_document(scene, 1)["resumeFrom"] == []
    scene.end(pods[-1], 1)
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    assert run_document(scene, 2)["resumeFrom"] == [stored(20), stored(10)]
    assert acknowledged(scene, "west") == [stored(20), stored(10)]


async def test_a_checkpoint_of_another_home_or_of_an_older_attempt_is_not_taken() -> None:
    scene = await running()
    report(scene.world, scene.pods()[0], "Training", checkpoint=stored(10), home=7)
    await scene.turn()
    assert steps(scene) == []
    report(scene.world, scene.pods()[0], "Training", step=6, checkpoint=stored(10))
    await scene.turn()
    assert steps(scene) == [10]
    victim = scene.pods()[-1]
    scene.end(victim, 1)
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    pod = scene.pods()[0]
    report(scene.world, pod, "Training", step=7, checkpoint=stored(30, attempt=2))
    await scene.turn()
    assert steps(scene) == [30, 10]


async def test_a_last_checkpoint_that_pods_write_while_they_are_told_to_end_is_taken() -> None:
    scene = await running()
    last = scene.pods()[-1]
    scene.end(last, 1)
    kubelets, scene.kubelets = scene.kubelets, []  # pods take their time to end
    await scene.until(lambda: scene.attempt().ended_at is not None)
    report(scene.world, scene.pods()[0], "Training", step=15, checkpoint=stored(15))
    scene.kubelets = kubelets
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
    assert run_document(scene, 2)["resumeFrom"] == [stored(15)]


async def test_pods_know_the_grace_period_that_the_user_gave_them() -> None:
    container = {"name": "trainer", "image": "trainer:1"}
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 300}}
    scene = await running(podTemplate=template)
    for pod in scene.pods():
        env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        assert env["CROSSCLOUD_GRACE"] == "300"
        assert pod["spec"]["terminationGracePeriodSeconds"] == 300
