"""What the hub exports of a replica follows from its newest report."""

from __future__ import annotations

from typing import Any

from crosscloud_operator.metrics import _replica_families
from crosscloud_trainer.contract import Activity, Progress, Report, StoredCheckpoint

JOB = {"metadata": {"uid": "u", "namespace": "ml", "name": "tiny"}}


def samples(**progress: Any) -> dict[tuple[str, str], float]:
    """(metric, activity) and value, of a job of one replica; the activity is empty where the metric has none."""
    known = Progress(step=30, total_steps=40, round=3, tokens=900, **progress)
    report = Report("report.crosscloud.dev/v1", 1, 1, 1, 1, 0, 1, 1, "2026-01-01T00:00:00Z", Activity.TRAINING, known)
    found = {}
    for family in _replica_families([JOB], {("u", 0): report}, now=0.0):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("namespace"), labels.pop("job"), labels.pop("replica")) == ("ml", "tiny", "0")
            found[sample.name, labels.get("activity", "")] = sample.value
    return found


def test_time_is_exported_by_activity() -> None:
    found = samples(compute_seconds=6.0, exchange_seconds=3.0, waiting_seconds=1.0)
    spent = {activity: value for (name, activity), value in found.items() if name == "crosscloud_job_seconds_total"}
    assert spent == {"compute": 6.0, "exchange": 3.0, "waiting": 1.0}


def test_steps_that_a_failure_would_cost_are_counted_from_the_last_checkpoint_or_from_the_start() -> None:
    assert samples()["crosscloud_job_unsaved_steps", ""] == 30
    stored = StoredCheckpoint("s3://models/x", "0" * 64, 20)
    assert samples(checkpoint=stored)["crosscloud_job_unsaved_steps", ""] == 10


def test_a_residual_is_exported_once_there_is_one() -> None:
    assert ("crosscloud_job_residual_norm", "") not in samples()
    assert samples(residual_norm=0.25)["crosscloud_job_residual_norm", ""] == 0.25
