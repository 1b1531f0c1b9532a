"""Reading the clusters: from informers where that is enough, by fresh lists where a decision can't be undone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from crosscloud_operator.domain import inventory, ledger, names, observed, placement, record, spec
from crosscloud_operator.domain.actions import Remove
from crosscloud_operator.domain.documents import PlannedPod, planned_pods
from crosscloud_operator.domain.inventory import Snapshot
from crosscloud_operator.domain.lifecycle import Found, Site, current
from crosscloud_operator.domain.names import JobId
from crosscloud_operator.domain.observed import PodState
from crosscloud_operator.domain.record import JobStatus, PlacedStage
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.domain.spec import Job
from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    DEPLOYMENT,
    NAMESPACE,
    NODE,
    POD,
    SECRET,
    SERVICE,
    ApiError,
    Cluster,
    Obj,
    Ref,
    World,
)
from crosscloud_operator.kube.duplicates import duplicates
from crosscloud_trainer.contract import Report

log = logging.getLogger(__name__)
T = TypeVar("T")


class Reach:
    """Who could not be reached while a job was observed, and since when; the clock of an earlier look goes on."""

    def __init__(self, world: World, status: JobStatus) -> None:
        self._world = world
        self._before = {item.name: item.unreachable_since for item in status.members if item.unreachable_since}
        self.lost: dict[str, str] = {}

    def check(self, member: str) -> Cluster | None:
        """The member's API server, None (and noted) where it can't be used or its informer has lost it."""
        client, cache = self._world.member(member), self._world.cache(member, POD)
        if client is None or cache is None or cache.unreachable_since is not None:
            self.note(member, cache.unreachable_since if cache else None)
            return None
        return client

    def note(self, member: str, since: float | None = None) -> None:
        found = since if since is not None else self._world.now()
        self.lost.setdefault(member, self._before.get(member) or record.rfc3339(found))

    async def each(self, members: Iterable[str], ask: Callable[[str, Cluster], Awaitable[T]]) -> dict[str, T]:
        """Ask all members at once, so that a slow one doesn't hold up the others; who doesn't answer is noted."""

        async def one(member: str) -> tuple[str, T] | None:
            client = self.check(member)
            if client is None:
                return None
            try:
                return member, await ask(member, client)
            except ApiError as fault:  # also one that refuses to be read: nothing is known of it
                log.warning("member %s: %s", member, fault.message)
                self.note(member)
                return None

        answers = await asyncio.gather(*(one(member) for member in members))
        return dict(answer for answer in answers if answer is not None)


def place(world: World, job: Job, jobs: Iterable[Obj], settings: JobSettings) -> placement.Placement:
    """The plan on the members as last seen, less what the given jobs' plans hold."""
    members = sorted(world.members(), key=lambda item: str(item["metadata"]["name"]))
    doubled = duplicates(world)
    snapshots = [_snapshot(world, member, settings, doubled) for member in members]
    pods = {}
    for member in snapshots:
        cache = world.cache(member.name, POD)
        pods[member.name] = cache.objects() if cache and member.unknown is None else ()
    promised = ledger.promised(jobs, pods, without=job.id.uid)
    return placement.place(spec.request(job, settings), snapshots, promised)


def hub_member(world: World) -> str | None:
    """The member that is the hub itself, if one is."""
    for member in world.members():
        if "inCluster" in ((member.get("spec") or {}).get("access") or {}):
            return str(member["metadata"]["name"])
    return None


async def sites(world: World, job: Job, members: Iterable[str], reach: Reach) -> dict[str, Site]:
    """What is ready for the job in each member that answers."""
    by_name = {member["metadata"]["name"]: member for member in world.members()}

    async def look(name: str, client: Cluster) -> Site:
        namespace = job.id.namespace
        anchor, pods, gateway = await asyncio.gather(
            client.get(Ref(CONFIG_MAP, names.anchor(job.id.name), namespace)),
            client.get(Ref(SERVICE, names.peers_service(job.id.name), namespace)),
            client.get(Ref(SERVICE, names.gateway_service(job.id.name), namespace)),
        )
        anchor_uid = anchor["metadata"]["uid"] if anchor is not None and _stays(anchor, job.id) else None
        cache = world.cache(name, NODE)
        host = inventory.gateway_host(by_name.get(name, {}), cache.objects() if cache else ())
        port = _node_port(gateway) if gateway is not None and _owned(gateway, job.id, anchor_uid) else None
        problem = None
        if host is None:
            problem = f"{name}: no ready node has an address; set spec.gateway.address of MemberCluster {name}"
        return Site(
            anchor_uid=anchor_uid,
            has_pods_service=pods is not None and _owned(pods, job.id, anchor_uid),
            gateway=f"{host}:{port}" if host and port else None,
            problem=problem,
        )

    return await reach.each(members, look)


async def storage(world: World, job: Job) -> Mapping[str, str] | None:
    """The data of the user's storage Secret on the hub, base64; None where none is named or it isn't there."""
    if job.spec.storage.secret_name is None:
        return None
    found = await world.hub.get(Ref(SECRET, job.spec.storage.secret_name, job.id.namespace))
    return None if found is None else dict(found.get("data") or {})


async def attempt_pods(
    world: World, job: Job, status: JobStatus, reach: Reach, done: frozenset[int]
) -> tuple[tuple[PodState, ...], tuple[Remove, ...], tuple[str, ...]]:
    """The planned pods, what is left of older attempts, and why gateways pass nothing yet. Pods that the informer
    doesn't show are looked for by a fresh list before anyone calls them missing; those of replicas in `done` needn't
    be there.
    """
    number = current(status).number
    planned = planned_pods(job.id.name, number, status.plan)
    members = sorted({pod.member for pod in planned})
    cached = {member: _own_pods(world, member, job.id) for member in members}

    async def look(member: str, client: Cluster) -> dict[str, Obj]:
        cache = world.cache(member, POD)
        wanted = {pod.name for pod in planned if pod.member == member and pod.id.replica not in done}
        if cache is not None and cache.synced and wanted <= set(cached[member]):
            return cached[member]
        listed = await client.list(POD, namespace=job.id.namespace, selector=names.selector(job.id))
        return {pod["metadata"]["name"]: pod for pod in listed}

    seen = await reach.each(members, look)
    states = tuple(_state(pod, seen, cached) for pod in planned)
    strays = [
        Remove(member, "Pod", name, raw["metadata"]["uid"])
        for member, raws in sorted(seen.items())
        for name, raw in sorted(raws.items())
        if _attempt(raw) < number and not raw["metadata"].get("deletionTimestamp")
    ]
    deployment = names.gateway(job.id.name, number)
    words = [observed.gateway_words(member, seen[member].values(), number, deployment) for member in sorted(seen)]
    gateways = tuple(item for item in words if item is not None) if len(members) > 1 else ()
    return states, tuple(strays), gateways


async def old_gateways(job: Job, status: JobStatus, reach: Reach) -> tuple[Remove, ...]:
    """Gateways of older attempts, left where a member didn't answer when they ended."""
    number = current(status).number

    async def look(member: str, client: Cluster) -> list[Remove]:
        listed = await client.list(DEPLOYMENT, namespace=job.id.namespace, selector=names.selector(job.id))
        return [_remove(member, raw) for raw in listed if _attempt(raw) < number]

    answers = await reach.each(sorted({stage.member for stage in status.plan}), look)
    return tuple(item for _, items in sorted(answers.items()) for item in items)


def cached_reports(world: World, job: Job, status: JobStatus) -> dict[int, Report]:
    """The replicas' last words that the informers have seen."""
    found: dict[int, Report] = {}
    for member, stages in _first_stages(status).items():
        cache = world.cache(member, CONFIG_MAP)
        raws = [raw for raw in (cache.objects() if cache else ()) if _in_namespace(raw, job.id)]
        found |= observed.replica_reports(raws, job.id, current(status).number, stages)
    return found


async def fresh_reports(job: Job, status: JobStatus, replicas: Iterable[int], reach: Reach) -> dict[int, Report]:
    """The last words of these replicas as their API servers have them now: read before a replica is called lost."""
    wanted = set(replicas)
    first = {
        member: asked
        for member, stages in _first_stages(status).items()
        if (asked := [stage for stage in stages if stage.replica in wanted])
    }

    async def look(member: str, client: Cluster) -> list[Obj]:
        refs = [Ref(CONFIG_MAP, names.report(job.id.name, stage.replica), job.id.namespace) for stage in first[member]]
        found = await asyncio.gather(*(client.get(ref) for ref in refs))
        return [raw for raw in found if raw is not None]

    answers = await reach.each(sorted(first), look)
    told: dict[int, Report] = {}
    for member, raws in answers.items():
        told |= observed.replica_reports(raws, job.id, current(status).number, first[member])
    return told


def replicas_in_reach(world: World, status: JobStatus) -> set[int]:
    """Replicas that report in members that have a MemberCluster: of the others nothing can be heard any more."""
    known, _ = _known_members(world, status)
    return {stage.replica for member, stages in _first_stages(status).items() if member in known for stage in stages}


def _first_stages(status: JobStatus) -> dict[str, list[PlacedStage]]:
    """By member, the stages that speak for their replicas: nobody else's word on a replica counts."""
    found: dict[str, list[PlacedStage]] = {}
    for stage in status.plan:
        if stage.stage == 0:
            found.setdefault(stage.member, []).append(stage)
    return found


async def attempt_objects(world: World, job: Job, status: JobStatus, reach: Reach) -> tuple[Found, ...]:
    """Everything of attempts that is left in the job's members, by fresh lists. A member whose MemberCluster was
    removed is not waited for: who removes it says that nothing of ours goes on there.
    """
    known, _ = _known_members(world, status)
    number, namespace = current(status).number, job.id.namespace
    of_attempts = f"{names.selector(job.id)},{names.ATTEMPT}"

    async def look(member: str, client: Cluster) -> list[Found]:
        deployments, pods, config_maps = await asyncio.gather(
            client.list(DEPLOYMENT, namespace=namespace, selector=of_attempts),
            client.list(POD, namespace=namespace, selector=of_attempts),
            client.list(CONFIG_MAP, namespace=namespace, selector=of_attempts),
        )
        # By name: to list Secrets is more than the operator's account in a member should be allowed.
        keys = await client.get(Ref(SECRET, names.keys_secret(job.id.name, number), namespace))
        raws = [*deployments, *pods, *config_maps, *([keys] if keys and names.is_ours(keys, job.id) else [])]
        return [_found(member, raw) for raw in raws]

    answers = await reach.each(known, look)
    return tuple(item for _, items in sorted(answers.items()) for item in items)


async def anchors(
    world: World, job: JobId, status: JobStatus, reach: Reach
) -> tuple[tuple[Remove, ...], tuple[str, ...]]:
    """The anchors that are still there, and the members that can't be cleaned as their MemberCluster is gone."""
    known, forgotten = _known_members(world, status)

    async def look(member: str, client: Cluster) -> Remove | None:
        raw = await client.get(Ref(CONFIG_MAP, names.anchor(job.name), job.namespace))
        return _remove(member, raw) if raw is not None and names.is_ours(raw, job) else None

    answers = await reach.each(known, look)
    return tuple(item for _, item in sorted(answers.items()) if item is not None), forgotten


def _known_members(world: World, status: JobStatus) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The job's members that have a MemberCluster, and those that have none any more."""
    there = {member["metadata"]["name"] for member in world.members()}
    names_ = [item.name for item in status.members]
    return tuple(name for name in names_ if name in there), tuple(name for name in names_ if name not in there)


def _snapshot(world: World, member: Obj, settings: JobSettings, doubled: Mapping[str, str]) -> Snapshot:
    name = member["metadata"]["name"]
    caches = [world.cache(name, kind) for kind in (NODE, POD, NAMESPACE)]
    if world.member(name) is None:
        reason = "it can't be used now; see the conditions of MemberCluster " + name
        return Snapshot(name, unknown=reason)
    if name in doubled:
        return Snapshot(name, unknown=f"it is the same cluster as {doubled[name]}, where its GPUs are counted")
    complete = [cache for cache in caches if cache is not None and cache.synced]
    since = [cache.unreachable_since for cache in caches if cache is not None and cache.unreachable_since is not None]
    if since:
        return Snapshot(name, unknown=f"not reached since {record.rfc3339(min(since))}")
    if len(complete) < len(caches):
        return Snapshot(name, unknown="its list of nodes, pods and namespaces isn't complete yet")
    nodes, pods, namespaces = (cache.objects() for cache in complete)
    allowed = (member.get("spec") or {}).get("allowedNamespaces")
    gpu = settings.gpu_resource, settings.gpu_product_label
    reachable = inventory.gateway_host(member, nodes) is not None
    return inventory.snapshot(name, nodes, pods, namespaces, allowed, *gpu, reachable=reachable)


def _own_pods(world: World, member: str, job: JobId) -> dict[str, Obj]:
    cache = world.cache(member, POD)
    raws = cache.objects() if cache else ()
    return {raw["metadata"]["name"]: raw for raw in raws if names.is_ours(raw, job) and _in_namespace(raw, job)}


def _state(pod: PlannedPod, seen: Mapping[str, Mapping[str, Obj]], cached: Mapping[str, Mapping[str, Obj]]) -> PodState:
    known = pod.member in seen
    raws = seen[pod.member] if known else cached[pod.member]
    return observed.pod_state(pod, raws.get(pod.name), known=known)


def _found(member: str, raw: Obj) -> Found:
    labels = raw["metadata"].get("labels") or {}
    is_pod = raw["kind"] == "Pod"
    return Found(
        remove=_remove(member, raw),
        leaving=bool(raw["metadata"].get("deletionTimestamp")),
        is_trainer=is_pod and labels.get(names.COMPONENT) == names.TRAINER,
        finished=is_pod and (raw.get("status") or {}).get("phase") in inventory.ENDED,
        held_open=is_pod and observed.is_held_open(raw),
    )


def _remove(member: str, raw: Obj) -> Remove:
    return Remove(member, raw["kind"], raw["metadata"]["name"], raw["metadata"]["uid"])


def _attempt(raw: Obj) -> int:
    text = (raw["metadata"].get("labels") or {}).get(names.ATTEMPT, "")
    return int(text) if text.isdigit() else 0


def _in_namespace(raw: Obj, job: JobId) -> bool:
    return bool(raw["metadata"].get("namespace") == job.namespace)


def _stays(raw: Obj, job: JobId) -> bool:
    return names.is_ours(raw, job) and not raw["metadata"].get("deletionTimestamp")


def _owned(raw: Obj, job: JobId, anchor_uid: str | None) -> bool:
    """Ours, and not on its way out with an older anchor."""
    owners = raw["metadata"].get("ownerReferences") or ()
    return _stays(raw, job) and anchor_uid is not None and any(item.get("uid") == anchor_uid for item in owners)


def _node_port(service: Obj) -> int | None:
    ports = (service.get("spec") or {}).get("ports") or ()
    return next((int(port["nodePort"]) for port in ports if port.get("nodePort")), None)
