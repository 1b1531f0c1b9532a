"""The Lease that lets one operator work at a time: taken before anything else starts, and the end of the process when
it is lost.

The client library's asyncio election was looked at and not taken: its requests have no deadline of their own, so that
a call that hangs outlives the lease while the work goes on; it writes local time as UTC; and it never gives the lease
back. Here the holder's clock counts from before the renewal that succeeded, the others' clocks from when they saw the
record change, both monotonic: nobody compares two machines' clocks.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time

from crosscloud_operator.kube.api import LEASE, AlreadyExists, ApiError, Cluster, Conflict, NotFound, Obj, Ref

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Somebody else may be at work: stop at once."""


class Lease:
    """`acquire`, then `hold` for as long as the work goes on; `release` hands over without a wait.

    `duration` (seconds) is what others wait after the last sign of life. The holder gives up after two thirds of it,
    and tries every fifth.
    """

    def __init__(self, cluster: Cluster, namespace: str, name: str, identity: str, duration: float = 15.0) -> None:
        self._cluster = cluster
        self._ref = Ref(LEASE, name, namespace)
        self._identity = identity
        self._duration = duration
        self._deadline = duration * 2 / 3
        self._period = duration / 5
        self._renewed = 0.0
        self._seen = ("", 0.0)  # resourceVersion of another's record, and when it was first seen
        self.held = False

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        told = ""
        while True:
            holder = await self._try()
            if self.held:
                log.info("lease %s/%s is ours (%s)", self._ref.namespace, self._ref.name, self._identity)
                return
            if holder != told:
                log.info("standing by: %s", holder)
                told = holder
            await asyncio.sleep(self._period)

    async def hold(self) -> None:
        """Renew for ever. Raises LeaseLost."""
        while True:
            await asyncio.sleep(self._period)
            problem = await self._try()
            if not self.held or time.monotonic() - self._renewed > self._deadline:
                self.held = False
                raise LeaseLost(problem or "not renewed in time")

    async def release(self) -> None:
        """Let the next one start at once. Failing is fine: it then waits for the lease to run out."""
        if not self.held:
            return
        self.held = False
        try:
            async with asyncio.timeout(self._period):
                lease = await self._cluster.get(self._ref)
                if lease and lease["spec"].get("holderIdentity") == self._identity:
                    await self._write(lease, "")
        except (ApiError, TimeoutError) as fault:
            log.info("lease not given back: %s", fault)

    async def _try(self) -> str:
        """One try to take or renew; what stands in the way, or nothing."""
        began = time.monotonic()
        try:
            # A renewal under way when the deadline comes must not succeed after it unseen.
            async with asyncio.timeout(self._period):
                problem = await self._take()
        except (ApiError, TimeoutError) as fault:
            return f"lease can't be read or written: {fault or 'no answer in time'}"
        if not problem:
            self.held, self._renewed = True, began
        return problem

    async def _take(self) -> str:
        lease = await self._cluster.get(self._ref)
        if lease is None:
            try:
                await self._cluster.create(self._fresh())
            except AlreadyExists:
                return "another took the lease first"
            return ""
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self._identity:
            if self.held:
                self.held = False
                return f"{holder} has the lease"
            version = lease["metadata"]["resourceVersion"]
            if self._seen[0] != version:
                self._seen = (version, time.monotonic())
            if time.monotonic() - self._seen[1] < float(spec.get("leaseDurationSeconds") or self._duration):
                return f"{holder} has the lease"
        try:
            await self._write(lease, self._identity)
        except (Conflict, NotFound):
            return "another changed the lease at the same time"
        return ""

    async def _write(self, lease: Obj, holder: str) -> None:
        now, spec = _now(), lease.get("spec") or {}
        changed: Obj = {"holderIdentity": holder, "renewTime": now}
        if holder and spec.get("holderIdentity") != holder:
            changed |= {
                "acquireTime": now,
                "leaseDurationSeconds": max(1, round(self._duration)),
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1,
            }
        version = lease["metadata"]["resourceVersion"]
        await self._cluster.merge_patch(self._ref, {"metadata": {"resourceVersion": version}, "spec": changed})

    def _fresh(self) -> Obj:
        now = _now()
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._ref.name, "namespace": self._ref.namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._duration)),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
