"""Local runs that have ended, and those that are followed until something can be done to them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from trainer.jobs import family, ranks_of

ROUND = re.compile(r"^\[rank 0\] round (\d+) applied: digest ([0-9a-f]{16})", re.MULTILINE)
VALIDATION = re.compile(r"^\[rank 0\] validation after step (\d+): loss ([0-9.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A local run that has ended. `path_of` tells where an address of its storage lies on this disk."""

    code: int
    events: list[dict[str, Any]]
    out: Path
    path_of: Callable[[str], Path] = field(default=Path)

    @property
    def end(self) -> dict[str, Any]:
        return self.events[-1]

    @property
    def failures(self) -> list[str]:
        """What was told of each attempt that failed."""
        return [event["message"] for event in self.events if event["event"] == "failure"]

    def log(self, attempt: int, replica: int | str = 0) -> str:
        return (self.out / "logs" / f"attempt-{attempt}" / f"replica-{replica}.log").read_text()

    def digests(self, attempt: int = 1, replica: int | str = 0) -> dict[int, str]:
        """Digest after each round, as the replica's log tells."""
        return {int(number): digest for number, digest in ROUND.findall(self.log(attempt, replica))}

    def validation(self, attempt: int, replica: int | str = 0) -> dict[int, float]:
        """Validation losses of a replica by step, to four decimals."""
        return {int(step): float(loss) for step, loss in VALIDATION.findall(self.log(attempt, replica))}

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """As the launcher remembers them, newest first."""
        found: list[dict[str, Any]] = json.loads((self.out / "job.json").read_text())["checkpoints"]
        return found

    def chunks(self, number: int = 0) -> list[str]:
        """SHA-256 of all chunks of a checkpoint: weights, optimizer, outer state, residuals, replica by replica. Each
        chunk is as it was stored.
        """
        manifest = self.path_of(self.checkpoints[number]["uri"])
        assert hashlib.sha256(manifest.read_bytes()).hexdigest() == self.checkpoints[number]["digest"]
        said = [
            chunk
            for part in json.loads(manifest.read_text())["replicas"]
            for rank in part["ranks"]
            for chunk in rank["chunks"]
        ]
        found = [hashlib.sha256((manifest.parent / chunk["path"]).read_bytes()).hexdigest() for chunk in said]
        assert found == [chunk["sha256"] for chunk in said]
        return found

    def weights(self) -> dict[tuple[str, int], torch.Tensor]:
        """Outer weights of the newest checkpoint by (parameter, first element)."""
        found = {}
        for path in self.path_of(self.checkpoints[0]["uri"]).parent.glob("replica-*/*.safetensors"):
            for key, tensor in load_file(path).items():
                section, _, place = key.partition("/")
                if section == "outer.weights":
                    name, _, start = place.rpartition(":")
                    assert (name, int(start)) not in found
                    found[name, int(start)] = tensor
        return found


def broken_off(run: Run, out: Path, step: int | None = None) -> list[dict[str, Any]]:
    """A copy in `out` of what a run has left, as if it had come to the checkpoint of `step` and no further; returns the
    checkpoints that are remembered then.
    """
    shutil.copytree(run.out, out)
    record = json.loads((out / "job.json").read_text().replace(str(run.out), str(out)))
    if step is not None:
        record["checkpoints"] = [item for item in record["checkpoints"] if item["step"] <= step]
    (out / "job.json").write_text(json.dumps(record))
    found: list[dict[str, Any]] = record["checkpoints"]
    return found


def until_checkpoint(process: subprocess.Popen[str], step: int, attempt: int = 1) -> list[dict[str, Any]]:
    """The events up to the first report of a checkpoint at `step` or later, taken in this attempt."""
    assert process.stdout is not None
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        stored = events[-1].get("progress", {}).get("checkpoint")
        if stored and stored["step"] >= step and events[-1]["attempt"] == attempt:
            return events
    raise AssertionError(f"no checkpoint came: {events[-3:]}")


def pod_of(launcher: int, replica: int) -> psutil.Process:
    """The process that plays the pod of a replica."""
    ranks = {rank.pid for rank in ranks_of(launcher)}
    pods = [process for process in psutil.Process(launcher).children() if process.pid not in ranks]
    return next(process for process in pods if process.environ().get("CROSSCLOUD_REPLICA") == str(replica))


def ranks_of_replica(launcher: int, replica: int) -> list[psutil.Process]:
    below = {process.pid for process in family(pod_of(launcher, replica).pid)}
    return [rank for rank in ranks_of(launcher) if rank.pid in below]
