"""Who acts beside the operator: scheduler, kubelet, trainers, garbage collector, and a fate that kills the operator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from operator_core.memory import MemoryCluster, MemoryWorld

from crosscloud_operator.domain import record
from crosscloud_operator.domain.inventory import gpu_nodes
from crosscloud_operator.domain.scheduling import requested
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.kube.api import CONFIG_MAP, JOB, NODE, POD, Kind, Obj, Ref, Refused, Unreachable
from crosscloud_operator.reconcile import reconcile

SETTINGS = JobSettings(
    hub="hub-1", operator_namespace="crosscloud", trainer_image="trainer:1", gateway_image="gateway:1"
)


class Killed(BaseException):
    """The operator's process has gone, in the middle of whatever it did."""


def job(name: str = "demo", replicas: int = 2, gpus: int = 4, **spec: Any) -> Obj:
    """A valid job as the API server holds it."""
    return {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "CrossCloudTrainingJob",
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {
            "replicas": replicas,
            "replica": {"gpusPerStage": gpus},
            "training": {
                "model": {"preset": "tiny-llama"},
                "data": {"train": ["stdlib:*.py"]},
                "tokens": "1M",
            },
            "storage": {"uri": "s3://models/demo"},
            **spec,
        },
    }


def lab(gpus_east: int = 4, gpus_west: tuple[int, ...] = (2, 2)) -> MemoryWorld:
    """The default lab: east with one node of 4 GPUs, west with two nodes of 2."""
    world = MemoryWorld("east", "west")
    world.add_node("east", "e1", gpus_east)
    for number, gpus in enumerate(gpus_west, 1):
        world.add_node("west", f"w{number}", gpus)
    return world


def split_lab() -> MemoryWorld:
    """A lab of as many GPUs in which the second of two replicas of two stages of two GPUs lies in both members."""
    return lab(gpus_east=6, gpus_west=(2,))


TWO_STAGES: dict[str, Any] = {"replica": {"gpusPerStage": 2, "stages": 2}}


@dataclass
class Flaky:
    """A cluster behind which fate waits: the operator is killed, or a call fails, before or after it has its effect."""

    real: MemoryCluster
    fate: Callable[[str], str | None]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.real.name

    async def get(self, ref: Ref) -> Obj | None:
        return await self._call(self.real.get, ref)

    async def list(self, kind: Kind, **options: Any) -> Any:
        return await self._call(self.real.list, kind, **options)

    async def create(self, obj: Obj) -> Obj:
        return await self._call(self.real.create, obj)

    async def json_patch(self, ref: Ref, operations: Any) -> Obj:
        return await self._call(self.real.json_patch, ref, operations)

    async def merge_patch(self, ref: Ref, patch: Obj, **options: Any) -> Obj:
        return await self._call(self.real.merge_patch, ref, patch, **options)

    async def delete(self, ref: Ref, **options: Any) -> None:
        return await self._call(self.real.delete, ref, **options)

    async def _call(self, method: Any, *args: Any, **options: Any) -> Any:
        what = self.fate(method.__name__)
        if what == "kill before":
            raise Killed
        if what == "fail before":
            raise Unreachable("connection refused")
        if what == "refuse":
            raise Refused("pods is forbidden")
        result = await method(*args, **options)
        if what == "kill after":
            raise Killed
        if what == "fail after":
            raise Unreachable("the answer was lost")
        return result


class Kubelet:
    """Scheduler and kubelet of a member: binds pods without gates where their affinity says, runs and stops them."""

    def __init__(self, world: MemoryWorld, cluster: MemoryCluster) -> None:
        self._world = world
        self.cluster = cluster
        self.overcommitted: list[str] = []

    def step(self) -> None:
        for pod in self.cluster.all(POD):
            if pod["metadata"].get("deletionTimestamp"):
                self.cluster.purge(pod)
            elif pod["spec"].get("schedulingGates") or "affinity" not in pod["spec"]:
                continue
            elif not pod["spec"].get("nodeName"):
                self._bind(pod)
            elif pod["status"]["phase"] == "Pending":
                self._start(pod)
        self.cluster.collect_garbage()

    def _bind(self, pod: Obj) -> None:
        affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (wanted,) = affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"]
        nodes = {node.name: node for node in gpu_nodes(self.cluster.all(NODE), self.cluster.all(POD))}
        if wanted not in nodes or nodes[wanted].free < requested(pod["spec"], "nvidia.com/gpu"):
            self.overcommitted.append(pod["metadata"]["name"])
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            if (pod["status"].get("conditions") or [None])[0] != condition:
                self.cluster.change(pod, conditions=[condition])
            return
        pod["spec"]["nodeName"] = wanted
        self.cluster.touch(pod)

    def _start(self, pod: Obj) -> None:
        self.cluster.change(pod, phase="Running", containerStatuses=[trainer_container({"running": {}})])


def trainer_container(state: Obj) -> Obj:
    return {"name": "trainer", "state": state}


def report(
    world: MemoryWorld,
    pod: Obj,
    activity: str,
    outcome: str | None = None,
    step: int = 5,
    *,
    checkpoint: Obj | None = None,
    home: int = 1,
) -> None:
    """What rank 0 of a replica writes."""
    labels = pod["metadata"]["labels"]
    replica = int(labels["crosscloud.dev/replica"])
    env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
    namespace, name = env["CROSSCLOUD_REPORT"].removeprefix("configmap:").split("/")
    cluster = next(cluster for cluster in world.clusters.values() if pod in cluster.objects.values())
    config_map = cluster.find(CONFIG_MAP, name, namespace)
    assert config_map is not None
    document: Obj = {
        "apiVersion": "report.crosscloud.dev/v1",
        "attempt": int(labels["crosscloud.dev/attempt"]),
        "home": home,
        "term": 1,
        "view": 1,
        "replica": replica,
        "incarnation": int(labels["crosscloud.dev/incarnation"]),
        "sequence": int(world.clock) * 10 + step,
        "time": record.rfc3339(world.clock),
        "activity": activity,
        "progress": {"step": step, "totalSteps": 10, "round": 1, "tokens": 100 * step, "digest": "abc", "loss": 2.5},
    }
    if checkpoint:
        document["progress"]["checkpoint"] = checkpoint
    if outcome:
        document["completion"] = {
            "outcome": outcome,
            "exitCode": 0,
            "message": "done",
            "resultUri": "s3://models/demo/result",
        }
    config_map["data"] = {"report.json": json.dumps(document)}
    cluster.touch(config_map)


async def running(**spec: Any) -> Lab:
    """The default lab, in which the job `demo` runs."""
    scene = Lab(lab())
    scene.submit(job(**spec))
    await scene.until(lambda: scene.status().is_true("Running"))
    return scene


def keys_of(pod: Obj) -> set[str]:
    """The items of its member's Secret that a pod mounts, but for the authority's certificate."""
    volume = next(item for item in pod["spec"]["volumes"] if item["name"] == "crosscloud-tls")
    return {item["key"] for item in volume["secret"]["items"]} - {"ca.crt"}


class Lab:
    """Operator and players together, one move after the other."""

    def __init__(self, world: MemoryWorld, settings: JobSettings = SETTINGS) -> None:
        self.world = world
        self.settings = settings
        self.kubelets = [Kubelet(world, cluster) for cluster in world.clusters.values()]

    async def look(self, name: str = "demo") -> float | None:
        return await reconcile(self.world, "ml", name, self.settings)

    def play(self) -> None:
        for kubelet in self.kubelets:
            if kubelet.cluster.reachable:
                kubelet.step()

    async def turn(self, *names: str, seconds: float = 1.0) -> None:
        """Every job is looked at, then everybody else moves, then time goes on."""
        for name in names or [item["metadata"]["name"] for item in self.world.real_hub.all(JOB)]:
            await self.look(name)
        self.play()
        self.world.clock += seconds

    async def until(self, condition: Callable[[], bool], turns: int = 100, seconds: float = 1.0) -> None:
        for _ in range(turns):
            if condition():
                return
            await self.turn(seconds=seconds)
        raise AssertionError(f"did not come true within {turns} turns; status: {self.status()}")

    def status(self, name: str = "demo") -> record.JobStatus:
        found = self.world.real_hub.find(JOB, name)
        return record.read_status(found.get("status") if found else None)

    def attempt(self, name: str = "demo") -> record.Attempt:
        """The attempt that there must be."""
        found = self.status(name).attempt
        assert found is not None
        return found

    def condition(self, kind: str, name: str = "demo") -> record.Condition:
        """The condition that there must be."""
        found = self.status(name).condition(kind)
        assert found is not None
        return found

    def reason(self, name: str = "demo") -> str:
        condition = self.status(name).condition("Running")
        return condition.reason if condition else ""

    def pods(self, name: str = "demo") -> list[Obj]:
        return [
            pod
            for cluster in self.world.clusters.values()
            for pod in cluster.all(POD)
            if pod["metadata"]["labels"].get("crosscloud.dev/job") == name
        ]

    def writers(self, name: str = "demo") -> list[Obj]:
        """The pods that write their replicas' reports."""
        containers = [(pod, pod["spec"]["containers"][0]) for pod in self.pods(name)]
        return [pod for pod, main in containers if any(item["name"] == "CROSSCLOUD_REPORT" for item in main["env"])]

    def cluster_of(self, pod: Obj) -> MemoryCluster:
        return next(cluster for cluster in self.world.clusters.values() if pod in cluster.objects.values())

    def finish(self, name: str = "demo") -> None:
        """All trainers of the job end well, and say so."""
        for pod in self.writers(name):
            report(self.world, pod, "Ended", "Succeeded", step=10)
        for pod in self.pods(name):
            self.end(pod, 0)

    def end(self, pod: Obj, code: int, reason: str | None = None) -> None:
        """The trainer container ends; without sidecars the pod does too."""
        why = reason or ("Error" if code else "Completed")
        terminated = {"exitCode": code, "reason": why, "finishedAt": record.rfc3339(self.world.clock)}
        phase = "Failed" if code else "Succeeded"
        statuses = [trainer_container({"terminated": terminated})]
        self.cluster_of(pod).change(pod, phase=phase, containerStatuses=statuses)

    def submit(self, obj: Obj) -> Obj:
        return self.world.real_hub.put(obj)

    def delete(self, name: str = "demo") -> None:
        """A user deletes the job."""
        self.world.real_hub.remove(Ref(JOB, name, "ml"))


def seeded_fate(seed: int, chance: float, kinds: tuple[str, ...]) -> Callable[[str], str | None]:
    """Something happens at each call with this chance."""
    dice = random.Random(seed)

    def fate(call: str) -> str | None:
        return dice.choice(kinds) if dice.random() < chance else None

    return fate
