"""The status of a MemberCluster, from what its informers and credentials show. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crosscloud_operator.domain.inventory import Pool
from crosscloud_operator.domain.record import condition_in, rfc3339
from crosscloud_operator.kube.api import ApiError, Obj, Refused
from crosscloud_operator.kube.credentials import Life, Unusable


@dataclass(frozen=True)
class Facts:
    """What is known of a member. `unusable`: why there are no credentials; `fault`: the informers' trouble, if any."""

    unusable: Unusable | None = None
    synced: bool = False
    unreachable_since: float | None = None
    fault: ApiError | None = None
    version: str = ""
    cluster_id: str | None = None
    duplicate_of: str | None = None  # the member that names the same cluster, and was there first
    pools: Sequence[Pool] = field(default_factory=tuple)
    life: Life | None = None
    renewal_fault: str = ""


@dataclass(frozen=True)
class _Condition:
    type: str
    status: str
    reason: str
    message: str


def status(member: Obj, facts: Facts, now: float) -> Obj:
    """The whole status. Transition times are kept where a condition's status is the same as before."""
    before: Obj = member.get("status") or {}
    generation = member["metadata"].get("generation", 0)
    found: Obj = {
        "observedGeneration": generation,
        "conditions": [
            _written(condition, before, generation, now)
            for condition in (_ready(member["metadata"]["name"], facts), _credentials(facts, now))
        ],
    }
    if facts.life and facts.life.expires is not None and not facts.unusable:
        found["credentials"] = {"expiresAt": rfc3339(facts.life.expires)}
    kept = ("clusterId", "version", "nodePools", "gpus", "freeGpus")
    if facts.synced:
        found["version"] = facts.version
        if facts.cluster_id:
            found["clusterId"] = facts.cluster_id
    else:  # what was seen before the credentials or the contact went
        found |= {key: before[key] for key in kept if key in before}
    if facts.duplicate_of:  # its GPUs are the other one's
        found = {key: value for key, value in found.items() if key not in ("nodePools", "gpus", "freeGpus")}
    elif facts.synced:
        found["nodePools"] = [_pool(pool) for pool in facts.pools]
        found["gpus"] = sum(pool.total for pool in facts.pools)
        found["freeGpus"] = sum(pool.free for pool in facts.pools)
    return found


def _ready(member: str, facts: Facts) -> _Condition:
    if facts.unusable:
        return _Condition("Ready", "False", facts.unusable.reason, facts.unusable.message)
    if facts.duplicate_of:
        return _Condition("Ready", "False", "DuplicateCluster", _duplicate_words(member, facts.duplicate_of))
    if facts.unreachable_since is not None:
        since = f"since {rfc3339(facts.unreachable_since)}"
        words = facts.fault.message if facts.fault else "no contact"
        if facts.fault and facts.fault.reason == "Unauthorized":
            return _Condition("Ready", "False", "Unauthorized", f"{since}: {words}")
        if isinstance(facts.fault, Refused):
            hint = "`crosscloud member add` gives the account the rights it needs"
            return _Condition("Ready", "False", "Forbidden", f"{since}: {words}; {hint}")
        return _Condition("Ready", "False", "Unreachable", f"{since}: {words}")
    if not facts.synced:
        return _Condition("Ready", "Unknown", "Connecting", "the first list of its nodes and pods is under way")
    return _Condition("Ready", "True", "Connected", "its API server answers and its objects are watched")


def _duplicate_words(member: str, other: str) -> str:
    return (
        f"its cluster is the member {other} already, which was there first and goes on; nothing is placed here, so "
        f"that its GPUs are counted once: take one of the two away (`crosscloud member remove {member}`)"
    )


def _credentials(facts: Facts, now: float) -> _Condition:
    kind = "CredentialsValid"
    if facts.unusable:
        return _Condition(kind, "False", facts.unusable.reason, facts.unusable.message)
    if facts.fault and facts.fault.reason == "Unauthorized":
        return _Condition(kind, "False", "Rejected", f"the API server rejects them: {facts.fault.message}")
    expires = facts.life.expires if facts.life else None
    if expires is None:
        return _Condition(kind, "True", "NoExpiry", "they don't say when they end")
    words = f"valid until {rfc3339(expires)}"
    if expires <= now:
        return _Condition(
            kind, "False", "Expired", f"ended at {rfc3339(expires)}; `crosscloud member add` makes new ones"
        )
    if facts.renewal_fault:
        return _Condition(kind, "True", "RenewalFailed", f"{words}, but can't be renewed: {facts.renewal_fault}")
    if facts.life and facts.life.renew_at is None:
        return _Condition(kind, "True", "NotRenewable", f"{words}, and not renewed: not a service account's token")
    return _Condition(kind, "True", "Valid", f"{words}, renewed at half of their life")


def _written(condition: _Condition, before: Obj, generation: int, now: float) -> Obj:
    old = condition_in(before, condition.type)
    same = old is not None and old["status"] == condition.status
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message[:32_000],
        "observedGeneration": generation,
        "lastTransitionTime": old["lastTransitionTime"] if same and old else rfc3339(now),
    }


def _pool(pool: Pool) -> dict[str, Any]:
    return {"name": pool.name, "gpu": pool.gpu, "nodes": pool.nodes, "gpus": pool.total, "freeGpus": pool.free}
