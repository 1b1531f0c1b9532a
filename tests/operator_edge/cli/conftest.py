"""The command, and an operator's world that makes members Ready, on two real API servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
from apiserver import ApiServer
from click.testing import CliRunner, Result
from crdfiles import JOBS

from crosscloud_operator.cli.main import main
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.informer import Times
from crosscloud_operator.kube.kubeconfig import vet
from crosscloud_operator.kube.world import KubeWorld


class Command:
    """Runs `crosscloud` against the hub as its administrator."""

    def __init__(self, hub_api: ApiServer) -> None:
        self._hub = str(hub_api.kubeconfig)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What it printed; fails where the exit code is another one, and on any traceback."""
        result: Result = CliRunner().invoke(main, ["--kubeconfig", self._hub, *arguments])
        assert "Traceback" not in result.output
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output


@pytest.fixture
def crosscloud(hub_api: ApiServer) -> Command:
    return Command(hub_api)


@contextlib.contextmanager
def world_at_work(hub_api: ApiServer) -> Iterator[KubeWorld]:
    """The operator's watching part, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    found: list[KubeWorld] = []
    tasks: list[asyncio.Task[None]] = []
    started = threading.Event()

    async def work() -> None:
        hub = HttpCluster("hub", vet(hub_api.kubeconfig.read_text()))
        found.append(
            KubeWorld(
                hub,
                hub_id="cli-tests",
                namespace="crosscloud-system",
                token_seconds=600,
                wake=lambda *_: None,
                times=Times(first_pause=0.05, last_pause=0.5),
            )
        )
        tasks.append(asyncio.create_task(found[0].run()))
        await found[0].wait_synced()
        started.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await hub.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    try:
        assert started.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(tasks[0].cancel)
        thread.join(30)
        loop.close()


@pytest.fixture(autouse=True)
def clean(hub_api: ApiServer, east_api: ApiServer) -> Iterator[None]:
    """Each test finds a hub without members and jobs, and a member without nodes."""
    yield
    hub_api.request("DELETE", "/apis/crosscloud.dev/v1alpha1/memberclusters")
    hub_api.request("DELETE", "/api/v1/namespaces/crosscloud-system/secrets")
    hub_api.raw("DELETE", JOBS)
    east_api.request("DELETE", "/api/v1/nodes")
