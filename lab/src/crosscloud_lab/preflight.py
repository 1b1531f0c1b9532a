"""Looks at the machine before anything is made: everything that stands in the way, in one message."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from crosscloud_lab import cgroups, network
from crosscloud_lab.errors import LabError, PreflightError
from crosscloud_lab.packages import CLUSTER_TOOLS, ensure_packages, missing_packages, missing_sentences
from crosscloud_lab.plan import LabPlan
from crosscloud_lab.progress import Progress
from crosscloud_lab.sandbox import HIDDEN_FOLDERS
from crosscloud_lab.shell import run

_MEMORY_PER_CLUSTER = 900 * 2**20
_DISK_PER_NODE = 2**30
_MODULES = ("overlay", "veth", "bridge", "br_netfilter", "nf_tables", "nf_conntrack", "nf_nat", "sch_tbf")
_TITLE = "this machine can't carry the lab:"


def require_root() -> None:
    """PreflightError unless we are root on Linux."""
    findings = _system_findings(sys.platform, os.geteuid() if hasattr(os, "geteuid") else -1)
    if findings:
        raise PreflightError(_TITLE, findings)


def check(lab: LabPlan, state: Path, cache: Path, running: bool, progress: Progress) -> None:
    """Raises PreflightError with all findings; installs missing packages where apt can. For root alone: `require_root`.

    `running` says that the lab is there already, so that its own memory and disk aren't asked for twice.
    """
    findings = _folder_findings({"state folder": state, "cache folder": cache})
    if not running:
        nodes = sum(len(cluster.nodes) for cluster in lab.clusters)
        findings += _size_findings(_memory_available(), len(lab.clusters), _disk_free(state), nodes, state)
    if shutil.which("apt-get") is None:
        findings += missing_sentences(CLUSTER_TOOLS)
    if not findings and missing_packages(CLUSTER_TOOLS):
        ensure_packages(CLUSTER_TOOLS, progress)
    if not missing_packages(CLUSTER_TOOLS):
        if not running:
            findings += _kernel_findings()
        conflicts = network.host_conflicts(lab)
        if conflicts:
            findings.append(
                f"network {lab.spec.network} is in use on this machine ({', '.join(conflicts)}): "
                "set another `network` in the lab file"
            )
    if findings:
        raise PreflightError(_TITLE, findings)


def _system_findings(platform: str, user: int) -> list[str]:
    findings = []
    if platform != "linux":
        findings.append(f"operating system {platform}: the lab runs on Linux only, in a virtual machine for example")
    if user != 0:
        findings.append(
            "user: the lab makes network namespaces and mounts, so run it as root (sudo crosscloud-lab ...)"
        )
    return findings


def _folder_findings(folders: dict[str, Path]) -> list[str]:
    variable = {"state folder": "CROSSCLOUD_LAB_STATE", "cache folder": "XDG_CACHE_HOME"}
    findings = []
    for what, folder in folders.items():
        for hidden in HIDDEN_FOLDERS:
            if folder.absolute().is_relative_to(hidden):
                findings.append(f"{what} {folder}: clusters don't see {hidden}; set {variable[what]} elsewhere")
    return findings


def _size_findings(memory: int, clusters: int, disk: int, nodes: int, state: Path) -> list[str]:
    findings = []
    need = clusters * _MEMORY_PER_CLUSTER
    if memory < need:
        findings.append(
            f"memory: {clusters} clusters need {need / 2**30:.1f} GiB, "
            f"{memory / 2**30:.1f} GiB are available; end other programs, or describe fewer clusters in the lab file"
        )
    need = nodes * _DISK_PER_NODE
    if disk < need:
        findings.append(
            f"disk: {nodes} nodes need {need / 2**30:.0f} GiB in {state}, {disk / 2**30:.1f} GiB are free; "
            "free some, or set CROSSCLOUD_LAB_STATE to a larger disk"
        )
    return findings


def _kernel_findings() -> list[str]:
    findings = []
    if shutil.which("modprobe"):
        with suppress(LabError):
            run(["modprobe", "--quiet", "--all", *_MODULES])
    try:
        cgroups.ledger_root()
    except LabError as error:
        findings.append(f"kernel: {error}")
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        findings.append("kernel: no overlay filesystem (CONFIG_OVERLAY_FS), which containers are built on")
    for what, script in _PROBES:
        try:
            run(["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-ec", script])
        except LabError as error:
            findings.append(f"kernel: {what} don't work here ({_last_line(error)})")
    return findings


_PROBES: Sequence[tuple[str, str]] = (
    ("network, mount and process namespaces", "true"),
    ("virtual ethernet pairs (veth)", "ip link add name v0 type veth peer name v1"),
    ("bridges", "ip link add name b0 type bridge"),
    (
        "token buckets (tc tbf)",
        "ip link add name v0 type veth peer name v1; tc qdisc add dev v0 root tbf rate 1mbit burst 16000 latency 9ms",
    ),
    (
        "nftables with address translation",
        "nft 'add table ip t; add chain ip t c { type nat hook postrouting priority 100; }; "
        "add rule ip t c ip saddr 10.0.0.0/8 masquerade'",
    ),
)


def _last_line(error: LabError) -> str:
    return str(error).strip().splitlines()[-1][-200:]


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _disk_free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
