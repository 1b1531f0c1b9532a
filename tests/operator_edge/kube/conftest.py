"""Clusters over HTTP for the tests, on the shared API servers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from apiserver import ApiServer
from faultproxy import FaultProxy, fault_proxy

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.kubeconfig import vet

_NUMBERS = itertools.count()


@pytest.fixture
def namespace(east_api: ApiServer) -> str:
    """A namespace of the test's own in the member."""
    return east_api.namespace(f"test-{next(_NUMBERS)}")


@pytest.fixture
async def east(east_api: ApiServer) -> AsyncIterator[HttpCluster]:
    """The member as its administrator sees it."""
    cluster = HttpCluster("east", vet(east_api.kubeconfig.read_text()))
    yield cluster
    await cluster.close()


@pytest.fixture
async def hub(hub_api: ApiServer) -> AsyncIterator[HttpCluster]:
    """The hub as its administrator sees it."""
    cluster = HttpCluster("hub", vet(hub_api.kubeconfig.read_text()))
    yield cluster
    await cluster.close()


@pytest.fixture
async def proxy(east_api: ApiServer) -> AsyncIterator[FaultProxy]:
    """What stands before the member's API server and can fail in its stead."""
    async with fault_proxy(east_api) as found:
        yield found


@pytest.fixture
async def proxied(proxy: FaultProxy) -> AsyncIterator[HttpCluster]:
    """The member through that proxy."""
    cluster = HttpCluster("east", Access(proxy.url))
    yield cluster
    await cluster.close()
