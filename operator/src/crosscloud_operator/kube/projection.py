"""Which fields of an object are kept in memory: the few that the operator reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from crosscloud_operator.domain import names
from crosscloud_operator.kube.api import Kind, Obj

# No resourceVersion: nothing is patched by the one in here, and a heartbeat shall not count as a change.
_META = ("name", "namespace", "uid", "labels", "deletionTimestamp")
_FOREIGN_META = ("name", "namespace", "uid", "deletionTimestamp")
_POD = ("nodeName", "schedulingGates", "overhead", "resources")
_POD_STATUS = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
_CONTAINER = ("resources", "restartPolicy")


def projection(kind: Kind) -> Any:
    """The projection function of a kind; kinds without one are kept whole but for `managedFields`."""
    return _PROJECTIONS.get(kind.kind, whole)


def whole(obj: Obj) -> Obj:
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": meta}


def pod(obj: Obj) -> Obj:
    """Pods of ours with what lifecycle reads; others with what they take from their node."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    ours = names.HUB in (meta.get("labels") or {})
    kept = _pick(spec, _POD)
    for field in ("containers", "initContainers"):
        if field in spec:
            kept[field] = [_pick(item, _CONTAINER) for item in _items(spec[field])]
    return {
        **_head(obj),
        "metadata": _pick(meta, _META if ours else _FOREIGN_META),
        "spec": kept,
        "status": _pick(status, _POD_STATUS if ours else ("phase",)),
    }


def node(obj: Obj) -> Obj:
    status = obj.get("status") or {}
    # The kubelet beats in the conditions every few seconds; only readiness is news.
    conditions = _items(status.get("conditions"))
    ready = [_pick(item, ("type", "status")) for item in conditions if item.get("type") == "Ready"]
    return {
        **_head(obj),
        "metadata": _pick(obj["metadata"], _META),
        "spec": _pick(obj.get("spec") or {}, ("taints", "unschedulable")),
        "status": {**_pick(status, ("allocatable", "addresses")), "conditions": ready},
    }


def namespace(obj: Obj) -> Obj:
    return {**_head(obj), "metadata": _pick(obj["metadata"], _META)}


def config_map(obj: Obj) -> Obj:
    return {**_head(obj), "metadata": _pick(obj["metadata"], _META), "data": obj.get("data") or {}}


def _head(obj: Obj) -> Obj:
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"]}


def _pick(source: Mapping[str, Any], fields: Iterable[str]) -> Obj:
    return {field: source[field] for field in fields if field in source}


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value or () if isinstance(item, Mapping)]


_PROJECTIONS = {"Pod": pod, "Node": node, "Namespace": namespace, "ConfigMap": config_map}
