"""One member at run time: its API server, its informers, its token's renewal."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from crosscloud_operator.domain import inventory, names
from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import (
    CONFIG_MAP,
    NAMESPACE,
    NODE,
    POD,
    ApiError,
    Cluster,
    Kind,
    Obj,
    Ref,
)
from crosscloud_operator.kube.backoff import Backoff
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.credentials import SECRET_KEY, life_of
from crosscloud_operator.kube.informer import Informer, Times
from crosscloud_operator.kube.kubeconfig import KubeconfigRefused, render, vet
from crosscloud_operator.kube.member_status import Facts
from crosscloud_operator.kube.projection import projection

log = logging.getLogger(__name__)

RENEWAL_LOOK = 60.0  # seconds between looks at a token's age, which a rotated one may have changed

Changed = Callable[[Kind, Obj | None, Obj | None], None]


class Member:
    """Runs from `start` to `stop`. `changed` hears of every object, `contact_changed` of contact lost and found."""

    def __init__(
        self,
        name: str,
        access: Access,
        *,
        hub_id: str,
        changed: Changed,
        contact_changed: Callable[[], None],
        gpu_resource: str = inventory.GPU_RESOURCE,
        gpu_product_label: str = inventory.GPU_PRODUCT,
        times: Times | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.cluster = HttpCluster(name, access)
        self.version = ""
        self.renewal_fault = ""
        self._gpu_resource, self._gpu_product_label = gpu_resource, gpu_product_label
        self._contact_changed = contact_changed
        self._clock = clock
        self._replaced = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.informers = {
            kind: Informer(
                self.cluster,
                kind,
                project=projection(kind),
                changed=lambda before, after, kind=kind: changed(kind, before, after),  # type: ignore[misc]
                selector=f"{names.HUB}={hub_id}" if kind is CONFIG_MAP else None,
                times=times,
                contact_changed=contact_changed,
            )
            for kind in (NODE, POD, NAMESPACE, CONFIG_MAP)
        }

    def start(self, hub: Cluster, secret: Ref | None, token_seconds: int) -> None:
        """`secret` is where a renewed token is kept; without one nothing is renewed."""
        loop = asyncio.get_running_loop()
        runs = [informer.run() for informer in self.informers.values()]
        runs.append(self._watch_version())
        if secret is not None:
            runs.append(self._renew(hub, secret, token_seconds))
        self._tasks = [loop.create_task(run, name=f"member {self.name}") for run in runs]

    async def replace(self, access: Access) -> None:
        """Go on with other credentials for the same server; nothing that was seen is forgotten."""
        await self.cluster.replace(access)
        self._replaced.set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.cluster.close()

    @property
    def synced(self) -> bool:
        return all(informer.synced for informer in self.informers.values())

    @property
    def unreachable_since(self) -> float | None:
        """The earliest loss of contact among the informers."""
        return min((item.unreachable_since for item in self.informers.values() if item.unreachable_since), default=None)

    @property
    def last_contact(self) -> float | None:
        """The latest word from the member on any kind."""
        return max((item.last_contact for item in self.informers.values() if item.last_contact), default=None)

    def pools(self) -> Sequence[inventory.Pool]:
        nodes, pods = self.informers[NODE].objects(), self.informers[POD].objects()
        return inventory.pools(nodes, pods, self._gpu_resource, self._gpu_product_label)

    def facts(self) -> Facts:
        fault = next((item.fault for item in self.informers.values() if item.fault), None)
        return Facts(
            synced=self.synced,
            unreachable_since=self.unreachable_since,
            fault=fault,
            version=self.version,
            cluster_id=inventory.cluster_id(self.informers[NAMESPACE].objects()),
            pools=self.pools() if self.synced else (),
            life=life_of(self.cluster.access),
            renewal_fault=self.renewal_fault,
        )

    async def _watch_version(self) -> None:
        """Servers are upgraded under way; asking now and then is enough."""
        pause = Backoff(1.0, 60.0)
        while True:
            try:
                version = await self.cluster.version()
            except ApiError:
                await asyncio.sleep(pause.next())
                continue
            pause.reset()
            if version != self.version:
                self.version = version
                self._contact_changed()
            await asyncio.sleep(600)

    async def _renew(self, hub: Cluster, secret: Ref, token_seconds: int) -> None:
        """At half of a token's life: ask for the next one as ourselves, and keep it in the Secret.

        The Secret's watch then brings it into use, just as one that an administrator put there.
        """
        pause = Backoff(30.0, 600.0)
        while True:
            life = life_of(self.cluster.access)
            due = self._clock() + RENEWAL_LOOK if life.renew_at is None else life.renew_at
            if (left := due - self._clock()) > 0:
                await self._pause(min(RENEWAL_LOOK, max(1.0, left)))
                continue
            try:
                await self._renew_once(hub, secret, token_seconds)
                self.renewal_fault = ""
                pause.reset()
                # Until the Secret comes back through its watch, the old token is still the one in use.
                await self._pause(5)
            except (ApiError, KubeconfigRefused, KeyError, TypeError) as fault:
                self.renewal_fault = str(fault)
                log.warning("%s: token not renewed: %s", self.name, fault)
                self._contact_changed()
                await self._pause(pause.next())

    async def _pause(self, seconds: float) -> None:
        """Until the time is over or other credentials have come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._replaced.wait()
        self._replaced.clear()

    async def _renew_once(self, hub: Cluster, secret: Ref, token_seconds: int) -> None:
        access = self.cluster.access
        account = life_of(access).account
        assert account is not None
        held = await hub.get(secret)
        if held is None:
            return
        granted = await self.cluster.request_token(*account, token_seconds)
        text = render(access, self.name, str(granted["token"]))
        vet(text)  # a member that answers nonsense may not spoil what works
        patch = {
            # The version guards a token that an administrator rotates at the same moment.
            "metadata": {"resourceVersion": held["metadata"]["resourceVersion"]},
            "data": {SECRET_KEY: base64.b64encode(text.encode()).decode()},
        }
        await hub.merge_patch(secret, patch)
        log.info("%s: token renewed until %s", self.name, granted.get("expirationTimestamp"))
