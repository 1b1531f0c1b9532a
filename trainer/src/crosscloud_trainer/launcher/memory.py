"""How much memory this host has left for a pod's ranks: what the kernel could give, cut by its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from crosscloud_trainer.environment import Memory


def free_memory(root: Path = Path("/")) -> Memory | None:
    """None on a system that doesn't say. `root` has `proc` and `sys`."""
    found = [*_available(root / "proc/meminfo"), *_limits(root)]
    return min(found, key=lambda memory: memory.size, default=None)


def _available(path: Path) -> Iterator[Memory]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield Memory(int(line.split()[1]) * 1024, "available on this machine")


def _limits(root: Path) -> Iterator[Memory]:
    """What is left below the limit of each control group that this process is in, from its own one upwards."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):  # "" is version 2
            continue
        names = ("memory.max", "memory.current", "inactive_file")
        folder = root / "sys/fs/cgroup"
        if controllers:
            folder, names = folder / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        parts = Path(path).parts[1:]
        for depth in range(len(parts), -1, -1):
            left = _left(folder.joinpath(*parts[:depth]), *names)
            if left is not None:
                yield Memory(left, "left below the memory limit of this container")


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """None without a limit. Cached files that nobody has used lately make room when it is needed."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = next((int(pair[1]) for pair in pairs if pair[0] == cache), 0)
    except (OSError, ValueError):
        return None
    return max(0, int(most) - used + cached) if most.isdecimal() else None
