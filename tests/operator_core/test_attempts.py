"""How attempts end: whose fault it was, whether it counts, and what follows."""

from __future__ import annotations

import pytest
from operator_core.players import Lab, job, lab, report, running, trainer_container

from crosscloud_operator.domain.record import rfc3339
from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    POD,
    Ref,
)
from crosscloud_trainer.contract import ExitCode


async def test_a_gateway_that_does_not_come_up_is_named_while_the_trainers_start() -> None:
    # Trainers behind a gateway that passes nothing would only say that they miss their peers.
    scene = await running()
    await scene.turn()
    message = scene.condition("Running").message
    assert "west: the gateway has no pod yet (Deployment demo-a1-gateway)" in message
    states = {"east": {"ready": True, "state": {"running": {}}}, "west": {"ready": False}}
    states["west"]["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no gateway:1"}}
    for name, state in states.items():
        cluster = scene.world.clusters[name]
        deployment = cluster.find(DEPLOYMENT, "demo-a1-gateway")
        assert deployment is not None
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        meta = {"name": "demo-a1-gateway-x", "namespace": "ml", "labels": labels}
        status = {"phase": "Pending", "containerStatuses": [{"name": "gateway", **state}]}
        cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": "n"}, "status": status})
    scene.kubelets.clear()
    await scene.turn()
    message = scene.condition("Running").message
    assert "east" not in message
    assert "west/demo-a1-gateway-x: ImagePullBackOff: no gateway:1" in message


async def test_an_anchor_deleted_by_hand_costs_an_attempt_and_nothing_else() -> None:
    scene = await running()
    west = scene.world.clusters["west"]
    collect, west.collect_garbage = west.collect_garbage, lambda: None  # type: ignore[method-assign]
    west.remove(Ref(CONFIG_MAP, "demo-anchor", "ml"))
    victim = scene.pods()[0]
    scene.end(victim, 1)
    for _ in range(20):
        await scene.turn()
    assert "is being deleted" in scene.condition("Running").message, "what the old anchor owned will go"
    west.collect_garbage = collect  # type: ignore[method-assign]
    await scene.until(lambda: scene.status().is_true("Running"))
    anchor = west.find(CONFIG_MAP, "demo-anchor")
    assert anchor is not None
    owners = {owner["uid"] for pod in west.all(POD) for owner in pod["metadata"]["ownerReferences"]}
    assert owners == {anchor["metadata"]["uid"]}


async def test_a_failed_pod_ends_the_attempt_and_the_next_begins_when_all_its_pods_are_gone() -> None:
    scene = await running()
    victim = scene.pods()[-1]
    scene.end(victim, 1)
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
        scene.end(victim, 1)
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
        scene.end(victim, code)
    await scene.until(lambda: scene.attempt().gone_at is not None)
    status = scene.status()
    assert status.attempts_counted == counted
    assert status.is_true("Failed") is not retried
    assert status.attempt.cause.exit_code == code  # type: ignore[union-attr]


async def test_the_cause_is_the_pod_that_failed_by_itself_not_those_that_lost_it() -> None:
    scene = await running()
    first, _, third = scene.pods()
    scene.end(first, ExitCode.PEER_LOST)
    await scene.turn(seconds=2)
    assert scene.attempt().cause is None, "who has only lost a peer waits for that one's word"
    scene.end(third, ExitCode.INVALID_INPUT)
    await scene.turn()
    cause = scene.attempt().cause
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
    await scene.until(lambda: scene.attempt().number == 2)
    assert scene.status().attempts_counted == 0


async def test_a_disruption_target_killed_with_137_does_not_count_but_out_of_memory_does() -> None:
    for conditions, reason, counted in (
        ([{"type": "DisruptionTarget", "status": "True"}], "Error", 0),
        ([], "OOMKilled", 1),
        ([{"type": "DisruptionTarget", "status": "True"}], "OOMKilled", 1),
    ):
        scene = await running()
        victim = scene.pods()[0]
        scene.end(victim, 137, reason)
        victim["status"]["conditions"] = conditions
        await scene.until(lambda scene=scene: scene.attempt().gone_at is not None)  # type: ignore[misc]
        assert scene.status().attempts_counted == counted


@pytest.mark.parametrize("code", [0, 1])
async def test_the_trainer_container_decides_while_a_sidecar_runs_on(code: int) -> None:
    # C21: phase Running, trainer terminated, sidecar running.
    scene = await running(podTemplate={"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}})
    for pod in scene.writers() if code == 0 else ():
        report(scene.world, pod, "Ended", "Succeeded")
    for pod in scene.pods():
        assert [item["name"] for item in pod["spec"]["containers"]] == ["trainer", "proxy"]
        ended = {"terminated": {"exitCode": code, "reason": "Done", "finishedAt": rfc3339(scene.world.clock)}}
        statuses = [trainer_container(ended), {"name": "proxy", "state": {"running": {}}}]
        scene.cluster_of(pod).change(pod, phase="Running", containerStatuses=statuses)
    first = {pod["metadata"]["uid"] for pod in scene.pods()}
    await scene.until(lambda: not first & {pod["metadata"]["uid"] for pod in scene.pods()})
    assert scene.status().is_true("Succeeded") is (code == 0)
    assert scene.status().attempts_counted == code


async def test_a_pod_whose_phase_lags_behind_its_trainers_end_is_kept_for_its_logs() -> None:
    scene = await running()
    for pod in scene.writers():
        report(scene.world, pod, "Ended", "Succeeded")
    for pod in scene.pods():
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": rfc3339(scene.world.clock)}}
        scene.cluster_of(pod).change(pod, phase="Running", containerStatuses=[trainer_container(ended)])
    kept = {pod["metadata"]["uid"] for pod in scene.pods()}
    await scene.until(lambda: scene.status().is_true("Succeeded"))
    for pod in scene.pods():
        scene.cluster_of(pod).change(pod, phase="Succeeded")
    await scene.until(lambda: scene.attempt().gone_at is not None)
    assert {pod["metadata"]["uid"] for pod in scene.pods()} == kept


async def test_a_deleted_pod_ends_the_attempt_without_counting() -> None:
    scene = await running()
    victim = scene.pods()[1]
    scene.cluster_of(victim).remove(Ref(POD, victim["metadata"]["name"], "ml"))
    await scene.until(lambda: scene.attempt().number == 2 and scene.status().is_true("Running"))
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
        scene.end(pod, 0)
    await scene.until(lambda: scene.attempt().number == 2)
    assert scene.status().attempts_counted == 1


async def test_pods_that_the_informer_does_not_show_yet_are_not_called_lost() -> None:
    scene = Lab(lab())
    scene.submit(job())
    for name in scene.world.clusters:
        scene.world.cache(name, POD).freeze()  # type: ignore[union-attr]
    await scene.until(lambda: scene.status().is_true("Running"))
    for _ in range(5):
        await scene.turn()
    assert scene.attempt().number == 1


async def test_an_image_that_cannot_be_pulled_is_named_and_ends_the_attempt_in_time() -> None:
    # C47: the cause is what a person sees, not "Running".
    scene = await running()
    pod = scene.pods()[0]
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image trainer:1"}}
    scene.cluster_of(pod).change(pod, phase="Pending", containerStatuses=[trainer_container(waiting)])
    scene.kubelets.clear()
    await scene.turn()
    assert scene.reason() == "Starting"
    assert "ErrImagePull: no such image trainer:1" in scene.condition("Running").message
    scene.world.clock += scene.settings.start_timeout
    await scene.look()
    cause = scene.attempt().cause
    assert cause is not None
    assert (cause.reason, cause.counted) == ("StartTimeout", False)


@pytest.mark.parametrize(("field", "name"), [("initContainerStatuses", "mesh"), ("containerStatuses", "logs")])
async def test_a_container_beside_the_trainer_whose_image_cannot_be_pulled_is_named(field: str, name: str) -> None:
    scene = await running()
    pod = scene.pods()[0]
    beside = {"name": name, "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    statuses = {"containerStatuses": [trainer_container({"waiting": {"reason": "PodInitializing"}})]}
    statuses[field] = [beside, *statuses.get(field, [])]
    scene.cluster_of(pod).change(pod, phase="Pending", **statuses)
    scene.kubelets.clear()
    await scene.turn()
    told = scene.condition("Running").message
    assert f"container {name}: ErrImagePull: no such image" in told
