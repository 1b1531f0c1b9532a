"""The private folder of a local run, with the keys of its pods: gone with the run, or at the next start.

A run that was killed can't tidy up. So each run holds a lock on a file in its folder, which the kernel takes back from
the dead, and each one looks for folders of others that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "crosscloud-"
_KEPT_PREFIX = "kept-crosscloud-"  # whoever asked for a folder removes it
_LOCK = ".lock"


@contextmanager
def work_folder(name: str, *, keep: bool) -> Iterator[Path]:
    """An empty folder that only this user can read, for the run of the job `name`."""
    remove_stale(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{_KEPT_PREFIX if keep else _PREFIX}{name}-"))
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove the folders below `parent` that runs of this user left behind when they were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another run is removing it too
            if _is_ours(folder) and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether a run of this user has begun in it: before its first attempt it may not have its lock yet."""
    owner = folder.lstat().st_uid
    return owner == os.getuid() and not folder.is_symlink() and any(folder.glob("attempt-*"))


def _is_held(folder: Path) -> bool:
    if not (folder / _LOCK).exists():
        return False
    with (folder / _LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
