"""Reads the lab file strictly: every mistake at once, each with its path, value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from crosscloud_lab.errors import LabError, LabFileError
from crosscloud_lab.spec import RATE_ALLOWED, UNLIMITED, ClusterSpec, LabSpec, LinkSpec, PoolSpec, rate_bits

DEFAULT_NAME = "crosscloud"
DEFAULT_NETWORK = "10.77.0.0/16"
POD_RANGE = IPv4Network("10.244.0.0/16")
SERVICE_RANGE = IPv4Network("10.96.0.0/16")
MAX_CLUSTERS = 16
MAX_NODES = 16
MAX_GPUS = 64

_LAB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
# An interface name has at most 15 characters, and a cluster's WAN interfaces are called `to-CLUSTER`.
_CLUSTER_NAME = re.compile(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?")
_GPU = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")


def read_lab_file(path: Path | None) -> LabSpec:
    """The lab that the file describes; the default lab for None. Raises LabFileError, LabError."""
    if path is None:
        text = resources.files("crosscloud_lab").joinpath("default_lab.yaml").read_text()
        return parse_lab(text, "the default lab")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LabError(f"lab file {path} can't be read: {reason}; give a YAML file with -f") from error
    return parse_lab(text, f"lab file {path}")


def parse_lab(text: str, source: str = "lab file") -> LabSpec:
    """The lab that the YAML text describes; `source` names it in messages. Raises LabFileError."""
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, RecursionError, ValueError) as error:  # also lists too deep, numbers and dates that are none
        what = " ".join(str(error).split())
        raise LabFileError(f"{source} is not valid YAML:", [what]) from error
    reader = _Reader()
    lab = reader.lab(document)
    if reader.findings:
        raise LabFileError(f"{source} has {len(reader.findings)} mistake(s):", reader.findings)
    return lab


def check_lab_name(field: str, name: str) -> None:
    """LabError unless `name` may be a lab's name; it becomes part of folder and cgroup names."""
    if not _LAB_NAME.fullmatch(name):
        raise LabError(f"{field}: {name!r} is not allowed; allowed is {_name_allowed(30)}")


def _name_allowed(length: int) -> str:
    return f"lower-case letters, digits and '-', starting with a letter, at most {length} characters"


class _Reader:
    """Collects findings while it builds values; values built beside a finding are never used."""

    def __init__(self) -> None:
        self.findings: list[str] = []

    def lab(self, value: object) -> LabSpec:
        fields = self._mapping("the lab file", "", value, ("name", "network", "clusters", "links"))
        name = self._name("name", fields.get("name", DEFAULT_NAME), _LAB_NAME, 30)
        network = self._network(fields.get("network", DEFAULT_NETWORK))
        described = self._list("clusters", fields.get("clusters"), 1, MAX_CLUSTERS)
        clusters = tuple(self._cluster(p, v) for p, v in described)
        names = [cluster.name for cluster in clusters]
        self._unique("clusters", names)
        entries = self._list("links", fields.get("links", []), 0, 1000)
        links = tuple(self._link(p, v, names) for p, v in entries)
        self._unique("links", ["-".join(sorted(link.between)) for link in links if all(link.between)])
        if network.num_addresses < 256 * (len(clusters) + 1):
            self._add(
                "network",
                str(network),
                f"a range with 256 addresses for each of {len(clusters)} clusters and 256 more",
            )
        return LabSpec(name=name, network=network, clusters=clusters, links=links)

    def _cluster(self, path: str, value: object) -> ClusterSpec:
        fields = self._mapping(path, f"{path}.", value, ("name", "nodes"))
        name = self._name(f"{path}.name", fields.get("name"), _CLUSTER_NAME, 12)
        pools = tuple(self._pool(p, v) for p, v in self._list(f"{path}.nodes", fields.get("nodes"), 1, MAX_NODES))
        cluster = ClusterSpec(name=name, nodes=pools)
        if cluster.node_count > MAX_NODES:
            self._add(f"{path}.nodes", f"{cluster.node_count} nodes", f"at most {MAX_NODES} nodes in a cluster")
        return cluster

    def _pool(self, path: str, value: object) -> PoolSpec:
        fields = self._mapping(path, f"{path}.", value, ("count", "gpus", "gpu"))
        count = self._integer(f"{path}.count", fields.get("count", 1), 1, MAX_NODES)
        gpus = self._integer(f"{path}.gpus", fields.get("gpus", 0), 0, MAX_GPUS)
        gpu = fields.get("gpu", "")
        if gpus > 0 or gpu != "":
            allowed = "a GPU product as in the node label nvidia.com/gpu.product, such as NVIDIA-A100-SXM4-80GB"
            if not isinstance(gpu, str) or not _GPU.fullmatch(gpu):
                self._add(f"{path}.gpu", gpu, allowed)
            elif gpus == 0:
                self._add(f"{path}.gpus", gpus, "at least 1 where a gpu is named")
        return PoolSpec(count=count, gpus=gpus, gpu=gpu if isinstance(gpu, str) else "")

    def _link(self, path: str, value: object, names: list[str]) -> LinkSpec:
        fields = self._mapping(path, f"{path}.", value, ("between", "rate"))
        between = fields.get("between")
        allowed = f"two different clusters out of {', '.join(names) or 'none'}"
        ends = ("", "")
        pair = between if isinstance(between, list) and len(between) == 2 else ["", ""]
        if pair[0] != pair[1] and all(end in names for end in pair):
            ends = (pair[0], pair[1])
        else:
            self._add(f"{path}.between", between, allowed)
        rate = fields.get("rate", UNLIMITED)
        try:
            rate_bits(rate if isinstance(rate, str) else repr(rate))
        except ValueError:
            self._add(f"{path}.rate", rate, RATE_ALLOWED)
        return LinkSpec(between=ends, rate=str(rate))

    def _network(self, value: object) -> IPv4Network:
        allowed = "an IPv4 range of addresses for nodes, such as 10.77.0.0/16"
        try:
            network = IPv4Network(value if isinstance(value, str) else repr(value))
        except ValueError:
            self._add("network", value, allowed)
            return IPv4Network(DEFAULT_NETWORK)
        for other, what in ((POD_RANGE, "pods"), (SERVICE_RANGE, "Services")):
            if network.overlaps(other):
                self._add("network", value, f"a range apart from {other}, which {what} use in every cluster")
        return network

    def _name(self, path: str, value: object, pattern: re.Pattern[str], length: int) -> str:
        if isinstance(value, str) and pattern.fullmatch(value):
            return value
        self._add(path, value, _name_allowed(length))
        return ""

    def _integer(self, path: str, value: object, low: int, high: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self._add(path, value, f"a whole number from {low} to {high}")
        return low

    def _mapping(self, what: str, prefix: str, value: object, known: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self._add(what, value, f"a mapping with {', '.join(known)}")
            return {}
        for key in value:
            if key not in known:
                self.findings.append(f"{prefix}{key}: unknown field; allowed are {', '.join(known)}")
        return {str(key): item for key, item in value.items()}

    def _list(self, path: str, value: object, low: int, high: int) -> list[tuple[str, object]]:
        if isinstance(value, list) and low <= len(value) <= high:
            return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        shown = f"{len(value)} entries" if isinstance(value, list) else value
        self._add(path, shown, f"a list of {low} to {high} entries")
        return []

    def _unique(self, path: str, keys: list[str]) -> None:
        for key in sorted({key for key in keys if key and keys.count(key) > 1}):
            self._add(path, f"{key} twice", "each one once")

    def _add(self, path: str, value: object, allowed: str) -> None:
        shown = "nothing" if value is None else repr(value)
        self.findings.append(f"{path}: {shown} is not allowed; allowed is {allowed}")
