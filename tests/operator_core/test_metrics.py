"""What the hub exports of a replica follows from its newest report."""

from __future__ import annotations

from typing import Any

from crosscloud_operator.metrics import _replica_families
from crosscloud_trainer.contract import Activity, Progress, Report

JOB = {"metadata": {"uid": "u", "namespace": "ml", "name": "tiny"}}


def samples(at: float = 0.0, **progress: Any) -> dict[tuple[str, str], float]:
    """(metric, activity) and value, of a job of one replica; the activity is empty where the metric has none."""
    known = Progress(step=30, total_steps=40, round=3, tokens=900, **progress)
    report = Report("report.crosscloud.dev/v1", 1, 1, 1, 1, 0, 1, 1, "2026-01-01T00:00:00Z", Activity.TRAINING, known)
    found = {}
    for family in _replica_families([JOB], {("u", 0): report}, now=at):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("namespace"), labels.pop("job"), labels.pop("replica")) == ("ml", "tiny", "0")
            found[sample.name, labels.get("activity", "")] = sample.value
    return found


def test_time_is_exported_by_activity() -> None:
    found = samples(compute_seconds=6.0, exchange_seconds=3.0, waiting_seconds=1.0, bubble_seconds=0.5)
    spent = {activity: value for (name, activity), value in found.items() if name == "crosscloud_job_seconds_total"}
    assert spent == {"compute": 6.0, "exchange": 3.0, "waiting": 1.0, "bubble": 0.5}


def test_steps_that_a_failure_would_cost_are_counted_from_the_last_checkpoint_or_from_the_start() -> None:
    assert samples()["crosscloud_job_unsaved_steps", ""] == 30
    assert samples(saved_step=20)["crosscloud_job_unsaved_steps", ""] == 10


def test_the_age_of_a_checkpoint_is_told_by_the_hubs_clock() -> None:
    assert ("crosscloud_job_checkpoint_age_seconds", "") not in samples()
    saved = samples(saved_at="1970-01-01T00:01:30.5Z", at=100.0)
    assert saved["crosscloud_job_checkpoint_age_seconds", ""] == 9.5


def test_digests_that_differ_are_counted() -> None:
    assert samples()["crosscloud_job_digest_mismatches_total", ""] == 0
    assert samples(digest_mismatches=1)["crosscloud_job_digest_mismatches_total", ""] == 1


def test_steps_and_rounds_that_came_to_nothing_are_counted() -> None:
    found = samples(skipped_steps=3, skipped_rounds=2)
    assert found["crosscloud_job_skipped_steps_total", ""] == 3
    assert found["crosscloud_job_skipped_rounds_total", ""] == 2


def test_a_residual_is_exported_once_there_is_one() -> None:
    assert ("crosscloud_job_residual_norm", "") not in samples()
    assert samples(residual_norm=0.25)["crosscloud_job_residual_norm", ""] == 0.25
