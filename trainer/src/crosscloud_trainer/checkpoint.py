"""Checkpoints: safetensors chunks, one per (replica, rank), keyed by parameter and offset; the manifest comes last.

A replica's rank 0 lists its chunks in `replica-N.json`. The lowest replica waits until every replica of the view has
done so and then writes `manifest.json`: a folder without it is no checkpoint. All of them name the run document, so
that files which an older job left in the same folder are never taken for this one's.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.layout import Ids, Index, Interval
from crosscloud_trainer.storage import Storage

VERSION = "checkpoint.crosscloud.dev/v1"
WEIGHTS = "outer.weights"
MANIFEST = "manifest.json"

_POLL_SECONDS = 1.0
_WAIT_SECONDS = 1800.0  # for other replicas, which are done training: only their writing is left


@dataclass(frozen=True)
class CheckpointId:
    """Which checkpoint: the folder `attempt-N/home-H/step-K` below the storage."""

    run_digest: str
    attempt: int
    home: int
    step: int
    round: int

    @property
    def folder(self) -> str:
        return f"attempt-{self.attempt}/home-{self.home}/step-{self.step}"

    def header(self) -> dict[str, Any]:
        return {
            "apiVersion": VERSION,
            "run": self.run_digest,
            "attempt": self.attempt,
            "home": self.home,
            "step": self.step,
            "round": self.round,
        }


def by_interval(
    section: str, index: Index, intervals: Iterable[Interval], compact: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A rank's compact vector cut into tensors named `section/parameter:start`."""
    found, position = {}, 0
    for interval in intervals:
        name = index.parameters[interval.parameter].name
        found[f"{section}/{name}:{interval.start}"] = compact[position : position + interval.elements]
        position += interval.elements
    return found


def by_cell(section: str, index: Index, ids: Ids, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values of cells, end to end, cut into tensors named `section/parameter:start`; neighbouring cells share one."""
    found: dict[str, torch.Tensor] = {}
    position, key, first, reached = 0, "", 0, ("", -1)
    for number in ids.tolist():
        name, start, stop = index.cell(number)
        if (name, start) != reached:
            key, first = f"{section}/{name}:{start}", position
        position += stop - start
        found[key] = values[first:position]
        reached = (name, stop)
    return found


def write_chunk(
    storage: Storage, which: CheckpointId, replica: int, rank: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Store one rank's tensors; returns what the manifest says of the file."""
    path = f"replica-{replica}/rank-{rank}.safetensors"
    with tempfile.TemporaryDirectory(prefix="crosscloud-chunk-") as folder:
        local = Path(folder) / "chunk.safetensors"
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, local)
        with local.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        storage.upload(local, f"{which.folder}/{path}")
        return {"path": path, "sha256": digest, "bytes": local.stat().st_size}


def write_replica(storage: Storage, which: CheckpointId, replica: int, chunks: list[dict[str, Any]]) -> None:
    """List the chunks of a replica, all of which are stored."""
    storage.write(
        f"{which.folder}/replica-{replica}.json", _text({**which.header(), "replica": replica, "chunks": chunks})
    )


def write_manifest(
    storage: Storage, which: CheckpointId, replicas: Sequence[int], state: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[str, str]:
    """Wait for every replica's list, then write the manifest; returns its path and SHA-256.

    Raises Failure(PEER_LOST) when a replica doesn't finish.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    lists: dict[int, Any] = {}
    told = False
    while True:
        for replica in replicas:
            found = None if replica in lists else _replica_list(storage, which, replica)
            if found is not None:
                lists[replica] = found["chunks"]
        missing = [replica for replica in replicas if replica not in lists]
        if not missing:
            break
        if time.monotonic() > deadline:
            message = f"replicas {missing} didn't finish their part of the checkpoint in {_WAIT_SECONDS:.0f} s"
            raise Failure(ExitCode.PEER_LOST, message)
        if not told:
            say(f"checkpoint: waiting for the parts of replicas {missing}")
            told = True
        time.sleep(_POLL_SECONDS)
    replica_lists = [{"replica": replica, "chunks": chunks} for replica, chunks in sorted(lists.items())]
    text = _text({**which.header(), **state, "replicas": replica_lists})
    path = f"{which.folder}/{MANIFEST}"
    storage.write(path, text)
    return path, hashlib.sha256(text).hexdigest()


def read_section(
    storage: Storage, which: CheckpointId, replica: int, section: str
) -> dict[tuple[str, int], torch.Tensor]:
    """Tensors of one section of a replica's chunks by (parameter, start), read back and checked by their digests."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    listed = _replica_list(storage, which, replica)
    for chunk in listed["chunks"] if listed else ():
        data = storage.read(f"{which.folder}/{chunk['path']}")
        if data is None or hashlib.sha256(data).hexdigest() != chunk["sha256"]:
            message = (
                f"{storage.address(which.folder)}/{chunk['path']} isn't what was written there: the storage changed it"
            )
            raise Failure(ExitCode.STORAGE_REFUSED, message)
        for key, tensor in load(data).items():
            kind, _, where = key.partition("/")
            if kind == section:
                name, _, start = where.rpartition(":")
                found[name, int(start)] = tensor
    return found


def _replica_list(storage: Storage, which: CheckpointId, replica: int) -> Any:
    """What a replica listed for this very checkpoint, None while it hasn't."""
    text = storage.read(f"{which.folder}/replica-{replica}.json")
    if text is None:
        return None
    found = json.loads(text)
    same = all(found.get(key) == value for key, value in which.header().items())
    return found if same else None


def _text(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True).encode()
