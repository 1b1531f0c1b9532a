"""Control groups: the lab's ledger of its own processes.

Every process of a lab sits in a cgroup that carries the lab's name, so it is found again after any crash,
and no number of a process that died long ago is ever signalled. One hierarchy serves as the ledger; pods'
containers have cgroups of the same name in all of them.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from crosscloud_lab.errors import LabError

_LEDGER_CONTROLLERS = ("pids", "freezer", "devices", "memory", "cpu")
_KILL_SECONDS = 20.0


def hierarchies(mounts: str | None = None) -> dict[str, Path]:
    """Mounted cgroup hierarchies: controller name to folder; version 2 is called `unified`."""
    found: dict[str, Path] = {}
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    for line in text.splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("unified", Path(folder))
        elif kind == "cgroup":
            for option in options.split(","):
                name = option.removeprefix("name=")
                if option not in ("rw", "ro", "relatime", "nosuid", "nodev", "noexec"):
                    found.setdefault(name, Path(folder))
    return found


def ledger_root(found: dict[str, Path] | None = None) -> Path:
    """The hierarchy that keeps the ledger: a version 1 controller where there is one, else version 2."""
    present = hierarchies() if found is None else found
    for name in (*_LEDGER_CONTROLLERS, "unified"):
        if name in present:
            return present[name]
    raise LabError("no cgroup hierarchy is mounted: mount cgroups (version 1 or 2) under /sys/fs/cgroup")


def members(group: Path) -> list[int]:
    """Process ids in a cgroup and below it; empty when it doesn't exist."""
    found: list[int] = []
    for folder, _, files in os.walk(group):
        if "cgroup.procs" in files:
            with suppress(OSError):
                found += [int(word) for word in Path(folder, "cgroup.procs").read_text().split()]
    return found


def programs(group: Path) -> dict[int, str]:
    """Process ids directly in a cgroup, with the file name of the program each one runs."""
    answer: dict[int, str] = {}
    with suppress(OSError):
        for word in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                answer[int(word)] = Path(f"/proc/{word}/exe").readlink().name.removesuffix(" (deleted)")
    return answer


def kill(group: Path, timeout: float = _KILL_SECONDS) -> None:
    """Kills every process in a cgroup and below; LabError when some outlive `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while left := members(group):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {left} in {group} don't end after SIGKILL: look at /proc/PID/stack")
        time.sleep(0.02)


def make(path: str) -> None:
    """Makes a cgroup in every hierarchy, fit for the kubelet, which wants its root to exist."""
    for root in set(hierarchies().values()):
        folder = root
        for part in path.split("/"):
            parent, folder = folder, folder / part
            _pass_controllers(parent)
            folder.mkdir(exist_ok=True)
            # Version 1 starts a cpuset empty, and an empty one takes no process.
            for name in ("cpuset.cpus", "cpuset.mems"):
                file = folder / name
                if root.name.startswith("cpuset") and not file.read_text().strip():
                    file.write_text((parent / name).read_text())


def _pass_controllers(parent: Path) -> None:
    """Version 2 lets a child use only the controllers that its parent passes on."""
    with suppress(OSError):
        for controller in (parent / "cgroup.controllers").read_text().split():
            with suppress(OSError):
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")


def trees(name: str) -> list[Path]:
    """The top folders of a lab's cgroups, in every hierarchy that has one."""
    return [root / name for root in sorted(set(hierarchies().values())) if (root / name).is_dir()]


def remove(name: str) -> None:
    """Kills what runs in a lab's cgroups and removes them in every hierarchy."""
    for tree in trees(name):
        kill(tree)
    deadline = time.monotonic() + _KILL_SECONDS
    while left := trees(name):
        for tree in left:
            for folder, _, _ in os.walk(tree, topdown=False):
                with suppress(OSError):
                    Path(folder).rmdir()
        if time.monotonic() > deadline:
            raise LabError(f"cgroup {left[0]} can't be removed: is a process of yours in it?")
        time.sleep(0.02)
