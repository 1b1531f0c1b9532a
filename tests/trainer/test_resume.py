"""Jobs that are killed or told to end go on from a checkpoint: to the bit, or at another layout (C59, C61, C63)."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trainer.jobs import TRAINER, finished, manifest, ranks_of, start_local, written

from crosscloud_trainer.contract import ExitCode

ROUND = re.compile(r"^\[rank 0\] round (\d+) applied: digest ([0-9a-f]{16})", re.MULTILINE)
TOP_K = {"innerSteps": 4, "codec": "TopK"}
ALL_REDUCE = {"algorithm": "AllReduce", "codec": "Int8"}


@dataclass(frozen=True)
class Run:
    """A local run that has ended."""

    code: int
    events: list[dict[str, Any]]
    out: Path

    @property
    def end(self) -> dict[str, Any]:
        return self.events[-1]

    def log(self, attempt: int, replica: int = 0) -> str:
        return (self.out / "logs" / f"attempt-{attempt}" / f"replica-{replica}.log").read_text()

    def digests(self, attempt: int) -> dict[int, str]:
        return {int(number): digest for number, digest in ROUND.findall(self.log(attempt))}

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """As the launcher remembers them, newest first."""
        found: list[dict[str, Any]] = json.loads((self.out / "job.json").read_text())["checkpoints"]
        return found

    def chunks(self, number: int = 0) -> list[str]:
        """SHA-256 of all chunks of a checkpoint: weights, optimizer, outer state, residuals, replica by replica."""
        found = json.loads(Path(self.checkpoints[number]["uri"]).read_text())
        return [chunk["sha256"] for part in found["replicas"] for rank in part["ranks"] for chunk in rank["chunks"]]


def job(folder: Path, **spec: Any) -> Path:
    """48 steps, in windows of 4, with a checkpoint after each; of dropout, so that random numbers count."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1}
    training = {"tokens": 12288, "model": {"config": gpt2}, **spec.pop("training", {})}
    folder.mkdir(exist_ok=True)
    return written(folder, manifest(training=training, checkpoint={"everySteps": 4}, **spec))


def resumed(path: Path, out: Path) -> subprocess.Popen[str]:
    return start_local(path, out, "--resume")


def until_checkpoint(process: subprocess.Popen[str], step: int) -> list[dict[str, Any]]:
    """The events up to the first report of a checkpoint at `step` or later."""
    assert process.stdout is not None
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        stored = events[-1].get("progress", {}).get("checkpoint")
        if stored and stored["step"] >= step:
            return events
    raise AssertionError(f"no checkpoint came: {events[-3:]}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same two jobs, each in one go and broken off: DiLoCo with TopK by SIGKILL of a rank, AllReduce by SIGTERM."""
    folder = tmp_path_factory.mktemp("runs")
    kill, end = job(folder / "kill", sync=TOP_K), job(folder / "end", sync=ALL_REDUCE)
    whole = {name: start_local(path, folder / name / "whole") for name, path in (("kill", kill), ("end", end))}
    found = {f"{name} whole": Run(*finished(process)[:2], folder / name / "whole") for name, process in whole.items()}
    processes = {name: start_local(path, folder / name / "cut") for name, path in (("kill", kill), ("end", end))}
    events = {name: until_checkpoint(process, 8) for name, process in processes.items()}
    random.choice(ranks_of(processes["kill"].pid)).send_signal(signal.SIGKILL)
    processes["end"].send_signal(signal.SIGTERM)
    for name, process in processes.items():
        code, rest, _ = finished(process)
        found[f"{name} cut"] = Run(code, [*events[name], *rest], folder / name / "cut")
    shutil.copytree(folder / "end" / "cut", folder / "end" / "stopped")
    found["end stopped"] = Run(found["end cut"].code, found["end cut"].events, folder / "end" / "stopped")
    code, rest, _ = finished(resumed(end, folder / "end" / "cut"))
    found["end resumed"] = Run(code, rest, folder / "end" / "cut")
    return found


def test_after_sigkill_the_next_attempt_goes_on_to_the_bit(runs: dict[str, Run]) -> None:
    whole, cut = runs["kill whole"], runs["kill cut"]
    assert (whole.code, cut.code) == (0, 0)
    failures = [event for event in cut.events if event["event"] == "failure"]
    assert ["was killed by SIGKILL" in failure["message"] for failure in failures] == [True]
    assert "resumed from" in cut.log(2)
    rest = cut.digests(2)
    assert min(rest) > 2
    assert rest == {number: digest for number, digest in whole.digests(1).items() if number in rest}
    assert (cut.end["last_loss"], cut.end["validation_loss"]) == (whole.end["last_loss"], whole.end["validation_loss"])
    assert (cut.end["steps"], cut.end["tokens"]) == (48, 12288)
    assert cut.chunks() == whole.chunks()


def test_sigterm_leaves_a_checkpoint_from_which_a_later_run_goes_on_to_the_bit(runs: dict[str, Run]) -> None:
    whole, cut, rest = runs["end whole"], runs["end stopped"], runs["end resumed"]
    assert (whole.code, cut.code, rest.code) == (0, ExitCode.TERMINATED, 0)
    step = cut.checkpoints[0]["step"]
    assert cut.end["message"] == f"interrupted: all processes have ended; --resume goes on after step {step}"
    told = [f"told to end: stopped after step {step}, with a checkpoint" in cut.log(1, replica) for replica in (0, 1)]
    assert told == [True, True]
    assert f": step {step}, round {step}" in rest.log(2)
    assert (rest.end["last_loss"], rest.end["validation_loss"]) == (
        whole.end["last_loss"],
        whole.end["validation_loss"],
    )
    assert rest.chunks() == whole.chunks()


def test_as_many_checkpoints_stay_as_the_manifest_says(runs: dict[str, Run]) -> None:
    for run in (runs["kill whole"], runs["kill cut"], runs["end resumed"]):
        stored = {str(path) for path in run.out.glob("attempt-*/home-*/step-*/manifest.json")}
        kept = {item["uri"] for item in run.checkpoints}
        assert len(kept) == 2
        assert kept <= stored
        assert len(stored) <= 5  # at the end some are there whose deletion wasn't acknowledged in time


def test_damage_is_told_and_another_layout_goes_on_from_the_checkpoint_before(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    whole, stopped = runs["end whole"], runs["end stopped"]
    out = tmp_path / "out"
    shutil.copytree(stopped.out, out)
    record = (out / "job.json").read_text().replace(str(runs["end cut"].out), str(out))
    (out / "job.json").write_text(record)
    newest, before = json.loads(record)["checkpoints"]
    chunk = next(Path(newest["uri"]).parent.glob("replica-0/*.safetensors"))
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    path = job(
        tmp_path, sync=ALL_REDUCE, replicas=1, replica={"gpusPerStage": 2, "zeroStage": 3}, training={"batchSize": 8}
    )
    code, events, err = finished(resumed(path, out))
    run = Run(code, events, out)
    assert (code, err) == (0, "")
    assert f"checkpoint {newest['uri']} can't be used: replica-0/rank-0-0.safetensors has" in run.log(2)
    assert f"resumed from {before['uri']}: step {before['step']}" in run.log(2)
    assert "residuals of replicas [1] are dropped" in run.log(2)
    # Other ranks draw other numbers for dropout, which is worth up to a percent over the steps that are left here.
    assert run.end["validation_loss"] == pytest.approx(whole.end["validation_loss"], rel=0.02)


def test_where_no_checkpoint_is_whole_the_job_ends_with_the_reason(runs: dict[str, Run], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(runs["end stopped"].out, out)
    record = (out / "job.json").read_text().replace(str(runs["end cut"].out), str(out))
    (out / "job.json").write_text(record)
    for item in json.loads(record)["checkpoints"]:
        Path(item["uri"]).unlink()
    code, events, _ = finished(resumed(job(tmp_path, sync=ALL_REDUCE, replicas=1), out))
    assert code == ExitCode.STORAGE_REFUSED
    assert events[-1]["last"] is True
    assert "none of the job's checkpoints can be used" in events[-1]["message"]
    assert events[-1]["message"].count("its manifest isn't there") == 2


def test_a_disk_that_is_full_ends_the_job_in_the_end_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out"
    for folder in (disk, out):
        folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        path = job(tmp_path, replicas=1, storage={"uri": str(disk)}, training={"tokens": "1M"})
        command = [*TRAINER, "local", str(path), "--json"]
        process = subprocess.Popen(command, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until_checkpoint(process, 4)
        (disk / "ballast").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - 4096))
        code, events, _ = finished(process)
        run = Run(code, events, out / "crosscloud-runs" / "small")
        assert code == ExitCode.STORAGE_REFUSED
        assert events[-1]["last"] is True
        assert "No space left on device; make room there" in events[-1]["message"]
        assert run.log(1).count("is not stored, training goes on") == 3
        stored = {str(path) for path in disk.glob("attempt-1/home-1/step-*/manifest.json")}
        kept = [item["uri"] for item in run.checkpoints]
        assert set(kept) <= stored  # and perhaps an older one, whose deletion wasn't acknowledged yet
        assert len(stored) <= len(kept) + 1
        assert len(run.chunks()) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    process = resumed(job(tmp_path), tmp_path / "none")
    code, events, err = finished(process)
    assert (code, events) == (ExitCode.INVALID_INPUT, [])
    assert "--resume" in err
    assert "leave --resume out to begin anew" in err
