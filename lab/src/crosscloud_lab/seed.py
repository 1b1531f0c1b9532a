"""Copies of a containerd's folder that cost nothing: hard links for content, real copies for its databases.

Content and unpacked layers are never changed in place, only the databases are. A seed is taken from, and
planted into, nodes without containers, so that it holds images and nothing else.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from crosscloud_lab.cluster import Cluster
from crosscloud_lab.errors import LabError
from crosscloud_lab.plan import NodePlan
from crosscloud_lab.shell import run


class Seeds:
    """The seeds in the cache, by key of the set of images they hold."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plant(self, key: str, cluster: Cluster, node: NodePlan) -> bool:
        """Gives a node the images of a seed; False when there is no seed or the node has containers."""
        seed = self._folder / key
        if not seed.is_dir() or not _idle(cluster, node):
            return False
        root = cluster.files.containerd_root(node)
        with _Stopped(cluster, node):
            draft = root.with_name("containerd.part")
            try:
                _link_copy(seed, draft)
            except LabError:
                # Another file system: a real import is as fast as a real copy.
                shutil.rmtree(draft, ignore_errors=True)
                return False
            shutil.rmtree(root)
            draft.rename(root)
        seed.touch()
        return True

    def take(self, key: str, cluster: Cluster, node: NodePlan) -> None:
        """Keeps the images of a node as a seed; nothing happens when it has containers."""
        seed = self._folder / key
        if seed.is_dir() or not _idle(cluster, node):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{key}.part"
        shutil.rmtree(draft, ignore_errors=True)
        with _Stopped(cluster, node):
            try:
                _link_copy(cluster.files.containerd_root(node), draft)
            except LabError:
                shutil.rmtree(draft, ignore_errors=True)
                return
        draft.rename(seed)

    def latest(self) -> str | None:
        """Key of the seed used last."""
        seeds = [path for path in self._folder.glob("*") if path.suffix != ".part"]
        return max(seeds, key=lambda path: path.stat().st_mtime).name if seeds else None

    def drop(self, key: str) -> None:
        """Removes a seed."""
        shutil.rmtree(self._folder / key)

    def prune(self, keep: int) -> None:
        """Removes all seeds but the `keep` used last."""
        if not self._folder.is_dir():
            return
        seeds = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in seeds[keep:]:
            shutil.rmtree(old)


class _Stopped:
    """Keeps a node's containerd stopped for the time of a `with` statement."""

    def __init__(self, cluster: Cluster, node: NodePlan) -> None:
        self._cluster = cluster
        self._node = node
        self._daemon = cluster.containerd(node)

    def __enter__(self) -> None:
        self._cluster.sandbox.end(self._daemon)

    def __exit__(self, *failure: object) -> None:
        self._cluster.sandbox.start(self._daemon)
        self._cluster.wait_containerd(self._node)


def _idle(cluster: Cluster, node: NodePlan) -> bool:
    return not cluster.ctr(node, "containers", "list", "--quiet").split()


def _link_copy(source: Path, target: Path) -> None:
    run(["cp", "--archive", "--link", source, target], timeout=600)
    for database in target.rglob("*.db"):
        original = source / database.relative_to(target)
        database.unlink()
        shutil.copy2(original, database)
