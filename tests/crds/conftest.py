from __future__ import annotations

from collections.abc import Iterator

import pytest
from apiserver import ApiServer, api_server
from crdfiles import install


@pytest.fixture(scope="session")
def hub() -> Iterator[ApiServer]:
    """A real API server that serves our two kinds."""
    with api_server("hub") as server:
        install(server)
        yield server
