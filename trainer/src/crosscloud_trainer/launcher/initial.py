"""Weights to begin with, and what they say of their model: brought once for all ranks of a pod, from a `transformers`
folder or the storage of a job.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.storage import Storage

FIELD = "training.model.initFrom"

_SUFFIX = ".safetensors"
_CONFIG = "config.json"


def fetch(address: str, folder: Path) -> None:
    """Copy the weights at `address` into `folder`, and their model's configuration where it is there. Raises
    Failure(INVALID_INPUT) where there are no weights.
    """
    storage = Storage(address, FIELD)
    names = storage.names("")
    if not _weights(names) and "result" in names:  # the storage of a job
        storage = Storage(f"{storage.uri}/result", FIELD)
        names = storage.names("")
    found = _weights(names)
    if not found:
        allowed = "must be a folder with .safetensors files, as transformers saves a model, or the storage of a job"
        raise invalid([Problem(FIELD, address, allowed)])
    folder.mkdir()
    if _CONFIG in names:
        storage.download(_CONFIG, folder / _CONFIG)
    for name in found:
        storage.download(name, folder / name)
        if not _is_whole(folder / name):
            raise invalid([Problem(FIELD, address, f"{name} is no whole safetensors file")])


def _weights(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(_SUFFIX)]


def _is_whole(path: Path) -> bool:
    """Whether a file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
    return bool(8 + length + max(ends, default=0) == size)
