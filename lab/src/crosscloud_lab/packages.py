"""The programs that the lab takes from the system, and the Debian packages that bring them."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from crosscloud_lab.errors import LabError, PreflightError
from crosscloud_lab.progress import Progress
from crosscloud_lab.shell import run

CLUSTER_TOOLS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "busybox": "busybox-static",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
}
IMAGE_TOOLS = {"buildah": "buildah", "debootstrap": "debootstrap", "ctr": "containerd"}
TEST_TOOLS = {"prometheus": "prometheus", "promtool": "prometheus", "haproxy": "haproxy"}
CNI_PACKAGE = "containernetworking-plugins"
# /opt/cni/bin, where some put them, is hidden in the clusters' sandboxes.
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/usr/libexec/cni"))
CNI_PLUGINS = ("bridge", "host-local", "portmap", "loopback")

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ELF_INTERPRETER = 3  # PT_INTERP of the program headers
_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_TEXT = "#!/bin/sh\n# Written by crosscloud-lab for the time of one package installation.\nexit 101\n"


def find_tool(name: str) -> str | None:
    """Where a program lies on the system's own path, which the clusters use."""
    return shutil.which(name, path=SYSTEM_PATH)


def cni_folder() -> Path | None:
    """The folder with the network plugins."""
    for folder in CNI_FOLDERS:
        if all((folder / plugin).exists() for plugin in CNI_PLUGINS):
            return folder
    return None


def busybox_is_static(path: str) -> bool:
    """Whether a program runs without a C library beside it: its ELF headers ask for no interpreter."""
    with Path(path).open("rb") as file:
        header = file.read(64)
        table, entry_size, entries = (*struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54))
        file.seek(table)
        kinds = [struct.unpack_from("<I", file.read(entry_size))[0] for _ in range(entries)]
    return _ELF_INTERPRETER not in kinds


def missing_packages(tools: dict[str, str]) -> list[str]:
    """Debian packages whose programs this machine lacks."""
    missing = {package for tool, package in tools.items() if find_tool(tool) is None}
    if tools is CLUSTER_TOOLS:
        if cni_folder() is None:
            missing.add(CNI_PACKAGE)
        busybox = find_tool("busybox")
        if busybox and not busybox_is_static(busybox):
            missing.add(tools["busybox"])
    return sorted(missing)


def ensure_packages(tools: dict[str, str], progress: Progress) -> None:
    """Installs what is missing where there is apt; elsewhere PreflightError names it."""
    missing = missing_packages(tools)
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise PreflightError("this machine misses programs and has no apt to install them:", missing_sentences(tools))
    with progress.phase(f"install Debian packages: {' '.join(missing)}"):
        install(missing)
    if missing_packages(tools):
        raise PreflightError("apt installed the packages, but programs are still missing:", missing_sentences(tools))


def missing_sentences(tools: dict[str, str]) -> list[str]:
    """For each missing package one sentence with its programs."""
    sentences = []
    for package in missing_packages(tools):
        wanted = [tool for tool, brings in tools.items() if brings == package] or ["the CNI plugins"]
        sentences.append(f"{', '.join(wanted)}: install what Debian calls {package}")
    return sentences


def install(packages: Sequence[str]) -> None:
    """Installs Debian packages without starting the services that come with them."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = [
        "apt-get",
        "-q",
        "-y",
        "--no-install-recommends",
        "-o",
        "DPkg::Lock::Timeout=600",
        "install",
        *packages,
    ]
    with _no_services():
        try:
            run(command, env=env, timeout=1800)
        except LabError:
            # The usual reason on a fresh machine is a package list that is empty or old.
            run(["apt-get", "-q", "update"], env=env, timeout=600)
            run(command, env=env, timeout=1800)


@contextmanager
def _no_services() -> Iterator[None]:
    """Debian asks policy-rc.d before it starts a service; a policy of the machine's own is left alone."""
    with suppress(OSError):
        if _POLICY.read_text() == _POLICY_TEXT:
            _POLICY.unlink()
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text(_POLICY_TEXT)
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            _POLICY.unlink(missing_ok=True)
