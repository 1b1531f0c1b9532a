"""All that is built once: the programs of the clusters and the images, side by side.

The programs keep the processors busy, the images mostly wait for the network and the disk.
"""

from __future__ import annotations

from pathlib import Path

from crosscloud_lab.binaries import Binaries
from crosscloud_lab.images import build_images
from crosscloud_lab.paths import cache_dir
from crosscloud_lab.progress import Progress
from crosscloud_lab.shell import together


def build_all(root: Path, progress: Progress) -> dict[str, Path]:
    """Builds what the cache lacks for the tree at `root`; archives by image name.

    Raises LabError at the first failure, when the other build is ended too. Both go on where they were when run again.
    """
    archives: dict[str, Path] = {}
    together(
        lambda: Binaries(cache_dir()).ensure(progress),
        lambda: archives.update(build_images(root, progress)),
    )
    return archives
