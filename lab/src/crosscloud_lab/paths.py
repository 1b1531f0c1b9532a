"""Where the lab keeps things: a cache that stays, and one state folder per lab that `down` removes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of everything that may outlive a lab: binaries, base image, image builds."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "crosscloud"


def state_dir(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """State folder of the lab `name`; CROSSCLOUD_LAB_STATE moves the folder that holds all of them."""
    override = environ.get("CROSSCLOUD_LAB_STATE")
    if override:
        return Path(override) / name
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "crosscloud" / "labs" / name


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Holds a lock file, whose folder is made where it is missing; a second one waits."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
