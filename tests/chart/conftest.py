from __future__ import annotations

from collections.abc import Iterator

import pytest
from apiserver import ApiServer, api_server
from helmchart import CHART, NAMESPACE, as_sets, helm

INSTALL = ("hubIsMember.enabled=true", "hubIsMember.namespaces={ml}")


@pytest.fixture(scope="session")
def hub() -> Iterator[ApiServer]:
    """A real API server with the chart installed, the hub's own namespace ml being allowed for jobs."""
    with api_server("hub") as server:
        server.namespace("ml")
        server.namespace(NAMESPACE, **{"pod-security.kubernetes.io/enforce": "restricted"})
        arguments = ("crosscloud", str(CHART), "--namespace", NAMESPACE, *as_sets(INSTALL))
        helm("install", *arguments, kubeconfig=server.kubeconfig)
        server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        yield server
