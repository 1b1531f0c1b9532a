"""Seeded schedules: the operator is killed at any call, calls fail or lose their answers, and the end is the same.

`Killed` is raised before or after a call has had its effect; the coroutine dies there, as a process does, and a new
operator begins with nothing but what the API servers hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from operator_core.memory import MemoryWorld
from operator_core.players import TWO_STAGES, Flaky, Killed, Lab, job, lab, seeded_fate, split_lab

from crosscloud_operator.domain.lifecycle import TRANSITIONS, State, state_of
from crosscloud_operator.kube.api import POD, ApiError, Ref

OUTCOMES = {"kill": ("kill before", "kill after"), "fail": ("fail before", "fail after")}


class Witness:
    """Watches what must hold at every moment, whatever happens."""

    def __init__(self, scene: Lab) -> None:
        self._scene = scene
        self._states: dict[str, State] = {}

    def look(self) -> None:
        for obj in self._scene.world.jobs():
            self._transition(obj["metadata"]["name"], bool(obj["metadata"].get("deletionTimestamp")))
        for cluster in self._scene.world.clusters.values():
            created = [name for kind, name in cluster.created if kind == "Pod"]
            assert len(created) == len(set(created)), "no pod was made twice"
        assert not any(kubelet.overcommitted for kubelet in self._scene.kubelets)
        self._one_attempt()

    def _transition(self, name: str, deleting: bool) -> None:
        now = state_of(self._scene.status(name), deleting=deleting, now=self._scene.world.clock)
        before = self._states.get(name, State.WAITING)
        assert now in _reachable(before), f"{before} to {now}"
        self._states[name] = now

    def _one_attempt(self) -> None:
        by_job: dict[str, set[str]] = {}
        for cluster in self._scene.world.clusters.values():
            for pod in cluster.all(POD):
                labels = pod["metadata"]["labels"]
                by_job.setdefault(labels["crosscloud.dev/job"], set()).add(labels["crosscloud.dev/attempt"])
        for name, attempts in by_job.items():
            assert len(attempts) == 1, f"{name} has pods of the attempts {attempts} side by side"


def _reachable(start: State) -> set[State]:
    """One look may go through several states."""
    found, edge = {start}, [start]
    while edge:
        for state in TRANSITIONS[edge.pop()] - found:
            found.add(state)
            edge.append(state)
    return found


async def turn(scene: Lab, witness: Witness, *names: str) -> bool:
    """Look at each job; whether the operator was killed."""
    killed = False
    for name in names:
        try:
            await scene.look(name)
        except Killed:
            killed = True
            break
        except ApiError:
            pass
        witness.look()
    scene.play()
    witness.look()
    scene.world.clock += 1
    return killed


async def live(scene: Lab, witness: Witness, names: tuple[str, ...], done: Callable[[], bool], wrap: Any) -> None:
    for _ in range(400):
        if done():
            return
        if await turn(scene, witness, *names):
            scene.world.restart(wrap)
    raise AssertionError(f"not done: {[(name, scene.reason(name), scene.status(name).attempt) for name in names]}")


def plan_of(scene: Lab, name: str = "demo") -> list[tuple[int, str, list[str]]]:
    return [(stage.replica, stage.member, [node.name for node in stage.nodes]) for stage in scene.status(name).plan]


@pytest.mark.parametrize(
    ("world", "spec", "stride", "plan"),
    [
        (lab, {}, 1, [(0, "east", ["e1"]), (1, "west", ["w1", "w2"])]),
        (
            split_lab,
            TWO_STAGES,
            3,
            [(0, "east", ["e1"]), (0, "east", ["e1"]), (1, "east", ["e1"]), (1, "west", ["w1"])],
        ),
    ],
    ids=["one stage", "two stages"],
)
async def test_killed_at_any_call_the_operator_comes_to_the_same_end(
    world: Callable[[], MemoryWorld], spec: dict[str, Any], stride: int, plan: list[tuple[int, str, list[str]]]
) -> None:
    """Every single call of a whole life (or each `stride`th), one after the other, before and after its effect."""
    for when in OUTCOMES["kill"]:
        moment = 0
        while True:
            scene = Lab(world())
            scene.submit(job(**spec))
            left = [moment]

            def fate(_: str, left: list[int] = left, when: str = when) -> str | None:
                left[0] -= 1
                return when if left[0] == -1 else None

            def wrap(cluster: Any, fate: Callable[[str], str | None] = fate) -> Flaky:
                return Flaky(cluster, fate)

            scene.world.restart(wrap)
            witness = Witness(scene)
            await live(scene, witness, ("demo",), lambda scene=scene: scene.status().is_true("Running"), wrap)  # type: ignore[misc]
            assert plan_of(scene) == plan
            assert len(scene.pods()) == sum(len(nodes) for _, _, nodes in plan)
            assert scene.attempt().number == 1, f"killed {when} call {moment}"
            scene.finish()
            await live(scene, witness, ("demo",), lambda scene=scene: scene.status().finished, wrap)  # type: ignore[misc]
            scene.delete()
            await live(scene, witness, ("demo",), lambda scene=scene: not scene.world.jobs(), wrap)  # type: ignore[misc]
            scene.play()
            assert nothing_left(scene.world)
            if left[0] >= 0:
                break  # the life has fewer calls than this
            moment += stride
        assert moment > 60


def nothing_left(world: MemoryWorld) -> bool:
    here = {kind for cluster in world.clusters.values() for kind, _, _ in cluster.objects}
    on_hub = {kind for kind, _, _ in world.real_hub.objects}
    return here == {"Namespace", "Node"} and on_hub <= {"Namespace", "MemberCluster", "Event"}


@pytest.mark.parametrize("kind", ["kill", "fail"])
@pytest.mark.parametrize("block", range(4))
async def test_whatever_happens_two_jobs_end_well_one_after_the_other(kind: str, block: int) -> None:
    """Two jobs that each need all there is; pods fail and are deleted; calls fail or the operator dies all the time.

    Of two schedules one has replicas of two stages.
    """
    for seed in range(block * 15, block * 15 + 15):
        dice = random.Random(seed)
        world, shape = (split_lab, TWO_STAGES) if seed % 2 else (lab, {})
        scene = Lab(world())
        names = ("one", "two")
        for name in names:
            scene.submit(job(name, failurePolicy={"attempts": 100}, **shape))
        fate = seeded_fate(seed, 0.03 if kind == "kill" else 0.05, OUTCOMES[kind])

        def wrap(cluster: Any, fate: Callable[[str], str | None] = fate) -> Flaky:
            return Flaky(cluster, fate)

        scene.world.restart(wrap)
        witness = Witness(scene)
        accidents = 3
        for _ in range(800):
            if all(scene.status(name).is_true("Succeeded") for name in names):
                break
            if await turn(scene, witness, *names):
                scene.world.restart(wrap)
            for name in names:
                if not scene.status(name).is_true("Running"):
                    continue
                if accidents and dice.random() < 0.5:
                    accidents -= 1
                    accident(scene, name, dice)
                elif dice.random() < 0.3:
                    scene.finish(name)
        else:
            raise AssertionError(
                f"seed {seed}: {[(name, scene.reason(name), scene.status(name).attempt) for name in names]}"
            )
        for name in names:
            completed = scene.status(name)
            assert completed.result is not None
            scene.delete(name)
        await live(scene, witness, names, lambda scene=scene: not scene.world.jobs(), wrap)  # type: ignore[misc]
        scene.play()
        assert nothing_left(scene.world), f"seed {seed}"


def accident(scene: Lab, name: str, dice: random.Random) -> None:
    """A pod fails, is deleted, or its member can't be reached for a while."""
    pod = dice.choice(scene.pods(name))
    cluster = scene.cluster_of(pod)
    match dice.randrange(3):
        case 0:
            scene.end(pod, dice.choice((1, 71, 137)))
        case 1:
            cluster.remove(Ref(POD, pod["metadata"]["name"], "ml"))
        case 2:
            cluster.change(pod, phase="Failed", reason="Evicted", containerStatuses=[])


@pytest.mark.parametrize("seed", range(40))
async def test_members_that_come_and_go_never_lead_to_two_attempts_at_once(seed: int) -> None:
    dice = random.Random(seed)
    scene = Lab(lab(gpus_east=8, gpus_west=(4, 4)))
    scene.submit(job(failurePolicy={"attempts": 100}, **(TWO_STAGES if seed % 2 else {})))
    witness = Witness(scene)
    for _ in range(80):
        for name, cluster in scene.world.clusters.items():
            if dice.random() < 0.15:
                if cluster.reachable:
                    scene.world.lose(name)
                else:
                    scene.world.regain(name)
        await turn(scene, witness, "demo")
        if scene.pods() and dice.random() < 0.05:
            accident(scene, "demo", dice)
        scene.world.clock += dice.choice((0, 1, 20, 100))
    for name in scene.world.clusters:
        scene.world.regain(name)
    await live(scene, witness, ("demo",), lambda: scene.status().is_true("Running"), lambda cluster: cluster)
    scene.finish()
    await live(scene, witness, ("demo",), lambda: scene.status().is_true("Succeeded"), lambda cluster: cluster)
