"""Two real API servers for all tests of the operator, each started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from apiserver import ApiServer, api_server

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def hub_api() -> Iterator[ApiServer]:
    """An API server that knows our two kinds."""
    with api_server("hub") as server:
        for path in sorted(CRDS.glob("*.yaml")):
            server.kubectl("apply", "--server-side", "-f", str(path))
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        server.namespace("crosscloud-system")
        yield server


@pytest.fixture(scope="session")
def east_api() -> Iterator[ApiServer]:
    """An API server that knows nothing of us: a member."""
    with api_server("east") as server:
        yield server
