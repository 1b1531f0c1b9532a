"""Members that are lost, refuse, are removed, or hold objects of others under our names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_core.players import Flaky, Lab, job, lab, running

from crosscloud_operator.domain.record import rfc3339
from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    EVENT,
    JOB,
    KINDS,
    MEMBER,
    NAMESPACE,
    NODE,
    POD,
    Ref,
)


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
    assert scene.attempt().number == 1
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
    assert scene.attempt().number == 1


async def test_no_second_attempt_begins_while_a_member_with_pods_of_the_first_does_not_answer() -> None:
    scene = await running()
    scene.world.lose("west")
    victim = next(pod for pod in scene.pods() if "-r0-" in pod["metadata"]["name"])
    scene.end(victim, 1)
    for _ in range(20):
        await scene.turn(seconds=30)
    assert scene.reason() == "Stopping"
    assert "waiting for west to answer" in scene.condition("Running").message
    assert scene.attempt().number == 1
    scene.world.regain("west")
    await scene.until(lambda: scene.status().is_true("Running"))
    assert scene.attempt().number == 2


async def test_a_member_that_was_removed_is_not_waited_for() -> None:
    scene = await running()
    scene.world.lose("west")
    victim = next(pod for pod in scene.pods() if "-r0-" in pod["metadata"]["name"])
    scene.end(victim, 1)
    for _ in range(5):
        await scene.turn()
    assert scene.reason() == "Stopping"
    assert "crosscloud member remove" in scene.condition("Running").message
    scene.world.real_hub.remove(Ref(MEMBER, "west"))
    await scene.until(lambda: scene.reason() == "Waiting")
    assert [item.member for item in scene.status().refused] == ["east"]


async def test_a_member_that_refuses_to_be_read_is_unknown_not_empty() -> None:
    scene = await running()

    def fate(call: str) -> str | None:
        return "refuse" if call in ("get", "list") else None

    scene.world.restart(lambda cluster: Flaky(cluster, fate) if cluster.name == "west" else cluster)
    for kind in (POD, CONFIG_MAP):
        scene.world.cache("west", kind).blank()  # type: ignore[union-attr]
    await scene.turn()
    assert scene.reason() == "MemberUnreachable"
    assert scene.attempt().cause is None


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
    scene.delete()
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    assert west.find(KINDS[kind], name) == before


async def test_a_cluster_under_two_names_is_placed_on_once_and_what_runs_under_the_younger_name_goes_on() -> None:
    scene = Lab(lab())
    (east, west) = (scene.world.real_hub.find(MEMBER, name) for name in ("east", "west"))
    assert east is not None
    assert west is not None
    west["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    scene.submit(job("before"))
    await scene.until(lambda: scene.status("before").is_true("Running"))

    for name in ("east", "west"):
        system = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system"}}
        scene.world.clusters[name].put(system)["metadata"]["uid"] = "one-and-the-same"
        scene.world.add_node(name, "more", 8)
    scene.submit(job())
    await scene.until(lambda: scene.status().is_true("Running"))
    assert {stage.member for stage in scene.status().plan} == {"east"}
    assert [(item.member, item.reason) for item in scene.status().refused] == [
        ("west", "unknown: it is the same cluster as east, where its GPUs are counted")
    ]
    assert scene.status("before").is_true("Running")
    assert {stage.member for stage in scene.status("before").plan} == {"east", "west"}

    scene.delete("before")
    await scene.until(lambda: scene.world.real_hub.find(JOB, "before") is None)
    assert scene.pods("before") == []
