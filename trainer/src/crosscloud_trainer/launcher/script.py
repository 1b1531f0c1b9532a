"""The user's own training script, brought to where the ranks of a pod can run it."""

from __future__ import annotations

from pathlib import Path

import fsspec

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.failures import invalid

FIELD = "script.file"
SCRIPT_TIMEOUT = "DEEPSPEED_TIMEOUT"  # minutes that a script's process group waits, read by DeepSpeed


def fetched(file: str, folder: Path) -> Path:
    """The script as a local file: a path as it is, an fsspec address copied into `folder`. Raises
    Failure(INVALID_INPUT).
    """
    if "://" not in file:
        path = Path(file)
        if not path.is_file():
            allowed = f"must be a file in the image, here below {Path.cwd()}, or an fsspec address"
            raise invalid([Problem(FIELD, file, allowed)])
        return path
    path = folder / (file.rpartition("/")[2] or "script.py")
    try:
        with fsspec.open(file, "rb") as source:
            path.write_bytes(source.read())
    except (OSError, ValueError, ImportError) as fault:
        raise invalid([Problem(FIELD, file, f"can't be read: {fault}")]) from fault
    return path
