"""The one level-based loop over a job: observe, decide, save, act. Every trigger comes here.

It may be killed at any await: what can't be undone is in the status before it is done, names are deterministic, an
object that is there already is ours only by its labels, and every patch and removal carries a UID or resourceVersion.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crosscloud_operator import execution, observation
from crosscloud_operator.domain import events, names, record, steps
from crosscloud_operator.domain.actions import Failure
from crosscloud_operator.domain.errors import InvalidJob, InvalidStatus
from crosscloud_operator.domain.lifecycle import Decision, Facts, Scene, State, state_of, tell
from crosscloud_operator.domain.observed import has_succeeded
from crosscloud_operator.domain.record import JobStatus, MemberState
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.domain.spec import Job, job_id, read_job
from crosscloud_operator.domain.steps.gang import after_failures
from crosscloud_operator.domain.steps.stopping import deleting
from crosscloud_operator.domain.steps.waiting import plan
from crosscloud_operator.kube.api import (
    JOB,
    AlreadyExists,
    ApiError,
    Conflict,
    NotFound,
    Obj,
    Ref,
    Refused,
    World,
)
from crosscloud_operator.observation import Reach

log = logging.getLogger(__name__)

PASSES = 12  # more than any way through the states needs; whoever is still busy then comes again
SOON = 1.0
FAILURE_LOOK = 5.0


@dataclass(frozen=True)
class Pass:
    """What one look came to: the job as it is now, and when to look again (None: when woken)."""

    obj: Obj
    again: bool = False
    requeue: float | None = None


async def reconcile(world: World, namespace: str, name: str, settings: JobSettings) -> float | None:
    """Bring a job as far as it goes now. Returns the seconds until it wants to be looked at again, None: when woken.

    Raises ApiError where the hub doesn't answer. Must not run twice at once for one job.
    """
    ref = Ref(JOB, name, namespace)
    obj = await world.hub.get(ref)
    for _ in range(PASSES):
        if obj is None:
            return None
        try:
            result = await _look(world, obj, settings)
        except Conflict:  # somebody else has changed the job
            obj = await world.hub.get(ref)
            continue
        if not result.again:
            return result.requeue
        obj = result.obj
    return SOON


async def _look(world: World, obj: Obj, settings: JobSettings) -> Pass:
    """One pass, in numbered steps."""
    # 1. What was saved.
    deletion = bool(obj["metadata"].get("deletionTimestamp"))
    if deletion and names.FINALIZER not in obj["metadata"].get("finalizers", ()):
        return Pass(obj)
    try:
        status = record.read_status(obj.get("status"))
    except InvalidStatus as fault:
        if not deletion:
            return await _refuse_status(world, obj, fault, settings)
        # Nothing in it can be trusted, so the job's objects may be in any member.
        status = JobStatus(members=tuple(MemberState(item["metadata"]["name"]) for item in world.members()))
    for fault_text in record.unreadable_times(obj.get("status")):
        log.warning("%s/%s: %s; passed over", obj["metadata"]["namespace"], obj["metadata"]["name"], fault_text)
    reach = Reach(world, status)
    if deletion:
        return await _delete(world, obj, status, reach, settings)
    try:
        job = read_job(obj, settings)
    except InvalidJob as fault:
        return await _refuse(world, obj, status, fault, settings)

    # 2. What is observed.
    facts = await _observe(world, job, status, reach, settings)

    # 3. What follows.
    decision = steps.decide(facts)

    # 4. The plan: one job at a time, on a fresh list of all jobs, saved before the lock is given back.
    if decision.plan:
        async with world.planning:
            jobs = await world.hub.list(JOB)
            facts = replace(facts, placement=observation.place(world, job, jobs, settings))
            decision = plan(facts)
            obj = await _save(world, obj, status, decision.status, facts)
    else:
        obj = await _save(world, obj, status, decision.status, facts)

    # 5. What is to be done.
    failures = await execution.execute(world, job.id, decision.actions, settings)

    # 6. What could not be done.
    if failures:
        return await _failed(world, obj, replace(facts, status=decision.status), failures, decision)
    return Pass(obj, decision.again, decision.requeue)


async def _observe(world: World, job: Job, status: JobStatus, reach: Reach, settings: JobSettings) -> Facts:
    """Only what the state needs."""
    now = world.now()
    state = state_of(status, deleting=False, now=now)
    facts = Facts(now=now, id=job.id, generation=job.generation, status=status, settings=settings, job=job, state=state)
    if state is State.WAITING:
        found = observation.place(world, job, world.jobs(), settings)
        sites = await observation.sites(world, job, found.members, reach)
        storage = await observation.storage(world, job) if found.stages else None
        hub_member = observation.hub_member(world)
        facts = replace(facts, placement=found, sites=sites, storage=storage, hub_member=hub_member)
    elif state in (State.ADMITTING, State.BINDING, State.RUNNING):
        facts = await _observe_attempt(world, facts, reach)
    elif state in (State.STOPPING, State.ENDING):
        facts = replace(facts, found=await observation.attempt_objects(world, job, status, reach))
        replicas = observation.replicas_in_reach(world, status)
        facts = replace(facts, reports=await observation.fresh_reports(job, status, replicas, reach))
    return replace(facts, unreachable=dict(reach.lost))


async def _observe_attempt(world: World, facts: Facts, reach: Reach) -> Facts:
    job, status = facts.job, facts.status
    reports = observation.cached_reports(world, job, status)
    done = frozenset(index for index, report in reports.items() if has_succeeded(report))
    pods, strays, gateways = await observation.attempt_pods(world, job, status, reach, done)
    if facts.state is State.ADMITTING:
        members = sorted({stage.member for stage in status.plan})
        sites = await observation.sites(world, job, members, reach)
        storage = await observation.storage(world, job)
        strays = (*strays, *await observation.old_gateways(job, status, reach))
        return replace(facts, pods=pods, strays=strays, sites=sites, storage=storage)
    # Before a replica counts as lost or ended without a word, its report is read from the API server itself.
    silent = {pod.planned.id.replica for pod in pods if pod.missing or pod.leaving or pod.end} - done
    if silent:
        reports |= await observation.fresh_reports(job, status, silent, reach)
    return replace(facts, pods=pods, strays=strays, gateways=gateways, reports=reports)


async def _failed(world: World, obj: Obj, facts: Facts, failures: Sequence[Failure], decision: Decision) -> Pass:
    """Refusals end an attempt that has not begun to run; anything else is said and tried again."""
    if facts.state in (State.ADMITTING, State.BINDING):
        verdict = after_failures(facts, failures)
        if verdict is not None:
            return Pass(await _save(world, obj, facts.status, verdict.status, facts), again=True)
    requeue = min(FAILURE_LOOK, decision.requeue or FAILURE_LOOK)
    if facts.state is State.WAITING:
        message = "; ".join(str(failure) for failure in failures[:4])
        reason = failures[0].fault.value
        status = tell(facts, facts.status, reason, message, placed=(False, reason, message))
        obj = await _save(world, obj, facts.status, status, facts)
        requeue = facts.settings.waiting_interval
    else:
        log.info("%s/%s: %s", facts.id.namespace, facts.id.name, "; ".join(map(str, failures)))
    return Pass(obj, requeue=requeue)


async def _delete(world: World, obj: Obj, status: JobStatus, reach: Reach, settings: JobSettings) -> Pass:
    """Our finalizer: nothing is made any more; the members are cleaned, then the job may go."""
    job = job_id(obj, settings.hub)
    found, forgotten = await observation.anchors(world, job, status, reach)
    scene = _scene(world, obj, status, settings, reach)
    decision = deleting(scene, found)
    obj = await _save(world, obj, status, decision.status, scene)
    if not decision.release:
        failures = await execution.execute(world, job, decision.actions, settings)
        if failures:
            log.info("%s/%s: %s", job.namespace, job.name, "; ".join(map(str, failures)))
        return Pass(obj, requeue=decision.requeue)
    if forgotten:
        left = f"objects of the job may be left in {', '.join(forgotten)}: no MemberCluster of that name is there"
        await _tell(world, job, [events.Note("Warning", "LeftBehind", left, "left-behind")])
    await execution.remove_authority(world, job, settings)
    rest = [item for item in obj["metadata"]["finalizers"] if item != names.FINALIZER]
    patch = {"metadata": {"resourceVersion": obj["metadata"]["resourceVersion"], "finalizers": rest}}
    with contextlib.suppress(NotFound):  # it has gone: that is what we want
        await world.hub.merge_patch(Ref.of(obj), patch)
    return Pass(obj)


async def _refuse(world: World, obj: Obj, status: JobStatus, fault: InvalidJob, settings: JobSettings) -> Pass:
    """A spec that can't be run: all faults in the status; nothing is tried until it changes."""
    scene = _scene(world, obj, status, settings)
    message = str(fault)
    new = tell(scene, status, "InvalidSpec", message, placed=(False, "InvalidSpec", message))
    return Pass(await _save(world, obj, status, new, scene))


async def _refuse_status(world: World, obj: Obj, fault: InvalidStatus, settings: JobSettings) -> Pass:
    """A status that can't be read: a condition says so, the rest stays for people to see; nothing is done until it
    is put right or the job is deleted.
    """
    before = (obj.get("status") or {}).get("conditions")
    try:
        known = record.read_status({"conditions": before})
    except InvalidStatus:
        known = JobStatus()
    message = f"{fault}; only the operator may write it: put back what it wrote, or delete the job and apply it again"
    scene = _scene(world, obj, known, settings)
    new = tell(scene, known, "InvalidStatus", message, running=None)
    conditions = record.write_status(new)["conditions"]
    if conditions == before:
        return Pass(obj)
    patch = {"metadata": {"resourceVersion": obj["metadata"]["resourceVersion"]}, "status": {"conditions": conditions}}
    try:
        obj = await world.hub.merge_patch(Ref.of(obj), patch, subresource="status")
    except NotFound as gone:
        raise Conflict(gone.message) from gone
    since = obj["metadata"]["resourceVersion"]  # of this change: a later one is told again
    await _tell(world, scene.id, [events.Note("Warning", "InvalidStatus", message, f"invalid-status/{since}")])
    return Pass(obj)


def _scene(world: World, obj: Obj, status: JobStatus, settings: JobSettings, reach: Reach | None = None) -> Scene:
    return Scene(
        now=world.now(),
        id=job_id(obj, settings.hub),
        generation=obj["metadata"].get("generation", 0),
        status=status,
        settings=settings,
        unreachable=dict(reach.lost) if reach else {},
    )


async def _save(world: World, obj: Obj, old: JobStatus, new: JobStatus, scene: Scene) -> Obj:
    """Write the status if it has changed, on the version that it was decided on; then tell what has changed.

    The finalizer comes first: once the status names a member, objects of ours may be in it. Raises Conflict.
    """
    ref = Ref.of(obj)
    meta = obj["metadata"]
    finalizers = meta.get("finalizers") or []
    if new.members and names.FINALIZER not in finalizers:
        patch = {"resourceVersion": meta["resourceVersion"], "finalizers": [*finalizers, names.FINALIZER]}
        try:
            obj = await world.hub.merge_patch(ref, {"metadata": patch})
        except NotFound as fault:
            raise Conflict(fault.message) from fault
        except Refused as fault:
            found = await world.hub.get(ref)
            if found is None or found["metadata"].get("deletionTimestamp"):  # then it may not get a finalizer
                raise Conflict(fault.message) from fault
            raise
    changes = record.merge_diff(obj.get("status") or {}, record.write_status(new))
    if not changes:
        return obj
    version = obj["metadata"]["resourceVersion"]
    try:
        patch = {"metadata": {"resourceVersion": version}, "status": changes}
        obj = await world.hub.merge_patch(ref, patch, subresource="status")
    except NotFound as fault:
        raise Conflict(fault.message) from fault
    await _tell(world, scene.id, events.notes(old, new))
    return obj


async def _tell(world: World, job: names.JobId, notes: Sequence[events.Note]) -> None:
    """Events are for people: one that can't be written stops nothing."""
    for note in notes:
        event = events.event(job, note, world.now())
        try:
            await world.hub.create(event)
        except AlreadyExists:
            if note.recurs:
                await _count(world, Ref.of(event))
        except ApiError as fault:
            log.warning("%s/%s: event %s not written: %s", job.namespace, job.name, note.reason, fault.message)
            return


async def _count(world: World, ref: Ref) -> None:
    """One more of an Event that is there already, as Kubernetes' own components count theirs."""
    with contextlib.suppress(ApiError):
        if (found := await world.hub.get(ref)) is not None:
            await world.hub.merge_patch(ref, events.again(found, world.now()))
