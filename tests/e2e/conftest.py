"""The operator on three real clusters, once for all end-to-end tests."""

from __future__ import annotations

import pytest
from cloud import Cloud
from lab_fixture import lab

from crosscloud_lab.lab import Lab

__all__ = ["cloud", "lab"]


@pytest.fixture(scope="session")
def cloud(lab: Lab) -> Cloud:
    found = Cloud(lab)
    found.install()
    return found
