"""One operator at a time, on a real API server."""

from __future__ import annotations

import asyncio
import time

import pytest
from faultproxy import FaultProxy
from waiting import until

from crosscloud_operator.kube.api import LEASE, Ref
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.lease import Lease, LeaseLost

SECONDS = 3.0


def lease(cluster: HttpCluster, namespace: str, identity: str) -> Lease:
    return Lease(cluster, namespace, "operator", identity, SECONDS)


async def test_is_held_by_one_and_taken_over_after_its_end(
    east: HttpCluster, proxied: HttpCluster, proxy: FaultProxy, namespace: str
) -> None:
    first, second = lease(proxied, namespace, "first"), lease(east, namespace, "second")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(SECONDS * 1.5)  # longer than a lease lasts: renewals alone keep it
    assert not waiting.done()
    assert not holding.done()

    proxy.hang = True  # the first one loses its API server
    lost = time.monotonic()
    with pytest.raises(LeaseLost):
        await holding
    assert not first.held
    assert not second.held  # the first has given up before the second may start
    await asyncio.wait_for(waiting, 30)
    assert second.held
    assert time.monotonic() - lost >= SECONDS * 0.5
    found = await east.get(Ref(LEASE, "operator", namespace))
    assert found is not None
    assert found["spec"]["holderIdentity"] == "second"
    assert found["spec"]["leaseTransitions"] == 1


async def test_is_handed_over_at_once_when_released(east: HttpCluster, namespace: str) -> None:
    first, second = Lease(east, namespace, "operator", "first", 300), Lease(east, namespace, "operator", "second", 300)
    await first.acquire()
    await first.release()
    assert not first.held
    await asyncio.wait_for(second.acquire(), 30)
    assert second.held


async def test_of_many_that_start_together_one_gets_it(east: HttpCluster, namespace: str) -> None:
    leases = [Lease(east, namespace, "operator", f"n{number}", 300) for number in range(8)]
    tasks = [asyncio.create_task(item.acquire()) for item in leases]
    try:
        await until(lambda: any(item.held for item in leases))
        await asyncio.sleep(0.5)
        assert sum(item.held for item in leases) == 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_holder_that_is_overruled_stops_at_its_next_look(east: HttpCluster, namespace: str) -> None:
    first = lease(east, namespace, "first")
    await first.acquire()
    await east.merge_patch(Ref(LEASE, "operator", namespace), {"spec": {"holderIdentity": "somebody"}})
    with pytest.raises(LeaseLost, match="somebody"):
        await first.hold()


async def test_a_lease_deleted_under_its_holder_is_made_again(east: HttpCluster, namespace: str) -> None:
    first = lease(east, namespace, "first")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    found = await east.get(Ref(LEASE, "operator", namespace))
    assert found is not None
    await east.delete(Ref(LEASE, "operator", namespace), uid=found["metadata"]["uid"])

    async def again() -> bool:
        now = await east.get(Ref(LEASE, "operator", namespace))
        return now is not None and now["metadata"]["uid"] != found["metadata"]["uid"]

    await until(again)
    assert not holding.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
