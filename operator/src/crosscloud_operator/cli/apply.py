"""Bringing objects into a cluster: made where missing, changed where they differ, left alone where they are right."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from crosscloud_operator.kube.api import Cluster, Obj, Ref


class Did(enum.Enum):
    """What became, or would become, of an object."""

    CREATED = "create"
    CHANGED = "change"
    KEPT = "keep"


async def apply(cluster: Cluster, obj: Obj, *, dry_run: bool = False) -> Did:
    """Make `obj` so. Fields that it doesn't name are left as they are; maps and lists that it names are as it says."""
    ref = Ref.of(obj)
    present = await cluster.get(ref)
    if present is None:
        if not dry_run:
            await cluster.create(obj)
        return Did.CREATED
    patch = difference(present, obj)
    if not patch:
        return Did.KEPT
    if not dry_run:
        if "roleRef" in patch:  # the API server lets nobody change it
            await cluster.delete(ref, uid=present["metadata"]["uid"])
            await cluster.create(obj)
        else:
            await cluster.merge_patch(ref, patch)
    return Did.CHANGED


def difference(present: Obj, wanted: Obj) -> Obj:
    """The merge patch that leads from `present` to `wanted`; empty where nothing is to be done."""
    patch: Obj = {}
    for key, value in wanted.items():
        if key == "metadata":
            labels = _merge((present[key].get("labels") or {}), value.get("labels") or {}, exact=False)
            if labels:
                patch[key] = {"labels": labels}
        elif isinstance(value, Mapping) and isinstance(present.get(key), Mapping):
            # The first level may carry the server's defaults; below, what isn't wanted goes.
            if inner := _merge(present[key], value, exact=False):
                patch[key] = inner
        elif present.get(key) != value:
            patch[key] = value
    return patch


def _merge(present: Mapping[str, Any], wanted: Mapping[str, Any], *, exact: bool) -> Obj:
    patch: Obj = {}
    for key, value in wanted.items():
        old = present.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := _merge(old, value, exact=True):
                patch[key] = inner
        elif old != value:
            patch[key] = value
    if exact:
        patch |= dict.fromkeys(present.keys() - wanted.keys())
    return patch
