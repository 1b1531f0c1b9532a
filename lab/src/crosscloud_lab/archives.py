"""The archives of built images in the cache: which were used last, and which may go."""

from __future__ import annotations

import os
from pathlib import Path


class Archives:
    """Archives of images named `REGISTRY/TARGET:TAG`; the time of a file is when it was wanted last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """The file of an image, whether it is there or not."""
        return self._folder / f"{name.rpartition('/')[2].replace(':', '-')}.tar"

    def use(self, name: str) -> bool:
        """Whether the image's archive is there; it then counts as used now."""
        path = self.path(name)
        if path.exists():
            os.utime(path)
            return True
        return False

    def prune(self, repository: str, keep: int) -> list[str]:
        """Removes all archives of `REGISTRY/TARGET` but the `keep` used last; the names of the images that stay."""
        target = repository.rpartition("/")[2]
        found = sorted(self._folder.glob(f"{target}-*.tar"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in [*found[keep:], *self._folder.glob(f"{target}-*.part")]:
            old.unlink()
        return [f"{repository}:{path.stem.removeprefix(f'{target}-')}" for path in found[:keep]]
