"""An in-memory API server and a world of them: resourceVersion, conflicts, finalizers, garbage collection, refusals.

It stands in for real clusters only because `conformance.py` passes on both. Who plays beside it is in `players.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    JOB,
    MEMBER,
    NAMESPACE,
    POD,
    SERVICE,
    AlreadyExists,
    Cluster,
    Conflict,
    Kind,
    NotFound,
    Obj,
    Ref,
    Refused,
    Unreachable,
)

Key = tuple[str, str | None, str]
Judge = Callable[[Obj], str | None]  # the reason why an object is refused

WITH_STATUS = {JOB.kind, MEMBER.kind, POD.kind}
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_EPOCH = "2026-01-01T00:00:00Z"


class MemoryCluster:
    """One API server. `judges` play quota, Pod Security and webhooks."""

    def __init__(self, name: str, namespaces: Sequence[str] = ("ml",)) -> None:
        self.name = name
        self.objects: dict[Key, Obj] = {}
        self.judges: list[Judge] = []
        self.reachable = True
        self.lost_at: float | None = None
        self.created: list[tuple[str, str]] = []  # kind and name of everything that was ever created
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)
        for namespace in namespaces:
            meta = {"name": namespace, "labels": {"kubernetes.io/metadata.name": namespace}}
            self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": meta, "status": {"phase": "Active"}})

    # What the interface asks for

    async def get(self, ref: Ref) -> Obj | None:
        await self._answer()
        return _copy(self.objects.get(_key(ref)))

    async def list(self, kind: Kind, *, namespace: str | None = None, selector: str | None = None) -> Sequence[Obj]:
        await self._answer()
        return [_copy(obj) for obj in self._all(kind, namespace) if _selected(obj, selector)]

    async def create(self, obj: Obj) -> Obj:
        await self._answer()
        obj = _copy(obj)
        ref = Ref.of(obj)
        if ref.kind.namespaced and (NAMESPACE.kind, None, ref.namespace) not in self.objects:
            raise NotFound(f'namespaces "{ref.namespace}" not found', reason="NotFound")
        if not _SUBDOMAIN.fullmatch(ref.name):
            raise Refused(f'{ref.kind.kind} "{ref.name}" is invalid: metadata.name: must be an RFC 1123 subdomain')
        self._judge(obj)
        if _key(ref) in self.objects:
            raise AlreadyExists(f'{ref.kind.plural} "{ref.name}" already exists', reason="AlreadyExists")
        if ref.kind.kind in WITH_STATUS:
            obj.pop("status", None)
        self._default(obj)
        return _copy(self.put(obj))

    async def json_patch(self, ref: Ref, operations: Sequence[Obj]) -> Obj:
        await self._answer()
        old = self._existing(ref)
        new = _copy(old)
        for operation in operations:
            _apply(new, operation)
        return self._store(old, new)

    async def merge_patch(self, ref: Ref, patch: Obj, *, subresource: str | None = None) -> Obj:
        await self._answer()
        old = self._existing(ref)
        meta = patch.get("metadata") or {}
        for name in ("resourceVersion", "uid"):
            if meta.get(name) is not None and meta[name] != old["metadata"][name]:
                raise Conflict(f"the object has been modified: {name} is {old['metadata'][name]}", reason="Conflict")
        new = _merge(old, patch)
        if subresource == "status":
            new = {**_copy(old), "status": new.get("status", {})}
        elif ref.kind.kind in WITH_STATUS:
            new = {key: value for key, value in new.items() if key != "status"}
            new |= {"status": _copy(old["status"])} if "status" in old else {}
        return self._store(old, new)

    async def delete(self, ref: Ref, *, uid: str) -> None:
        await self._answer()
        found = self.objects.get(_key(ref))
        if found is None:
            return
        if found["metadata"]["uid"] != uid:
            raise Conflict(f"the UID in the precondition ({uid}) does not match", reason="Conflict")
        self.remove(ref)

    # What players and tests do behind its back

    def put(self, obj: Obj) -> Obj:
        """Store an object as new."""
        meta = obj["metadata"]
        meta["uid"] = f"{self.name}-{next(self._uids)}"
        meta["resourceVersion"] = str(next(self._versions))
        meta["creationTimestamp"] = _EPOCH
        if obj["kind"] == JOB.kind:
            meta["generation"] = 1
        self.objects[_key(Ref.of(obj))] = obj
        self.created.append((obj["kind"], meta["name"]))
        return obj

    def find(self, kind: Kind, name: str, namespace: str | None = "ml") -> Obj | None:
        return self.objects.get((kind.kind, namespace if kind.namespaced else None, name))

    def all(self, kind: Kind) -> list[Obj]:
        return list(self._all(kind, None))

    def change(self, obj: Obj, **status: Any) -> None:
        """Change an object's status in place, as a kubelet or a trainer does."""
        obj.setdefault("status", {}).update(status)
        self.touch(obj)

    def touch(self, obj: Obj) -> None:
        obj["metadata"]["resourceVersion"] = str(next(self._versions))

    def remove(self, ref: Ref) -> None:
        """A user's or the operator's delete: finalizers and bound pods leave later, all else goes at once."""
        found = self.objects[_key(ref)]
        meta = found["metadata"]
        running = found["kind"] == "Pod" and (found.get("spec") or {}).get("nodeName")
        phase = (found.get("status") or {}).get("phase")
        if meta.get("finalizers") or (running and phase not in ("Succeeded", "Failed")):
            if "deletionTimestamp" not in meta:
                meta["deletionTimestamp"] = _EPOCH
                self.touch(found)
            return
        del self.objects[_key(ref)]

    def purge(self, obj: Obj) -> None:
        """The object is gone at last (its kubelet has stopped it)."""
        self.objects.pop(_key(Ref.of(obj)), None)

    def collect_garbage(self) -> None:
        """The garbage collector: what none of its owners is left of goes."""
        uids = {obj["metadata"]["uid"] for obj in self.objects.values()}
        for obj in list(self.objects.values()):
            owners = obj["metadata"].get("ownerReferences")
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.remove(Ref.of(obj))

    # How it works

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if not self.reachable:
            raise Unreachable(f"{self.name}: no route to host")

    def _judge(self, obj: Obj) -> None:
        for judge in self.judges:
            if reason := judge(obj):
                raise Refused(reason, reason="Forbidden")

    def _default(self, obj: Obj) -> None:
        if obj["kind"] == "Pod":
            obj["status"] = {"phase": "Pending"}
        if obj["kind"] == "Service" and obj["spec"].get("type") == "NodePort":
            used = {port.get("nodePort") for each in self.all(SERVICE) for port in each["spec"].get("ports", ())}
            free = (port for port in range(30000, 32768) if port not in used)
            for port in obj["spec"]["ports"]:
                port["nodePort"] = next(free)

    def _all(self, kind: Kind, namespace: str | None) -> Iterator[Obj]:
        here = [item for item in self.objects.items() if item[0][0] == kind.kind and namespace in (None, item[0][1])]
        for _, obj in sorted(here, key=lambda item: str(item[0])):
            yield obj

    def _existing(self, ref: Ref) -> Obj:
        found = self.objects.get(_key(ref))
        if found is None:
            raise NotFound(f'{ref.kind.plural} "{ref.name}" not found', reason="NotFound")
        return found

    def _store(self, old: Obj, new: Obj) -> Obj:
        added = set(new["metadata"].get("finalizers") or ()) - set(old["metadata"].get("finalizers") or ())
        if added and old["metadata"].get("deletionTimestamp"):
            raise Refused(
                "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted"
            )
        if _content(new) == _content(old):
            return _copy(old)
        for name in ("uid", "resourceVersion"):
            new["metadata"][name] = old["metadata"][name]
        new["metadata"]["resourceVersion"] = str(next(self._versions))
        if new["kind"] == JOB.kind and new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] += 1
        self.objects[_key(Ref.of(new))] = new
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            del self.objects[_key(Ref.of(new))]
        return _copy(new)


class MemoryCache:
    """An informer that has seen everything up to its cluster's last `freeze`, or everything."""

    def __init__(self, cluster: MemoryCluster, kind: Kind) -> None:
        self._cluster = cluster
        self._kind = kind
        self._frozen: list[Obj] | None = None
        self._blank = False

    @property
    def synced(self) -> bool:
        return not self._blank

    @property
    def unreachable_since(self) -> float | None:
        return self._cluster.lost_at

    def objects(self) -> Sequence[Obj]:
        if self._blank:
            return []
        if self._frozen is not None:
            return self._frozen
        found = self._cluster.all(self._kind)
        if self._kind is CONFIG_MAP:
            found = [obj for obj in found if "crosscloud.dev/hub" in (obj["metadata"].get("labels") or {})]
        return found

    def freeze(self) -> None:
        self._frozen = _copy(list(self.objects()))

    def blank(self, *, blank: bool = True) -> None:
        """As a new process begins: nothing has been listed yet."""
        self._blank = blank


class MemoryWorld:
    """A hub and its members, and a clock that tests move."""

    def __init__(self, *members: str) -> None:
        self.clock = 1_800_000_000.0
        self.real_hub = MemoryCluster("hub", ("ml", "crosscloud"))
        self.clusters = {name: MemoryCluster(name) for name in members}
        self._hub: Cluster = self.real_hub
        self._clients: dict[str, Cluster] = dict(self.clusters)
        self._caches: dict[tuple[str, str], MemoryCache] = {}
        self._planning = asyncio.Lock()
        for name in members:
            self.add_member(name)

    @property
    def hub(self) -> Cluster:
        return self._hub

    @property
    def planning(self) -> asyncio.Lock:
        return self._planning

    def member(self, name: str) -> Cluster | None:
        known = self.real_hub.find(MEMBER, name) is not None
        return self._clients.get(name) if known else None

    def members(self) -> Sequence[Obj]:
        return _copy(self.real_hub.all(MEMBER))

    def cache(self, member: str, kind: Kind) -> MemoryCache | None:
        if member not in self.clusters or self.real_hub.find(MEMBER, member) is None:
            return None
        key = (member, kind.kind)
        if key not in self._caches:
            self._caches[key] = MemoryCache(self.clusters[member], kind)
        return self._caches[key]

    def jobs(self) -> Sequence[Obj]:
        return _copy(self.real_hub.all(JOB))

    def now(self) -> float:
        return self.clock

    # What tests do

    def add_member(self, name: str, **spec: Any) -> None:
        allowed = {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}
        self.real_hub.put(
            {
                "apiVersion": "crosscloud.dev/v1alpha1",
                "kind": "MemberCluster",
                "metadata": {"name": name},
                "spec": {"access": {"kubeconfigSecret": {"name": name}}, "allowedNamespaces": allowed, **spec},
            }
        )

    def restart(self, wrap: Callable[[Cluster], Cluster] = lambda cluster: cluster) -> None:
        """A new operator process: nothing in memory, clients wrapped anew."""
        self._hub = wrap(self.real_hub)
        self._clients = {name: wrap(cluster) for name, cluster in self.clusters.items()}
        self._planning = asyncio.Lock()

    def lose(self, name: str) -> None:
        self.clusters[name].reachable = False
        self.clusters[name].lost_at = self.clock

    def regain(self, name: str) -> None:
        self.clusters[name].reachable = True
        self.clusters[name].lost_at = None

    def add_node(self, member: str, name: str, gpus: int, **more: Any) -> Obj:
        labels = {"nvidia.com/gpu.product": "NVIDIA-A100", "kubernetes.io/hostname": name}
        address = {"type": "InternalIP", "address": f"10.{sorted(self.clusters).index(member)}.0.{len(name)}"}
        return self.clusters[member].put(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": labels},
                "spec": more,
                "status": {
                    "allocatable": {"cpu": "8", "nvidia.com/gpu": str(gpus)},
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "addresses": [address],
                },
            }
        )


def _copy(data: Any) -> Any:
    """What `copy.deepcopy` does, for JSON, in a fifth of the time."""
    if isinstance(data, dict):
        return {key: _copy(value) for key, value in data.items()}
    return [_copy(item) for item in data] if isinstance(data, list) else data


def _key(ref: Ref) -> Key:
    return (ref.kind.kind, ref.namespace if ref.kind.namespaced else None, ref.name)


def _content(obj: Obj) -> Obj:
    """An object without its resourceVersion: a write that changes nothing makes no new version."""
    meta = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
    return {**obj, "metadata": meta}


def _selected(obj: Obj, selector: str | None) -> bool:
    labels = obj["metadata"].get("labels") or {}
    for term in (selector or "").split(","):
        key, equal, value = term.partition("=")
        if key and (key not in labels or (equal and labels[key] != value)):
            return False
    return True


def _merge(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return _copy(patch)
    result = _copy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result


def _apply(obj: Obj, operation: Obj) -> None:
    """RFC 6902, as far as it is used: test and remove."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    try:
        parent: Any = obj
        for part in path:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        place: Any = int(last) if isinstance(parent, list) else last
        found = parent[place]
    except (KeyError, IndexError, ValueError, TypeError) as fault:
        raise Conflict(f"{operation['op']} {operation['path']}: nothing is there") from fault
    if operation["op"] == "test":
        if found != operation["value"]:
            raise Conflict(f"test {operation['path']}: found {found!r}")
    elif operation["op"] == "remove":
        del parent[place]
        if isinstance(parent, list) and not parent:
            _apply(obj, {"op": "remove", "path": operation["path"].rpartition("/")[0]})
    else:
        raise AssertionError(operation)
