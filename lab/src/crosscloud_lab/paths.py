"""Where the lab keeps things: a cache that stays, and one state folder per lab that `down` removes."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
