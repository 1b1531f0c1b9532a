"""What the lab remembers between commands: which lab it is, and what its links should be like.

All of it lies in the state folder, written whole or not at all, so that a command killed at any moment
leaves something the next one can read.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from crosscloud_lab.errors import LabError
from crosscloud_lab.labfile import parse_lab
from crosscloud_lab.network import LinkState
from crosscloud_lab.spec import LabSpec

# Raised when a lab that an older version of this package brought up can't be carried on by this one.
FORMAT = 1


class LabState:
    """The state folder of one lab."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def _trash(self) -> Path:
        return self.folder.with_name(self.folder.name + ".removed")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lab for one command, a second one waits; `down` removes the lock with the folder."""
        path = self.folder / "lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                handle = path.open("w")
            except FileNotFoundError:
                continue
            with handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):
                    if path.stat().st_ino == os.fstat(handle.fileno()).st_ino:
                        yield
                        return

    def exists(self) -> bool:
        return (self.folder / "lab.json").exists()

    def spec(self) -> LabSpec:
        """The lab that was brought up last; LabError when there is none."""
        try:
            record = json.loads((self.folder / "lab.json").read_text())
        except (OSError, ValueError) as error:
            raise LabError(f"lab {self.folder.name} doesn't exist: run `crosscloud-lab up`") from error
        if record.get("format") != FORMAT:
            raise LabError(
                f"lab {self.folder.name} was brought up by another version of crosscloud-lab: "
                f"run `crosscloud-lab --lab {self.folder.name} down`, then `up`"
            )
        return parse_lab(json.dumps(record["lab"]), f"record of lab {self.folder.name}")

    def save_spec(self, spec: LabSpec) -> None:
        self.write("lab.json", {"format": FORMAT, "lab": lab_document(spec)})

    def links(self, spec: LabSpec) -> dict[tuple[str, str], LinkState]:
        """The wanted state of every pair of clusters, in the order of the lab file."""
        saved = self.read("links.json", {})
        wanted = {}
        for a, b in combinations(spec.cluster_names(), 2):
            entry = saved.get(f"{a} {b}", {"rate": spec.rate(a, b), "cut": False})
            wanted[a, b] = LinkState(rate=entry["rate"], cut=entry["cut"])
        return wanted

    def save_links(self, links: dict[tuple[str, str], LinkState]) -> None:
        self.write("links.json", {f"{a} {b}": {"rate": s.rate, "cut": s.cut} for (a, b), s in links.items()})

    def read(self, name: str, default: Any) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return default

    def write(self, name: str, value: Any) -> None:
        """Writes a JSON file in one step, readable by its owner only."""
        draft = self.folder / f"{name}.part"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(value, indent=1) + "\n")
        draft.replace(self.folder / name)

    def remove(self) -> None:
        """Removes the folder, and the folders above it that are ours and empty."""
        shutil.rmtree(self._trash, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.folder.rename(self._trash)
        _remove_tree(self._trash)
        with suppress(OSError):
            if self.folder.parent.name == "labs":
                self.folder.parent.rmdir()
                self.folder.parent.parent.rmdir()


def lab_document(spec: LabSpec) -> dict[str, Any]:
    """The lab file that describes `spec`, with every field written out."""
    clusters = [
        {
            "name": cluster.name,
            "nodes": [
                {"count": pool.count, **({"gpus": pool.gpus, "gpu": pool.gpu} if pool.gpus else {})}
                for pool in cluster.nodes
            ],
        }
        for cluster in spec.clusters
    ]
    links = [{"between": list(link.between), "rate": link.rate} for link in spec.links]
    return {"name": spec.name, "network": str(spec.network), "clusters": clusters, "links": links}


def _remove_tree(folder: Path) -> None:
    try:
        while folder.exists():
            with suppress(FileNotFoundError):  # what someone else removes at the same time is removed too
                shutil.rmtree(folder)
    except OSError as error:
        raise LabError(f"{folder} can't be removed: {error.strerror} ({error.filename})") from error
