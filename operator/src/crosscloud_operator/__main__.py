"""`crosscloud-operator`: take the Lease, then watch the hub and its members and reconcile jobs until told to stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import kopf

from crosscloud_operator import handlers
from crosscloud_operator.domain.inventory import SYSTEM_NAMESPACE
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import NAMESPACE, ApiError, Ref
from crosscloud_operator.kube.backoff import Backoff
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.lease import Lease, LeaseLost
from crosscloud_operator.kube.local import NoAccess, in_cluster, is_in_cluster, read_again, user_kubeconfig
from crosscloud_operator.kube.workqueue import WorkQueue
from crosscloud_operator.kube.world import KubeWorld
from crosscloud_operator.metrics import OperatorMetrics
from crosscloud_operator.probes import serve
from crosscloud_operator.reconcile import reconcile
from crosscloud_operator.settings import InvalidSettings, Settings, read_settings

log = logging.getLogger("crosscloud_operator")

STUCK_SECONDS = 600.0  # one look at a job that takes longer hangs: let the kubelet restart us
BEAT_SECONDS = 1.0
LATE_SECONDS = 60.0
EXIT_USAGE, EXIT_LEASE_LOST = 2, 3


@dataclass
class State:
    """What the probes look at."""

    lease: Lease | None = None
    world: KubeWorld | None = None
    queue: WorkQueue | None = None
    beat: float = field(default_factory=time.monotonic)

    def healthy(self) -> str:
        late = time.monotonic() - self.beat
        if late > LATE_SECONDS:
            return f"the loop's heartbeat is {late:.0f} s late"
        if self.queue and self.queue.longest > STUCK_SECONDS:
            return f"a job has been worked on for {self.queue.longest:.0f} s"
        return ""

    def ready(self) -> str:
        if not self.leading():
            return "standing by: another operator holds the lease"
        if self.world is None or not self.world.synced:
            return "the hub's objects are not all listed yet"
        return ""

    def leading(self) -> bool:
        return self.lease is not None and self.lease.held


def main() -> None:
    """Entry point. Exit codes: 0 stopped by a signal, 2 settings or credentials, 3 the lease was lost."""
    try:
        settings = read_settings(os.environ)
        access = hub_access(settings)
        access()
    except (InvalidSettings, NoAccess) as fault:
        print(f"crosscloud-operator: {fault}", file=sys.stderr)  # noqa: T201
        raise SystemExit(EXIT_USAGE) from None
    configure_logging(settings.log_level)
    asyncio.run(run(settings, access))


def hub_access(settings: Settings) -> Callable[[], Access]:
    """How to reach the hub: the pod's service account inside a cluster, a kubeconfig outside. Raises NoAccess."""
    if is_in_cluster(os.environ) and not settings.kubeconfig:
        return in_cluster
    if user_kubeconfig(settings.kubeconfig).tls_server_name:
        raise NoAccess(
            "the hub's kubeconfig: tls-server-name: kopf knows no such thing; use an address of the certificate"
        )
    return lambda: user_kubeconfig(settings.kubeconfig)


async def run(settings: Settings, access: Callable[[], Access]) -> None:
    """The whole operator. Ends on SIGTERM or SIGINT."""
    # Name resolution takes threads; a member whose name server hangs must leave some for the others.
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(64))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    state, metrics = State(), OperatorMetrics()
    metrics.watch(lambda: state.world, state.leading)
    async with serve(settings.http_host, settings.http_port, metrics.registry, state.healthy, state.ready):
        beat = asyncio.create_task(_beat(state))
        # The lease has connections of its own: a hub that is slow with large lists may not cost us the lease.
        hub, for_lease = HttpCluster("hub", access()), HttpCluster("hub", access())
        try:
            await _until(stop, _lead(settings, access, hub, for_lease, state, metrics, stop.set))
        finally:
            beat.cancel()
            if state.lease:
                await state.lease.release()
            await asyncio.gather(hub.close(), for_lease.close())


async def _lead(
    settings: Settings,
    access: Callable[[], Access],
    hub: HttpCluster,
    for_lease: HttpCluster,
    state: State,
    metrics: OperatorMetrics,
    stopped: Callable[[], None],
) -> None:
    jobs = settings.for_hub(await hub_id(hub))
    state.lease = Lease(for_lease, settings.namespace, settings.lease_name, settings.identity, settings.lease_seconds)
    await state.lease.acquire()

    async def work(namespace: str, name: str) -> float | None:
        return await reconcile(world, namespace, name, jobs)

    queue = state.queue = WorkQueue(work, done=metrics.reconciled)
    world = state.world = _world(settings, access, hub, jobs, queue)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_hold(state.lease), name="lease")
            group.create_task(_keep(for_lease, access), name="lease credentials")
            group.create_task(world.run(), name="world")
            group.create_task(_kopf(queue, world, access, stopped), name="kopf")
    finally:
        await queue.close()


def _world(
    settings: Settings, access: Callable[[], Access], hub: HttpCluster, jobs: JobSettings, queue: WorkQueue
) -> KubeWorld:
    return KubeWorld(
        hub,
        hub_id=jobs.hub,
        namespace=settings.namespace,
        token_seconds=settings.token_seconds,
        wake=queue.wake,
        gpu_resource=jobs.gpu_resource,
        gpu_product_label=jobs.gpu_product_label,
        hub_access=access,
    )


async def _hold(lease: Lease) -> None:
    """Another operator may be at work from here on: no clean-up, no last write, only the end."""
    try:
        await lease.hold()
    except LeaseLost as fault:
        log.critical("the lease was lost (%s): ending at once", fault)
        logging.shutdown()
        os._exit(EXIT_LEASE_LOST)


async def _kopf(queue: WorkQueue, world: KubeWorld, access: Callable[[], Access], stopped: Callable[[], None]) -> None:
    # Jobs are reconciled once the hub's members and jobs are known, or a plan would see no member at all.
    await world.wait_synced()
    await kopf.operator(
        registry=handlers.registry(queue, access),
        settings=handlers.kopf_settings(),
        clusterwide=True,
        standalone=True,
    )
    stopped()  # kopf takes the signals over, and ends when one comes


async def hub_id(hub: HttpCluster) -> str:
    """The UID of the hub's kube-system namespace: as long-lived as the cluster. Waits until the hub answers."""
    pause = Backoff(0.5, 10.0)
    while True:
        try:
            found = await hub.get(Ref(NAMESPACE, SYSTEM_NAMESPACE))
        except ApiError as fault:
            log.warning("the hub does not answer yet: %s", fault.message)
            await asyncio.sleep(pause.next())
            continue
        if found is None:
            raise RuntimeError("the hub has no namespace kube-system: set CROSSCLOUD_HUB_ID")
        return str(found["metadata"]["uid"])


async def _keep(cluster: HttpCluster, access: Callable[[], Access]) -> None:
    async for current in read_again(access):
        await cluster.replace(current)


async def _beat(state: State) -> None:
    while True:
        state.beat = time.monotonic()
        await asyncio.sleep(BEAT_SECONDS)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it fails or `stop` is set."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped")


def configure_logging(level: str) -> None:
    """One line per record on standard error."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
