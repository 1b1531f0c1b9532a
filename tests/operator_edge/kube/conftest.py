"""Clusters over HTTP for the tests, on the shared API servers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from apiserver import ApiServer

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
