"""Builders of small jobs, and the processes that run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from crosscloud_trainer.launcher.record import JobRecord

TRAINER = [sys.executable, "-m", "crosscloud_trainer"]
DEADLINE_SECONDS = 600.0  # it only ends what hangs: a busy machine is several times slower

TINY_MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY_MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}


def manifest(**spec: Any) -> dict[str, Any]:
    """A valid manifest of a job of two replicas that takes a second once it has started."""
    training = {
        "model": {"config": {**TINY_MODEL, "tie_word_embeddings": True}},
        "data": {"train": ["stdlib:json/*.py", "stdlib:email/*.py"]},
        "tokens": 3072,
        "batchSize": 4,
        "sequenceLength": 32,
        "learningRate": 3e-3,
        "precision": "FP32",
        "evaluateEvery": 5,
    }
    made: dict[str, Any] = {
        "replicas": 2,
        "sync": {"innerSteps": 4},
        "training": training,
        "storage": {"uri": "s3://models/small"},
    }
    training.update(spec.pop("training", {}))
    made.update(spec)
    return {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "CrossCloudTrainingJob",
        "metadata": {"name": "small"},
        "spec": made,
    }


def written(folder: Path, document: Any) -> Path:
    path = folder / "job.yaml"
    with path.open("w") as out:
        YAML(typ="safe", pure=True).dump(document, out)
    return path


def record(folder: Path, uid: str = "00000000-0000-4000-8000-000000000001") -> JobRecord:
    """What the launcher remembers of a job that hasn't begun."""
    return JobRecord.new(folder, uid)


def start_local(
    path: Path, out: Path, *options: str, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`crosscloud-trainer local` with JSON events on its stdout; `environ` is added to its environment."""
    command = [*TRAINER, "local", str(path), "--json", "--out", str(out), *options]
    env = {**os.environ, **(environ or {})}
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=2**20,  # of several jobs at once one is read after the other, and none may stand still meanwhile
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, events, stderr. Of lines that were read before, `communicate` would lose what lies in buffers."""
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(DEADLINE_SECONDS, process.kill)
    timer.start()
    try:
        out, err = process.stdout.read(), process.stderr.read()
        process.wait()
    finally:
        timer.cancel()
        for pipe in (process.stdout, process.stderr):
            pipe.close()
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)
    return found


def family(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(pid: int) -> list[psutil.Process]:
    """The rank processes below a launcher."""

    def is_rank(process: psutil.Process) -> bool:
        try:
            return "crosscloud_trainer.train" in process.cmdline()
        except psutil.Error:
            return False

    return [process for process in family(pid) if is_rank(process)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [item for item in processes if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]
