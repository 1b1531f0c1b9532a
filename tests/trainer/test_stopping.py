"""SIGTERM to one replica alone, as a drained node sends it: a checkpoint of all within its grace period, or a word on
which one stands.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer.jobs import finished, manifest, start_local, written
from trainer.runs import Run, pod_of, ranks_of_replica, until_checkpoint

from crosscloud_trainer.contract import ExitCode

GRACE = {"CROSSCLOUD_GRACE": "10"}  # seconds, of which the ranks have half
STEP_TOKENS = 2 * 4 * 32


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = {"tokens": 300 * STEP_TOKENS, "evaluateEvery": 1000, "precision": "BF16"}
    spec: dict[str, Any] = {"checkpoint": {"everySteps": 100}, "failurePolicy": {"attempts": 1}}
    spec |= {"replica": {"zeroStage": 0}, "replicaOverrides": [{"name": "other", "index": 1, "zeroStage": 2}]}
    sync = {"innerSteps": 4, "codec": "Int8"}
    return written(tmp_path_factory.mktemp("stopping"), manifest(training=training, sync=sync, **spec))


@pytest.fixture(scope="module")
def run(job: Path) -> Run:
    """In its first attempt replica 1 is told to end. In the second one it is again, while replica 0 stands still as if
    its window were longer than the grace period.
    """
    out = job.parent / "out"
    process = start_local(job, out, environ=GRACE)
    events = until_checkpoint(process, 100)
    pod_of(process.pid, 1).send_signal(signal.SIGTERM)
    events += until_checkpoint(process, 200, attempt=2)
    for rank in ranks_of_replica(process.pid, 0):
        rank.suspend()
    pod_of(process.pid, 1).send_signal(signal.SIGTERM)
    code, rest, _ = finished(process)
    return Run(code, [*events, *rest], out)


def test_all_replicas_stop_after_the_round_with_a_checkpoint_from_which_the_next_attempt_goes_on(run: Run) -> None:
    told = re.search(r"this replica was told to end: stopped after step (\d+), with a checkpoint", run.log(1, 1))
    assert told is not None
    assert f"replica 1 was told to end: stopped after step {told[1]}, with a checkpoint" in run.log(1, 0)
    assert f"/step-{told[1]}/manifest.json: step {told[1]}, " in run.log(2)


def test_where_the_window_outlasts_the_grace_period_it_says_which_checkpoint_stands(run: Run) -> None:
    words = (
        r"replica 1: rank 0: ended by SIGTERM: no checkpoint of all replicas was stored within 4 s; a longer "
        r"terminationGracePeriodSeconds or a shorter window would have left one; the checkpoint of step (\d+) stands"
    )
    told = re.fullmatch(words, run.failures[1])
    assert told is not None, run.failures
    assert int(told[1]) > 200
    assert f"/step-{told[1]}/manifest.json: step {told[1]}, " in run.log(3)


def test_what_is_learned_in_three_attempts_is_what_is_learned_in_one_to_the_bit(run: Run, job: Path) -> None:
    out = job.parent / "whole"
    whole = Run(*finished(start_local(job, out))[:2], out)
    assert (whole.code, whole.end["attempts"]) == (0, 1)
    assert run.chunks() == whole.chunks()


def test_neither_counts_against_the_attempts_of_the_job(run: Run) -> None:
    assert (run.code, run.end["steps"], run.end["attempts"]) == (ExitCode.SUCCEEDED, 300, 3)
