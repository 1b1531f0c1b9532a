"""The lab that end-to-end tests share: the default clusters under another name and network.

It stands beside a lab that `make demo` left up. In a conftest.py: `from lab_fixture import lab`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Network

import pytest

from crosscloud_lab.lab import Lab
from crosscloud_lab.labfile import read_lab_file
from crosscloud_lab.progress import PlainProgress
from crosscloud_lab.spec import LabSpec

TEST_LAB = "crosscloud-test"
TEST_NETWORK = IPv4Network("10.78.0.0/16")

# pytest makes a fixture anew for each conftest.py that imports it; all of them hold the same lab.
_holders: list[Lab] = []


def lab_spec() -> LabSpec:
    """The default lab file's clusters and links, apart from the demo's."""
    return replace(read_lab_file(None), name=TEST_LAB, network=TEST_NETWORK)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three fresh clusters for the whole session, removed at its end."""
    found = _holders[0] if _holders else Lab(lab_spec(), PlainProgress())
    _holders.append(found)
    try:
        if len(_holders) == 1:
            # What a killed session left would carry its objects into this one.
            found.down()
            found.up()
        yield found
    finally:
        _holders.pop()
        if not _holders:
            found.down()
