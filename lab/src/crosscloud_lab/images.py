"""The repository's images: built when the tree changed, and brought to every node of a lab.

The first node that gets a set of images imports them, which takes a minute; the folder of its containerd is
then kept in the cache as a seed, and nodes without containers get a copy made of hard links, which takes
a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from crosscloud_lab.archives import Archives
from crosscloud_lab.builder import Builder, BuildRequest, find_builder, superseded
from crosscloud_lab.cluster import Cluster
from crosscloud_lab.components import SANDBOX_IMAGE
from crosscloud_lab.errors import LabError
from crosscloud_lab.lab import Lab
from crosscloud_lab.paths import cache_dir, exclusive
from crosscloud_lab.plan import NodePlan
from crosscloud_lab.progress import Progress, default_progress
from crosscloud_lab.recipe import image_names
from crosscloud_lab.seed import Seeds

_KEPT_SEEDS = 2
# Per target, so that checkouts that share the cache don't take each other's away.
_KEPT_ARCHIVES = 3
# A seed carries the images of the one it grew from; after so many builds the next starts from none.
_OLD_IMAGES_IN_SEED = 20


def build_images(root: Path, progress: Progress | None = None) -> dict[str, Path]:
    """Builds what the tree at `root` lacks; archives by image name, in the cache. Raises LabError."""
    progress = progress or default_progress()
    folder = cache_dir() / "images"
    archives = Archives(folder / "archives")
    names = image_names(root)
    wanted = {name: archives.path(name) for name in names.values()}
    with exclusive(folder / "lock"):
        missing = {target: name for target, name in names.items() if not archives.use(name)}
        if missing:
            builder = find_builder(folder, progress)
            for number, (target, name) in enumerate(missing.items(), start=1):
                with progress.phase(f"image {number} of {len(missing)}: {target}") as note:
                    if not builder.has(name):
                        builder.build(BuildRequest(root, target, name), note)
                    note("export")
                    _export(builder, name, wanted[name])
            repositories = [name.rpartition(":")[0] for name in names.values()]
            builder.forget([name for each in repositories for name in archives.prune(each, _KEPT_ARCHIVES)])
    return wanted


def load_images(lab: Lab, archives: dict[str, Path], progress: Progress | None = None) -> None:
    """Brings images to every node of a lab that lacks them."""
    progress = progress or default_progress()
    folder = cache_dir() / "images"
    with exclusive(folder / "lock"), progress.phase("load images into the nodes") as note:
        nodes = [(cluster, node) for cluster in lab.clusters() for node in cluster.plan.nodes]
        lacking = [(cluster, node) for cluster, node in nodes if _missing(cluster, node, archives)]
        if not lacking:
            return
        seeds = Seeds(folder / "seeds")
        key = hashlib.sha256(" ".join(sorted([SANDBOX_IMAGE, *archives])).encode()).hexdigest()[:12]
        for number, (cluster, node) in enumerate(lacking, start=1):
            note(f"node {number} of {len(lacking)}: {node.name}")
            if not seeds.plant(key, cluster, node):
                _import(cluster, node, archives, seeds)
                seeds.take(key, cluster, node)
        seeds.prune(_KEPT_SEEDS)


def load_archive(lab: Lab, source: str, clusters: Sequence[str] = ()) -> None:
    """Brings one image to nodes: from an archive file, or by name from docker's or our own store."""
    progress = default_progress()
    folder = cache_dir() / "images"
    chosen = [lab.cluster(name) for name in clusters] or lab.clusters()
    archive = Path(source)
    draft = folder / "loading.tar"
    with exclusive(folder / "lock"):
        try:
            if not archive.is_file():
                builder = find_builder(folder, progress)
                if not builder.has(source):
                    raise LabError(f"image {source!r} is no file and no image of docker or of our own builds")
                _export(builder, source, draft)
                archive = draft
            for cluster in chosen:
                for node in cluster.plan.nodes:
                    with progress.phase(f"load {source} into {node.name}"):
                        cluster.ctr(node, "images", "import", archive.absolute())
        finally:
            draft.unlink(missing_ok=True)


def _import(cluster: Cluster, node: NodePlan, archives: dict[str, Path], seeds: Seeds) -> None:
    """Imports what a node lacks, on top of an older seed, whose layers are mostly the same."""
    latest = seeds.latest()
    if latest is not None:
        seeds.plant(latest, cluster, node)
    for name in _missing(cluster, node, archives):
        cluster.ctr(node, "images", "import", archives[name])
    old = [name for name in _present(cluster, node) if superseded(name, list(archives))]
    if latest is not None and len(old) > _OLD_IMAGES_IN_SEED:
        seeds.drop(latest)


def _present(cluster: Cluster, node: NodePlan) -> list[str]:
    return cluster.ctr(node, "images", "list", "--quiet").split()


def _missing(cluster: Cluster, node: NodePlan, archives: dict[str, Path]) -> list[str]:
    present = set(_present(cluster, node))
    return [name for name in archives if name not in present]


def _export(builder: Builder, name: str, archive: Path) -> None:
    draft = archive.with_name(archive.name + ".part")
    draft.unlink(missing_ok=True)
    builder.export(name, draft)
    draft.rename(archive)
