"""What every Cluster must do, asked of HttpCluster on a real API server (the in-memory one answers the same suite)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from apiserver import ApiServer
from operator_core.conformance import CHECKS

from crosscloud_operator.kube.api import Cluster
from crosscloud_operator.kube.cluster import HttpCluster

Check = Callable[[Cluster, str], Awaitable[None]]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_http_cluster(check: Check, hub: HttpCluster, hub_api: ApiServer) -> None:
    await check(hub, hub_api.namespace(f"check-{check.__name__.replace('_', '-')}"[:63].rstrip("-")))
