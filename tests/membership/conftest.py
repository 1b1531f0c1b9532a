from __future__ import annotations

from collections.abc import Iterator

import pytest
from apiserver import ApiServer, api_server


@pytest.fixture(scope="session")
def home() -> Iterator[ApiServer]:
    """The API server of the home member."""
    with api_server("home") as server:
        yield server
