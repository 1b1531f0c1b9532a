from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from link.yard import Yard

from crosscloud_trainer.link import Link


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


@pytest.fixture
def one(yard: Yard) -> Iterator[Link]:
    """The listener under attack."""
    with yard.link(1) as link:
        yield link
