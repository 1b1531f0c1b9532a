"""The hub and the members as they are now (`World` of kube/api.py), kept so as MemberClusters and Secrets change."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from crosscloud_operator.domain import inventory, names, scheduling
from crosscloud_operator.domain.record import has_ended
from crosscloud_operator.kube import member_status
from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import JOB, MEMBER, NODE, POD, SECRET, ApiError, Cache, Cluster, Kind, Obj, Ref
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.credentials import SECRET_KEY, Unusable, access_of, secret_name
from crosscloud_operator.kube.duplicates import duplicates
from crosscloud_operator.kube.informer import Informer, Times
from crosscloud_operator.kube.local import read_again
from crosscloud_operator.kube.member import Member
from crosscloud_operator.kube.projection import whole

log = logging.getLogger(__name__)

STATUS_SECONDS = 2.0  # a member's status is not written more often
ROUND_SECONDS = 30.0  # without a change, a look at what time alone changes (expiry)
WAKE_SECONDS = 1.0  # capacity changes wake all waiting jobs, but not more often


class KubeWorld:
    """All I/O of the operator. `wake(namespace, name)` is called when a job may have something to do."""

    def __init__(
        self,
        hub: HttpCluster,
        *,
        hub_id: str,
        namespace: str,
        token_seconds: int,
        wake: Callable[[str, str], None],
        gpu_resource: str = inventory.GPU_RESOURCE,
        gpu_product_label: str = inventory.GPU_PRODUCT,
        hub_access: Callable[[], Access] | None = None,
        times: Times | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._hub = hub
        self._hub_id = hub_id
        self._namespace = namespace
        self._token_seconds = token_seconds
        self._wake = wake
        self._gpu_resource, self._gpu_product_label = gpu_resource, gpu_product_label
        self._hub_access = hub_access
        self._times = times
        self._clock = clock
        self._planning = asyncio.Lock()
        self._running: dict[str, Member] = {}
        self._unusable: dict[str, Unusable] = {}
        self._jobs_by_uid: dict[str, tuple[str, str]] = {}
        self._dirty: set[str] = set()
        self._stale: set[str] = set()
        self._work = asyncio.Event()
        self._synced = asyncio.Event()
        self._wake_all_at: float | None = None
        self._job_informer = self._hub_informer(JOB, self._job_changed)
        self._member_informer = self._hub_informer(MEMBER, self._member_changed)
        # Secrets of our own namespace only; kopf could only watch those of all namespaces, with rights to match.
        self._secret_informer = self._hub_informer(SECRET, self._secret_changed, namespace, _secret)

    # -- the World protocol

    @property
    def hub(self) -> Cluster:
        return self._hub

    @property
    def planning(self) -> asyncio.Lock:
        return self._planning

    def member(self, name: str) -> Cluster | None:
        found = self._running.get(name)
        return found.cluster if found else None

    def members(self) -> Sequence[Obj]:
        return self._member_informer.objects()

    def cache(self, member: str, kind: Kind) -> Cache | None:
        found = self._running.get(member)
        return found.informers.get(kind) if found else None

    def jobs(self) -> Sequence[Obj]:
        return self._job_informer.objects()

    def now(self) -> float:
        return self._clock()

    # -- what probes and metrics ask

    @property
    def synced(self) -> bool:
        """Whether the hub's own lists are complete."""
        return all(item.synced for item in self._hub_informers())

    async def wait_synced(self) -> None:
        await self._synced.wait()

    def running_members(self) -> dict[str, Member]:
        return dict(self._running)

    def last_contact(self) -> dict[str, float]:
        """Wall-clock time of the last word from each cluster."""
        hub = [item.last_contact for item in self._hub_informers() if item.last_contact]
        found = {self._hub.name: max(hub)} if hub else {}
        return found | {name: at for name, item in self._running.items() if (at := item.last_contact)}

    # -- running

    async def run(self) -> None:
        """Watch the hub, run the members; ends by cancellation only."""
        async with asyncio.TaskGroup() as group:
            for informer in self._hub_informers():
                group.create_task(informer.run(), name=f"hub {informer.kind.plural}")
            if self._hub_access is not None:
                group.create_task(self._keep_hub_access(), name="hub credentials")
            group.create_task(self._wake_in_bursts(), name="wake")
            try:
                await self._settle_forever()
            finally:
                await asyncio.gather(*(item.stop() for item in self._running.values()), return_exceptions=True)
                self._running.clear()

    async def _settle_forever(self) -> None:
        written: dict[str, float] = {}
        while True:
            try:
                async with asyncio.timeout(ROUND_SECONDS if not self._stale else STATUS_SECONDS / 4):
                    await self._work.wait()
            except TimeoutError:
                if not self._stale:
                    self._stale |= {obj["metadata"]["name"] for obj in self.members()}
            self._work.clear()
            if not (self._member_informer.synced and self._secret_informer.synced):
                continue  # a Secret that isn't listed yet is not a missing one
            dirty, self._dirty = self._dirty, set()
            for name in sorted(dirty):
                await self._settle(name)
            now = time.monotonic()
            due = {name for name in self._stale if now - written.get(name, -STATUS_SECONDS) >= STATUS_SECONDS}
            self._stale -= due
            for name in sorted(due):
                written[name] = now
                await self._write_status(name)

    async def _settle(self, name: str) -> None:
        """Bring one member in line with its MemberCluster and its Secret."""
        member = self._member_object(name)
        running = self._running.get(name)
        self._unusable.pop(name, None)
        if member is None:
            await self._stop(name)
            self._wake_unfinished()
            return
        named = secret_name(member)
        try:
            # In a thread: a hostile file may take seconds to read.
            access = await asyncio.to_thread(self._access, named)
        except Unusable as fault:
            log.warning("%s: %s", name, fault.message)
            self._unusable[name] = fault
            await self._stop(name)
        else:
            if running and running.cluster.access.same_server(access):
                await running.replace(access)
            else:
                await self._stop(name)
                self._start(name, access, named)
        self._stale.add(name)
        self._wake_unfinished()

    def _access(self, named: str | None) -> Access:
        if named is None:
            return self._hub.access
        found = next((obj for obj in self._secret_informer.objects() if obj["metadata"]["name"] == named), None)
        return access_of(found, named, self._namespace)

    def _start(self, name: str, access: Access, named: str | None) -> None:
        member = Member(
            name,
            access,
            hub_id=self._hub_id,
            changed=lambda kind, before, after: self._object_changed(name, kind, before, after),
            contact_changed=lambda: self._contact_changed(name),
            gpu_resource=self._gpu_resource,
            gpu_product_label=self._gpu_product_label,
            times=self._times,
            clock=self._clock,
        )
        self._running[name] = member
        secret = Ref(SECRET, named, self._namespace) if named else None
        member.start(self._hub, secret, self._token_seconds)
        log.info("member %s: watching %s", name, access.server)

    async def _stop(self, name: str) -> None:
        if member := self._running.pop(name, None):
            await member.stop()
            log.info("member %s: no longer watched", name)

    async def _write_status(self, name: str) -> None:
        member = self._member_object(name)
        if member is None:
            return
        running = self._running.get(name)
        if running is not None:
            facts = self._facts(running)
            if facts.unusable is None:
                facts = dataclasses.replace(facts, duplicate_of=duplicates(self).get(name))
        elif name in self._unusable:
            facts = member_status.Facts(unusable=self._unusable[name])
        else:
            return
        status = member_status.status(member, facts, self.now())
        before = member.get("status") or {}
        if status == before:
            return
        gone: Obj = dict.fromkeys(before.keys() - status.keys())
        try:
            await self._hub.merge_patch(Ref.of(member), {"status": status | gone}, subresource="status")
        except ApiError as fault:
            log.warning("%s: status not written: %s", name, fault.message)
            self._stale.add(name)

    def _facts(self, member: Member) -> member_status.Facts:
        try:
            return member.facts()
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            # Nodes or pods of a shape that no API server sends.
            log.error("%s: its objects can't be read", member.name, exc_info=fault)  # noqa: TRY400
            return member_status.Facts(unusable=Unusable("Unreadable", f"its objects can't be read: {fault!r}"))

    async def _keep_hub_access(self) -> None:
        """The service account's token rotates in its file; a hub that is its own member uses it too."""
        assert self._hub_access is not None
        async for access in read_again(self._hub_access):
            if access != self._hub.access:
                await self._hub.replace(access)
                self._mark(*(obj["metadata"]["name"] for obj in self.members() if secret_name(obj) is None))

    # -- events

    def _job_changed(self, before: Obj | None, after: Obj | None) -> None:
        if after is not None:
            meta = after["metadata"]
            self._jobs_by_uid[meta["uid"]] = (meta["namespace"], meta["name"])
        elif before is not None:
            self._jobs_by_uid.pop(before["metadata"]["uid"], None)

    def _member_changed(self, before: Obj | None, after: Obj | None) -> None:
        changed = after or before
        assert changed is not None
        if before is None or after is None or before.get("spec") != after.get("spec"):
            self._mark(changed["metadata"]["name"])
        if _cluster_of(before) != _cluster_of(after):  # others may be the same cluster, or no longer
            self._stale |= {obj["metadata"]["name"] for obj in self.members()}
            self._work.set()
            self._wake_unfinished()

    def _secret_changed(self, before: Obj | None, after: Obj | None) -> None:
        changed = after or before
        assert changed is not None
        name = changed["metadata"]["name"]
        self._mark(*(obj["metadata"]["name"] for obj in self.members() if secret_name(obj) == name))

    def _object_changed(self, member: str, kind: Kind, before: Obj | None, after: Obj | None) -> None:
        changed = after or before
        assert changed is not None
        labels = changed["metadata"].get("labels") or {}
        ours = labels.get(names.HUB) == self._hub_id
        if ours and (key := self._jobs_by_uid.get(labels.get(names.JOB_UID, ""))):
            self._wake(*key)
        if kind in (NODE, POD) and self._changes_capacity(kind, before, after):
            self._stale.add(member)
            self._work.set()
            self._wake_unfinished()
        elif kind not in (NODE, POD) and names.HUB not in labels:
            self._wake_unfinished()

    def _changes_capacity(self, kind: Kind, before: Obj | None, after: Obj | None) -> bool:
        if kind is NODE:
            return before != after
        return self._held(before) != self._held(after)

    def _held(self, pod: Obj | None) -> tuple[str, int]:
        """Node and GPUs that a pod holds."""
        node = (pod or {}).get("spec", {}).get("nodeName") or ""
        if pod is None or not node or pod["status"].get("phase") in inventory.ENDED:
            return "", 0
        count = scheduling.requested(pod["spec"], self._gpu_resource)
        return (node, count) if count else ("", 0)

    def _contact_changed(self, member: str) -> None:
        self._stale.add(member)
        self._work.set()
        self._wake_unfinished()

    def _hub_contact_changed(self) -> None:
        self._work.set()
        if self.synced:
            self._synced.set()

    def _mark(self, *members: str) -> None:
        self._dirty |= set(members)
        if self._dirty:
            self._work.set()

    def _wake_unfinished(self) -> None:
        """Every job that has not ended looks again, soon."""
        if self._wake_all_at is None:
            self._wake_all_at = time.monotonic() + WAKE_SECONDS

    async def _wake_in_bursts(self) -> None:
        """Wake every job that has not ended, once per burst of changes."""
        while True:
            await asyncio.sleep(WAKE_SECONDS / 4)
            if self._wake_all_at is None or time.monotonic() < self._wake_all_at:
                continue
            self._wake_all_at = None
            for job in self.jobs():
                if not has_ended(job):
                    self._wake(job["metadata"]["namespace"], job["metadata"]["name"])

    # -- helpers

    def _hub_informers(self) -> tuple[Informer, Informer, Informer]:
        return self._job_informer, self._member_informer, self._secret_informer

    def _hub_informer(
        self,
        kind: Kind,
        changed: Callable[[Obj | None, Obj | None], None],
        namespace: str | None = None,
        project: Callable[[Obj], Obj] = whole,
    ) -> Informer:
        return Informer(
            self._hub, kind, project=project, changed=changed, namespace=namespace, times=self._times,
            contact_changed=self._hub_contact_changed,
        )  # fmt: skip

    def _member_object(self, name: str) -> Obj | None:
        return next((obj for obj in self.members() if obj["metadata"]["name"] == name), None)


def _cluster_of(member: Obj | None) -> str | None:
    found: str | None = ((member or {}).get("status") or {}).get("clusterId")
    return found


def _secret(obj: Obj) -> Obj:
    """A Secret of our namespace: all its keys' names, but no value other than a kubeconfig."""
    data = obj.get("data") or {}
    kept = {key: data[key] if key == SECRET_KEY else "" for key in data}
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {"name": obj["metadata"]["name"], "namespace": obj["metadata"].get("namespace")},
        "data": kept,
    }
