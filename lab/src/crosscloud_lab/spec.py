"""What a lab is made of, as plain values. The lab file is read in `labfile`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from ipaddress import IPv4Network

UNLIMITED = "unlimited"
_RATE = re.compile(r"([1-9][0-9]*(?:\.[0-9]+)?)(kbit|mbit|gbit)")
_RATE_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RATE_ALLOWED = "a number followed by kbit, mbit or gbit (20mbit), at most 100gbit, or unlimited"
_RATE_MAXIMUM = 100 * 10**9


@dataclass(frozen=True)
class PoolSpec:
    """`count` nodes alike, each with `gpus` GPUs of the kind `gpu`."""

    count: int
    gpus: int
    gpu: str


@dataclass(frozen=True)
class ClusterSpec:
    name: str
    nodes: tuple[PoolSpec, ...]

    @property
    def node_count(self) -> int:
        return sum(pool.count for pool in self.nodes)


@dataclass(frozen=True)
class LinkSpec:
    """The WAN link between two clusters, in either order; `rate` as in `rate_bits`."""

    between: tuple[str, str]
    rate: str


@dataclass(frozen=True)
class LabSpec:
    name: str
    network: IPv4Network
    clusters: tuple[ClusterSpec, ...]
    links: tuple[LinkSpec, ...]

    def cluster_names(self) -> tuple[str, ...]:
        return tuple(cluster.name for cluster in self.clusters)

    def rate(self, a: str, b: str) -> str:
        """Rate of the link between a and b as the lab file sets it."""
        for link in self.links:
            if set(link.between) == {a, b}:
                return link.rate
        return UNLIMITED


def rate_bits(text: str) -> int | None:
    """Bits per second of a rate such as `20mbit`; None for `unlimited`. ValueError names what is allowed."""
    if text == UNLIMITED:
        return None
    match = _RATE.fullmatch(text)
    bits = int(Fraction(match[1]) * _RATE_UNITS[match[2]]) if match else 0
    if not 0 < bits <= _RATE_MAXIMUM:
        raise ValueError(f"{text!r} is not a rate: allowed is {RATE_ALLOWED}")
    return bits
