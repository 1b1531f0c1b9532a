"""Small file systems, for tests of full disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def disk_of(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own at `folder`, of a size as mount has it: 256k, 2m."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
