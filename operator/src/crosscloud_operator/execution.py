"""Carrying out actions: all members at once, one member's in their order. What can't be done comes back as a value."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence

from crosscloud_operator.domain import manifests, names
from crosscloud_operator.domain.actions import (
    Action,
    Ensure,
    EnsureAuthority,
    EnsureKeys,
    Failure,
    Fault,
    Lift,
    MemberAction,
    Remove,
)
from crosscloud_operator.domain.documents import identity
from crosscloud_operator.domain.names import JobId
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.kube.api import (
    KINDS,
    POD,
    SECRET,
    AlreadyExists,
    ApiError,
    Cluster,
    Conflict,
    NotFound,
    Obj,
    Ref,
    Refused,
    World,
)
from crosscloud_trainer.pki import CertificateAuthority

HUB = "hub"  # how messages name the hub's own API server


async def execute(world: World, job: JobId, actions: Sequence[Action], settings: JobSettings) -> list[Failure]:
    """Failures in the order of the actions. A member's later actions are left out after its first failure, since they
    build on the earlier ones; removals go on. Raises ApiError where the hub doesn't answer.
    """
    authority: CertificateAuthority | None = None
    if any(isinstance(action, EnsureAuthority) for action in actions):
        ensured = await _ensure_authority(world, job, settings)
        if isinstance(ensured, Failure):
            return [ensured]
        authority = ensured
    by_member: dict[str, list[MemberAction]] = {}
    for action in actions:
        if not isinstance(action, EnsureAuthority):
            by_member.setdefault(action.member, []).append(action)
    results = await asyncio.gather(
        *(_member(world, job, member, own, authority) for member, own in sorted(by_member.items()))
    )
    return [failure for failures in results for failure in failures]


async def remove_authority(world: World, job: JobId, settings: JobSettings) -> None:
    """Delete the job's certificate authority from the hub, if it is there."""
    ref = Ref(SECRET, names.authority_secret(job.uid), settings.operator_namespace)
    found = await world.hub.get(ref)
    if found is not None and names.is_ours(found, job):
        await world.hub.delete(ref, uid=found["metadata"]["uid"])


async def _member(
    world: World, job: JobId, member: str, actions: Iterable[MemberAction], authority: CertificateAuthority | None
) -> list[Failure]:
    client = world.member(member)
    if client is None:
        return [Failure(Fault.UNREACHABLE, member, "API server", "its MemberCluster or credentials can't be used")]
    failures: list[Failure] = []
    for action in actions:
        failure = await _one(client, job, action, authority)
        if failure is not None:
            failures.append(failure)
            if not isinstance(action, Remove) or failure.fault is Fault.UNREACHABLE:
                break
    return failures


async def _one(
    client: Cluster, job: JobId, action: MemberAction, authority: CertificateAuthority | None
) -> Failure | None:
    """Speaks to the member alone, so that whatever fails here is the member's."""
    try:
        match action:
            case Ensure():
                return await _ensure(client, job, action)
            case EnsureKeys():
                return await _ensure_keys(client, job, action, authority)
            case Lift():
                await _lift(client, job, action)
            case Remove():
                ref = Ref(KINDS[action.kind], action.name, job.namespace)
                await client.delete(ref, uid=action.uid)
    except (Conflict, NotFound):
        # Somebody was faster, or the object has changed: the next look shows what is left to do.
        return None
    except Refused as refusal:
        return Failure(Fault.REFUSED, action.member, _what(action), refusal.message)
    except ApiError as fault:
        return Failure(Fault.UNREACHABLE, action.member, _what(action), fault.message)
    return None


async def _ensure(client: Cluster, job: JobId, action: Ensure) -> Failure | None:
    member, what, obj = action.member, _what(action), action.obj
    ref = Ref.of(obj)
    try:
        await client.create(obj)
    except NotFound as fault:
        return Failure(Fault.REFUSED, member, what, fault.message)  # the namespace has gone
    except AlreadyExists:
        existing = await client.get(ref)
        if existing is None:
            return Failure(Fault.LEAVING, member, what, "was deleted just now")
        if names.is_of_earlier_job(existing, job):
            return Failure(Fault.LEAVING, member, what, "of an earlier job of this name is still being removed")
        if not names.is_ours(existing, job):
            message = "exists and isn't ours; remove it, or give the job another name"
            return Failure(Fault.NAME_CONFLICT, member, what, message)
        if existing["metadata"].get("deletionTimestamp") or not _same_owner(existing, obj):
            return Failure(Fault.LEAVING, member, what, "is being deleted")
        if action.update and existing.get("data") != obj.get("data"):
            old = dict.fromkeys(existing.get("data") or {})
            patch = {"metadata": {"uid": existing["metadata"]["uid"]}, "data": {**old, **(obj.get("data") or {})}}
            await client.merge_patch(ref, patch)
    return None


def _same_owner(existing: Obj, obj: Obj) -> bool:
    """Whether both are owned by one anchor: what an anchor that is gone owned will be collected."""
    owners = [{item["uid"] for item in each["metadata"].get("ownerReferences") or ()} for each in (existing, obj)]
    return owners[1] <= owners[0]


async def _ensure_keys(
    client: Cluster, job: JobId, action: EnsureKeys, authority: CertificateAuthority | None
) -> Failure | None:
    """Certificates are random, so they are issued only where the attempt's Secret is missing."""
    if authority is None:
        raise AssertionError("keys are made by the authority that is ensured before them")
    found = await client.get(Ref(SECRET, names.keys_secret(job.name, action.attempt), job.namespace))
    wanted = {"metadata": {"ownerReferences": [manifests.owner(job, action.anchor_uid)]}}
    if found is not None and names.is_ours(found, job) and _same_owner(found, wanted):
        return None
    keys = {pod: authority.issue(identity(job.uid, pod.id)) for pod in action.pods}
    obj = manifests.keys_secret(job, action.anchor_uid, action.attempt, authority.certificate, keys)
    return await _ensure(client, job, Ensure(action.member, obj))


async def _ensure_authority(world: World, job: JobId, settings: JobSettings) -> CertificateAuthority | Failure:
    """The job's certificate authority, made unless it is there."""
    ref = Ref(SECRET, names.authority_secret(job.uid), settings.operator_namespace)
    try:
        found = await world.hub.get(ref)
        if found is None:
            made = CertificateAuthority.create(job.uid)
            obj = manifests.authority_secret(job, settings.operator_namespace, made.certificate, made.key)
            await world.hub.create(obj)
            return made
    except AlreadyExists as fault:  # made by another operator a moment ago: its own is the one that counts
        raise Conflict(fault.message) from fault
    except (Refused, NotFound) as refusal:
        return Failure(Fault.REFUSED, HUB, f"Secret {ref.namespace}/{ref.name}", refusal.message)
    data = {key: base64.b64decode(value) for key, value in found["data"].items()}
    return CertificateAuthority.load(data["tls.crt"], data["tls.key"])


async def _lift(client: Cluster, job: JobId, action: Lift) -> None:
    gate = f"/spec/schedulingGates/{action.gate}"
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": action.uid},
        {"op": "test", "path": f"{gate}/name", "value": names.GATE},
        {"op": "remove", "path": gate},
    ]
    await client.json_patch(Ref(POD, action.pod, job.namespace), operations)


def _what(action: MemberAction) -> str:
    match action:
        case Ensure():
            return f"{action.obj['kind']} {action.obj['metadata']['name']}"
        case EnsureKeys():
            return "Secret with keys"
        case Lift():
            return f"Pod {action.pod}"
        case Remove():
            return f"{action.kind} {action.name}"
