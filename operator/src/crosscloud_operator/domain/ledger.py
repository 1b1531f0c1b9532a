"""GPUs that plans have promised to pods which no node counts yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from crosscloud_operator.domain import names
from crosscloud_operator.domain.documents import planned_pods
from crosscloud_operator.domain.errors import InvalidStatus
from crosscloud_operator.domain.inventory import ENDED
from crosscloud_operator.domain.record import read_status

Obj = Mapping[str, Any]


def promised(jobs: Iterable[Obj], pods: Mapping[str, Iterable[Obj]], *, without: str) -> dict[tuple[str, str], int]:
    """GPUs by (member, node) of every other job's plan, less the pods that are seen bound (they count on their node)
    or ended. `pods` by member; `without` is the UID of the job that is being planned.
    """
    seen = {
        (member, (pod["metadata"].get("labels") or {}).get(names.JOB_UID), pod["metadata"]["name"])
        for member, items in pods.items()
        for pod in items
        if (pod.get("spec") or {}).get("nodeName") or (pod.get("status") or {}).get("phase") in ENDED
    }
    found: dict[tuple[str, str], int] = defaultdict(int)
    for job in jobs:
        meta = job["metadata"]
        if meta["uid"] == without or not (job.get("status") or {}).get("plan") or _is_cleaned(job):
            continue
        try:
            status = read_status(job.get("status"))
        except InvalidStatus:
            continue
        if status.attempt is None or not status.holds_gpus:
            continue
        for pod in planned_pods(meta["name"], status.attempt.number, status.plan):
            if (pod.member, meta["uid"], pod.name) not in seen:
                found[pod.member, pod.node] += pod.gpus
    return dict(found)


def _is_cleaned(job: Obj) -> bool:
    """Whether the job was deleted and our objects are gone: only the finalizer of somebody else keeps it."""
    meta = job["metadata"]
    return bool(meta.get("deletionTimestamp")) and names.FINALIZER not in (meta.get("finalizers") or ())
