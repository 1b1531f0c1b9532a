"""The in-memory API passes the suite that a real API server passes."""

from __future__ import annotations

import pytest
from operator_core.conformance import CHECKS, Check
from operator_core.memory import MemoryCluster


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_in_memory_api(check: Check) -> None:
    await check(MemoryCluster("memory"), "ml")
