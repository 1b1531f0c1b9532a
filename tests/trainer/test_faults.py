"""Storage that fails while a job trains: a clear end, and the checkpoint before stays good (C61)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer.disks import disk_of
from trainer.jobs import finished, manifest, start_local, written
from trainer.runs import Run, until_checkpoint
from trainer.s3 import s3_server

from crosscloud_trainer.contract import ExitCode


def job(folder: Path, name: str = "small", **spec: Any) -> Path:
    """One replica that would train for long, with a checkpoint after each window of 4 steps."""
    folder.mkdir(exist_ok=True)
    document = manifest(replicas=1, checkpoint={"everySteps": 4}, training={"tokens": "1M"}, **spec)
    document["metadata"]["name"] = name
    return written(folder, document)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with disk_of(tmp_path / "disk", "2m") as folder:
        yield folder


def fill(disk: Path) -> None:
    (disk / "ballast").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - 4096))


def protect(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


@pytest.mark.parametrize(
    ("harm", "told"),
    [(fill, "No space left on device; make room there"), (protect, "Read-only file system")],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_more_ends_the_job_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, disk: Path, harm: Any, told: str
) -> None:
    process = start_local(job(tmp_path), tmp_path / "out", "--storage", str(disk))
    events = until_checkpoint(process, 4)
    harm(disk)
    code, rest, _ = finished(process)
    run = Run(code, [*events, *rest], tmp_path / "out")
    assert (code, len(run.failures), run.end["last"]) == (ExitCode.STORAGE_REFUSED, 1, True)
    assert told in run.failures[0]
    assert run.log(1).count("is not stored, training goes on") == 3
    stored = {str(path) for path in disk.glob("attempt-1/home-1/step-*/manifest.json")}
    assert {item["uri"] for item in run.checkpoints} <= stored
    for number in range(len(run.checkpoints)):
        assert len(run.chunks(number)) == 1


def test_a_key_that_the_store_takes_no_longer_ends_the_job_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with s3_server(tmp_path) as server:
        address = server.bucket("models") + "/small"
        process = start_local(job(tmp_path), out, "--storage", address, environ=server.environment)
        events = until_checkpoint(process, 4)
    with s3_server(tmp_path, server.port, secret="another-secret"):
        code, rest, _ = finished(process)
    run = Run(code, [*events, *rest], out, server.path_of)
    assert code == ExitCode.STORAGE_REFUSED
    assert run.end["last"] is True
    assert "permission denied" in run.end["message"]
    assert "AWS_SECRET_ACCESS_KEY and what that key may do" in run.end["message"]
    assert "a-secret-of-the-test" not in json.dumps(run.events) + run.log(1)
    for number in range(len(run.checkpoints)):
        assert len(run.chunks(number)) == 1


def test_a_wrong_bucket_ends_the_job_before_any_rank_starts(tmp_path: Path) -> None:
    with s3_server(tmp_path) as server:
        path = job(tmp_path)
        process = start_local(path, tmp_path / "out", "--storage", "s3://none/x", environ=server.environment)
        run = Run(*finished(process)[:2], tmp_path / "out")
    assert (run.code, len(run.failures), run.end["last"]) == (ExitCode.STORAGE_REFUSED, 1, True)
    assert 'storage.uri: found "s3://none/x"; ' in run.failures[0]
    assert "check the bucket's name" in run.failures[0]
    assert "[rank 0]" not in run.log(1)


def test_of_two_jobs_in_one_storage_the_second_is_refused_and_one_that_is_replaced_ends(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    process = start_local(job(tmp_path / "a", "first"), tmp_path / "first", "--storage", str(storage))
    events = until_checkpoint(process, 4)
    other = start_local(job(tmp_path / "b", "second"), tmp_path / "second", "--storage", str(storage))
    second = Run(*finished(other)[:2], tmp_path / "second")
    assert (second.code, len(second.failures)) == (ExitCode.STORAGE_REFUSED, 1)
    assert "it belongs to job default/first, which has not succeeded" in second.failures[0]
    events += until_checkpoint(process, events[-1]["progress"]["checkpoint"]["step"] + 4)  # the first one goes on
    claim = json.loads((storage / "writer.json").read_text())
    (storage / "writer.json").write_text(json.dumps({**claim, "job": "default/second", "uid": "another"}))
    code, rest, _ = finished(process)
    first = Run(code, [*events, *rest], tmp_path / "first")
    assert "job default/second (another) writes there now" in first.failures[0]
    assert code == ExitCode.STORAGE_REFUSED
    assert "it belongs to job default/second, which has not succeeded" in first.end["message"]
    assert len(first.chunks()) == 1
