"""Which fields of an object are kept in memory: the few that the operator reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from crosscloud_operator.kube.api import Kind, Obj

HUB_LABEL = "crosscloud.dev/hub"

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "labels",
    "creationTimestamp",
    "deletionTimestamp",
    "ownerReferences",
)
_FOREIGN_META = ("name", "namespace", "uid", "deletionTimestamp")
_FOREIGN_POD = ("nodeName", "schedulingGates", "overhead", "resources")
_OUR_POD = (*_FOREIGN_POD, "hostname", "subdomain")
_POD_STATUS = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses", "podIP")
_CONTAINER = ("name", "resources", "restartPolicy")
_FOREIGN_CONTAINER = ("resources", "restartPolicy")


def projection(kind: Kind) -> Any:
    """The projection function of a kind; kinds without one are kept whole but for `managedFields`."""
    return _PROJECTIONS.get(kind.kind, whole)


def whole(obj: Obj) -> Obj:
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": meta}


def pod(obj: Obj) -> Obj:
    """Pods of ours with what lifecycle reads; others with what they take from their node."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    ours = HUB_LABEL in (meta.get("labels") or {})
    container = _CONTAINER if ours else _FOREIGN_CONTAINER
    kept = _pick(spec, _OUR_POD if ours else _FOREIGN_POD)
    for field in ("containers", "initContainers"):
        if field in spec:
            kept[field] = [_pick(item, container) for item in _items(spec[field])]
    return {
        **_head(obj),
        "metadata": _pick(meta, (*_META, "annotations") if ours else _FOREIGN_META),
        "spec": kept,
        "status": _pick(status, _POD_STATUS if ours else ("phase",)),
    }


def node(obj: Obj) -> Obj:
    status = obj.get("status") or {}
    # The kubelet beats in the conditions every few seconds; only readiness and its last change are news.
    ready = [
        _pick(item, ("type", "status", "reason", "lastTransitionTime"))
        for item in _items(status.get("conditions"))
        if item.get("type") == "Ready"
    ]
    return {
        **_head(obj),
        "metadata": _without_version(_pick(obj["metadata"], _META)),
        "spec": _pick(obj.get("spec") or {}, ("taints", "unschedulable")),
        "status": {**_pick(status, ("allocatable", "capacity", "addresses")), "conditions": ready},
    }


def namespace(obj: Obj) -> Obj:
    meta = _without_version(_pick(obj["metadata"], _META))
    return {**_head(obj), "metadata": meta, "status": _pick(obj.get("status") or {}, ("phase",))}


def config_map(obj: Obj) -> Obj:
    kept = _pick(obj["metadata"], (*_META, "annotations"))
    return {**_head(obj), "metadata": kept, "data": obj.get("data") or {}}


def _head(obj: Obj) -> Obj:
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"]}


def _pick(source: Mapping[str, Any], fields: Iterable[str]) -> Obj:
    return {field: source[field] for field in fields if field in source}


def _without_version(meta: Obj) -> Obj:
    """Nothing patches these by version, and a heartbeat shall not count as a change."""
    return {key: value for key, value in meta.items() if key != "resourceVersion"}


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value or () if isinstance(item, Mapping)]


_PROJECTIONS = {"Pod": pod, "Node": node, "Namespace": namespace, "ConfigMap": config_map}
