"""up, down, and everything that may happen between them, on a lab with one small cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lab.pods import pod
from waiting import eventually

from crosscloud_lab import cgroups
from crosscloud_lab.errors import LabError, PreflightError
from crosscloud_lab.lab import Lab
from crosscloud_lab.labfile import parse_lab, read_lab_file
from crosscloud_lab.plan import lab_id

LAB_FILE = """\
name: mini
network: 10.79.0.0/16
clusters:
- name: solo
  nodes: [{count: 1, gpus: 1, gpu: NVIDIA-T4}]
"""


class Mini:
    """The lab `mini`, driven as a user would: by the command."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "lab.yaml"
        self.file.write_text(LAB_FILE)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "crosscloud_lab", "--lab", "mini", *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=400)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self) -> None:
        self.run("up", "-f", str(self.file))

    def down(self) -> None:
        self.run("down")

    def status(self) -> Any:
        return json.loads(self.run("status", "--json"))

    @property
    def lab(self) -> Lab:
        return Lab(read_lab_file(self.file))

    def processes(self) -> dict[int, str]:
        """Every process of the lab, with the file that it runs."""
        found = {}
        for group in cgroups.trees("crosscloud-mini"):
            for pid in cgroups.members(group):
                with suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    def daemons(self) -> dict[str, list[int]]:
        """Process ids of the lab's daemons, containers left out."""
        group = cgroups.ledger_root() / "crosscloud-mini" / "clusters" / "solo"
        return {folder.name: sorted(cgroups.members(folder)) for folder in group.iterdir() if folder.is_dir()}


@pytest.fixture
def mini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mini]:
    monkeypatch.setenv("CROSSCLOUD_LAB_STATE", str(tmp_path / "state"))
    made = Mini(tmp_path)
    made.down()
    yield made
    made.down()


def traces(folder: Path) -> dict[str, Any]:
    """Whatever a lab could leave on this machine."""
    folders = ("/run", "/run/netns", "/run/containerd", "/var/lib", "/var/lib/cni", "/var/log", "/opt", "/etc/cni")
    sysctls = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    return {
        "namespaces": subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout,
        "mounts": [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "rules": subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout,
        "cgroups": cgroups.trees("crosscloud-mini"),
        "interfaces": [link["ifname"] for link in links if link["ifname"].startswith(f"cc{lab_id('mini')}")],
        "processes": [pid for pid in _pids() if "mini" in _environment(pid) and _in_namespaces_of_their_own(pid)],
        "folders": {name: sorted(path.name for path in Path(name).glob("*")) for name in folders},
        "sysctls": {name: Path("/proc/sys", name).read_text() for name in sysctls},
        "files": sorted(str(path) for path in folder.rglob("*")),
    }


def test_down_leaves_nothing_and_up_on_a_healthy_lab_changes_nothing(mini: Mini, tmp_path: Path) -> None:
    before = traces(tmp_path)
    mini.up()
    run_pod(mini)
    first = mini.daemons()
    mini.up()
    assert mini.daemons() == first
    assert mini.status()["ready"]
    # The pod ran on: nothing was restarted under it.
    assert (
        mini.lab.kubectl("solo", "get", "pod", "runs", "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
        == "0"
    )
    with pytest.raises(LabError, match="exists with another lab file"):
        Lab(parse_lab(LAB_FILE.replace("gpus: 1", "gpus: 2"))).up()
    mini.down()
    assert traces(tmp_path) == before
    mini.down()
    assert traces(tmp_path) == before


def _started(daemon: str) -> Callable[[Mini], bool]:
    return lambda mini: bool(mini.daemons().get(daemon))


def _sandbox(mini: Mini) -> bool:
    return any(cgroups.members(tree) for tree in cgroups.trees("crosscloud-mini"))


def _keys(mini: Mini) -> bool:
    return any((mini.file.parent / "state").glob("mini/clusters/solo/pki*"))


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(_sandbox, id="as-soon-as-its-namespaces-exist"),
        pytest.param(_keys, id="while-it-makes-keys"),
        pytest.param(_started("kube-apiserver"), id="while-the-api-server-starts"),
        pytest.param(_started("kubelet-0"), id="while-the-node-registers"),
    ],
)
def test_up_goes_on_after_up_was_killed(mini: Mini, moment: Callable[[Mini], bool]) -> None:
    with subprocess.Popen(mini.command("up", "-f", str(mini.file)), stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: safely(moment, mini), "the moment to kill it", seconds=120)
        finally:
            process.kill()
    mini.up()
    assert mini.status()["ready"]
    run_pod(mini)


def test_up_repairs_a_lab_whose_processes_were_all_killed(mini: Mini) -> None:
    mini.up()
    run_pod(mini)
    for pid in mini.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not mini.processes(), "the end of all processes")
    status = subprocess.run(mini.command("status"), capture_output=True, text=True, check=False)
    assert status.returncode == 1
    assert "solo: down: etcd, kube-apiserver" in status.stdout
    mini.up()
    assert mini.status()["ready"]
    mini.lab.kubectl("solo", "delete", "pod", "runs", "--grace-period=0", "--force")
    run_pod(mini)


def test_up_restarts_single_components_and_leaves_pods_running(mini: Mini) -> None:
    mini.up()
    run_pod(mini)
    victims = ("etcd", "kube-apiserver", "kube-proxy", "coredns", "kubelet-0", "versitygw")
    for name in victims:
        for pid in mini.daemons()[name]:
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(mini.daemons()[name] for name in victims), "their end")
    status = subprocess.run(mini.command("status"), capture_output=True, text=True, check=False)
    assert status.returncode == 1
    assert "solo: down: etcd, kube-apiserver" in status.stdout
    assert "S3 server: http://10.79.1.250:7070 (down)" in status.stdout
    mini.up()
    assert mini.status()["ready"]

    def mark() -> str:
        try:
            return mini.lab.kubectl("solo", "exec", "runs", "--", "cat", "/tmp/mark")
        except LabError:
            return ""

    assert eventually(mark, "the kubelet to know its pods again") == "here\n"


def test_down_cleans_up_though_the_state_folder_is_lost(mini: Mini, tmp_path: Path) -> None:
    mini.up()
    (tmp_path / "state" / "mini").rename(tmp_path / "lost")
    mini.down()
    assert not mini.processes()
    assert not cgroups.trees("crosscloud-mini")


def test_a_network_in_use_is_told_before_anything_is_made(mini: Mini, tmp_path: Path) -> None:
    subprocess.run(["ip", "route", "add", "blackhole", "10.79.3.0/24"], check=True)
    try:
        with pytest.raises(PreflightError, match=r"network 10.79.0.0/16 is in use on this machine \(10.79.3.0/24"):
            mini.lab.up()
    finally:
        subprocess.run(["ip", "route", "del", "blackhole", "10.79.3.0/24"], check=True)
    assert not cgroups.trees("crosscloud-mini")


def run_pod(mini: Mini) -> None:
    """A pod that asks for the GPU and must run."""
    runs = pod("runs", "echo here > /tmp/mark; sleep 100000", gpus=1)
    mini.lab.kubectl("solo", "apply", "-f", "-", stdin=json.dumps(runs))
    mini.lab.kubectl("solo", "wait", "--for=condition=Ready", "pod/runs", "--timeout=120s")


def safely(moment: Callable[[Mini], bool], mini: Mini) -> bool:
    """The moment's answer; groups may vanish while they are read."""
    try:
        return moment(mini)
    except FileNotFoundError:
        return False


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _in_namespaces_of_their_own(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    except OSError:
        return False
