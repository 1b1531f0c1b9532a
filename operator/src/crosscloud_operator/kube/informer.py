"""What a cluster holds of one kind, kept current by LIST in pages and WATCH with bookmarks.

It never gives up and never runs hot: whatever fails, the next try comes after a pause that grows with jitter. After a
watch on which nothing comes, not even a bookmark, it lists again. The library's own informer has neither bookmarks nor
that timeout, and takes a thread each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crosscloud_operator.kube.answers import Expired, Silent
from crosscloud_operator.kube.api import ApiError, Kind, Obj, Unreachable
from crosscloud_operator.kube.backoff import Backoff
from crosscloud_operator.kube.cluster import QUIET, HttpCluster

log = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace ("" where the kind has none), name
Changed = Callable[[Obj | None, Obj | None], None]  # before (None: new), after (None: gone)


@dataclass(frozen=True)
class Times:
    """Seconds. Servers send a bookmark about once a minute, so `inactivity` must lie above that."""

    inactivity: float = 70.0
    watch_least: float = 240.0
    watch_most: float = 360.0
    first_pause: float = 0.5
    last_pause: float = 30.0
    grace: float = 3.0  # a stream that breaks and is there again within this time is no loss of contact
    settled: float = 5.0  # a watch that lived so long was a good one: the next pause is short again


class Informer:
    """A Cache (kube/api.py) of one kind. `run` it as a task; cancel the task to stop."""

    def __init__(
        self,
        cluster: HttpCluster,
        kind: Kind,
        *,
        project: Callable[[Obj], Obj],
        changed: Changed,
        namespace: str | None = None,
        selector: str | None = None,
        times: Times | None = None,
        contact_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind = kind
        self._cluster = cluster
        self._project = project
        self._changed = changed
        self._namespace = namespace
        self._selector = selector
        self._times = times or Times()
        self._contact_changed = contact_changed
        self._objects: dict[Key, Obj] = {}
        self._version = ""
        self._synced = False
        self._contact: float | None = None
        self._lost: float | None = None
        self._failing: float | None = None  # since when (monotonic) nothing has worked
        self._started = time.time()
        self.fault: ApiError | None = None

    @property
    def synced(self) -> bool:
        return self._synced

    @property
    def unreachable_since(self) -> float | None:
        return self._lost

    @property
    def last_contact(self) -> float | None:
        """Wall-clock time of the last word from the server, bookmarks included."""
        return self._contact

    def objects(self) -> Sequence[Obj]:
        return list(self._objects.values())

    async def run(self) -> None:
        """List, watch, list again when told to, for ever."""
        pause = Backoff(self._times.first_pause, self._times.last_pause)
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                    began = time.monotonic()
                await self._watch()
            except Expired as fault:
                self._version = ""
                log.debug("%s: watch of %s expired: %s", self._cluster.name, self.kind.plural, fault.message)
            except Silent as fault:
                # Servers may be quiet: a list shows whether this one is there, and what a dead watch has hidden.
                self._version = ""
                self._failing = time.monotonic() - self._times.inactivity
                log.debug("%s: %s: %s; listing again", self._cluster.name, self.kind.plural, fault.message)
            except ApiError as fault:
                self._lose(fault)
            except Exception as fault:
                # A server that sends nonsense ends no task of ours, and is believed nothing until it lists anew.
                log.error("%s: %s that can't be read", self._cluster.name, self.kind.plural, exc_info=fault)  # noqa: TRY400
                self._version = ""
                self._lose(Unreachable(f"{self.kind.plural} that can't be read: {fault!r}", reason="Unreadable"))
            if time.monotonic() - began >= self._times.settled:
                pause.reset()
            await asyncio.sleep(pause.next())

    async def _list(self) -> None:
        items, version = await self._cluster.list_versioned(
            self.kind, namespace=self._namespace, selector=self._selector
        )
        self._touch()
        before = self._objects
        self._objects = {_key(item): self._project(item) for item in items}
        self._version = version
        if not self._synced:
            self._synced = True
            self._contact_changed()
        for key in before.keys() - self._objects.keys():
            self._changed(before[key], None)
        for key, obj in self._objects.items():
            if obj != before.get(key):
                self._changed(before.get(key), obj)

    async def _watch(self) -> None:
        events = self._cluster.watch(
            self.kind,
            self._version,
            namespace=self._namespace,
            selector=self._selector,
            seconds=random.uniform(self._times.watch_least, self._times.watch_most),  # noqa: S311 - spreads load
            inactivity=self._times.inactivity,
        )
        async with contextlib.aclosing(events):
            async for word, obj in events:
                self._touch()
                if word == "OPENED":
                    continue
                if version := (obj.get("metadata") or {}).get("resourceVersion"):
                    self._version = version
                if word != "BOOKMARK":
                    self._take(word, obj)

    def _take(self, word: str, obj: Obj) -> None:
        key = _key(obj)
        before = self._objects.get(key)
        if word == "DELETED":
            if self._objects.pop(key, None) is not None:
                self._changed(before, None)
            return
        after = self._project(obj)
        self._objects[key] = after
        if after != before:
            self._changed(before, after)

    def _touch(self) -> None:
        self._contact = time.time()
        self._failing = None
        self.fault = None
        if self._lost is not None:
            self._lost = None
            log.info("%s: %s are seen again", self._cluster.name, self.kind.plural)
            self._contact_changed()

    def _lose(self, fault: ApiError) -> None:
        now = time.monotonic()
        if self._failing is None:
            self._failing = now
        if self._synced and self._lost is None and now - self._failing < self._times.grace:
            return
        if fault.reason == QUIET and self.fault is not None:
            return  # says less than the one before
        words = self.fault.message if self.fault else None
        self.fault = fault
        if self._lost is None:
            self._lost = self._contact or self._started
            log.warning("%s: lost sight of %s: %s", self._cluster.name, self.kind.plural, fault.message)
        elif words == fault.message:
            return
        self._contact_changed()


def _key(obj: Obj) -> Key:
    meta = obj["metadata"]
    return meta.get("namespace", ""), meta["name"]
