"""Reports, status files, metrics and the counters behind them."""

from __future__ import annotations

import math
import threading
import time
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from trainer.jobs import manifest, record, wait_for, written

from crosscloud_trainer import metrics
from crosscloud_trainer.contract import (
    Acknowledged,
    Activity,
    Completion,
    Outcome,
    Progress,
    Report,
    StoredCheckpoint,
    read_json,
)
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.journal import KINDS, Journal, Wan, wan_of_vector, wan_vector
from crosscloud_trainer.launcher.attempt import LocalJob, free_ports
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.record import JobRecord
from crosscloud_trainer.reporting import Identity, Reporter, Stall, Status, StatusFile, read_status

NEVER = lambda: False  # noqa: E731 - a constant function
DONE = Completion(outcome=Outcome.SUCCEEDED, exit_code=0, message="training has ended")


class Recorder:
    """A sink that keeps what it gets, and fails as often as it is told."""

    def __init__(self, interval: float, failures: int = 0) -> None:
        self.interval = interval
        self.failures = failures
        self.reports: list[Report] = []

    def send(self, text: str) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the API server doesn't answer")
        self.reports.append(read_json(Report, text))


def status(step: int, activity: Activity = Activity.TRAINING) -> Status:
    return Status(home=1, term=3, activity=activity, progress=Progress(step=step, total_steps=9, round=0, tokens=step))


def test_a_report_carries_attempt_home_incarnation_and_a_growing_number() -> None:
    sink = Recorder(interval=0)
    reporter = Reporter(sink, Identity(attempt=2, replica=1, incarnation=4), status(0), print)
    for step in range(1, 4):
        reporter.offer(status(step))
        wait_for(lambda step=step: sink.reports and sink.reports[-1].progress.step == step, "the report of a step")
    assert reporter.complete(DONE, NEVER)
    ranks = [report.rank for report in sink.reports]
    assert ranks == sorted(set(ranks))
    assert {report.rank[:3] for report in sink.reports} == {(2, 1, 4)}
    assert {report.replica for report in sink.reports} == {1}
    assert sink.reports[-1].completion == DONE
    assert sink.reports[-1].activity is Activity.ENDED
    assert sink.reports[-1].progress.step == 3


def test_between_two_reports_of_one_activity_the_interval_passes_but_a_change_of_activity_is_told_at_once() -> None:
    sink = Recorder(interval=3600)
    reporter = Reporter(sink, Identity(1, 0, 1), status(0, Activity.STARTING), print)
    wait_for(lambda: len(sink.reports) == 1, "the first report")
    reporter.offer(status(1))
    wait_for(lambda: len(sink.reports) == 2, "the change of activity")
    for step in range(2, 50):
        reporter.offer(status(step))
    reporter.offer(status(50, Activity.WAITING))
    wait_for(lambda: len(sink.reports) == 3, "the change of activity")
    reporter.complete(DONE, NEVER)
    assert [report.progress.step for report in sink.reports] == [0, 1, 50, 50]
    assert [report.activity.value for report in sink.reports] == ["Starting", "Training", "Waiting", "Ended"]


def test_a_completion_is_delivered_however_often_the_sink_fails_first() -> None:
    sink = Recorder(interval=0, failures=3)
    said: list[str] = []
    reporter = Reporter(sink, Identity(1, 0, 1), status(0), said.append)
    assert reporter.complete(DONE, NEVER)
    assert sink.reports[-1].completion == DONE
    assert said == ["the report can't be written, trying again: the API server doesn't answer"]


def test_a_completion_that_cannot_be_delivered_is_given_up_when_it_is_said_so() -> None:
    reporter = Reporter(Recorder(interval=0, failures=10**9), Identity(1, 0, 1), status(0), print)
    gone = threading.Event()
    threading.Timer(0.3, gone.set).start()
    assert not reporter.complete(DONE, gone.is_set)


def test_the_status_file_follows_what_changes_while_the_training_thread_waits(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    waiting = threading.Event()

    def live(now: Status) -> Status:
        return replace(now, activity=Activity.WAITING) if waiting.is_set() else now

    file = StatusFile(path, status(0), live)
    file.update(progress=status(5).progress)
    wait_for(lambda: (found := read_status(path)) and found.progress.step == 5, "the step")
    waiting.set()
    wait_for(lambda: (found := read_status(path)) and found.activity is Activity.WAITING, "the waiting")
    file.close()
    assert read_status(tmp_path / "none") is None


# Waiting


def test_a_wait_is_told_after_ten_seconds_in_which_no_byte_has_moved_and_its_time_stays_the_same() -> None:
    stall = Stall(10)
    assert stall.since(100.0, 5, 109.9) is None
    assert [stall.since(100.0, 5, now) for now in (110.0, 110.2, 500.0)] == [100.0, 100.0, 100.0]
    assert stall.since(None, 5, 500.2) is None
    assert stall.since(500.4, 5, 510.0) is None  # the next wait starts anew


def test_a_round_on_a_slow_link_is_not_told_as_waiting_while_bytes_arrive() -> None:
    stall = Stall(10)
    assert [stall.since(0.0, now // 5, float(now)) for now in range(100)] == [None] * 100
    assert [stall.since(0.0, 19, now) for now in (104.9, 105.0, 200.0)] == [None, 95.0, 95.0]
    assert stall.since(0.0, 20, 201.0) is None


# Counters


def test_the_journal_counts_what_happened_and_never_shows_a_loss_that_is_not_finite() -> None:
    journal = Journal(total_steps=3, dense_bytes_per_step=100.5)
    journal.step(4.0, tokens=10, skipped=0, seconds=1.0)
    journal.step(math.nan, tokens=10, skipped=1, seconds=2.0)
    journal.waited(2.0)
    assert journal.seconds["exchange"] == 0.0, "a counter never falls"
    journal.round(1, "ab" * 8, seconds=5.0)
    journal.settled(1)
    journal.traffic({1: Wan({"payload": 7, "result": 5}, {"payload": 3, "overhead": 1})})
    journal.validation(2, math.inf)
    found = journal.progress
    assert (found.step, found.tokens, found.loss, found.first_loss, found.skipped_steps) == (2, 20, 4.0, 4.0, 1)
    assert (found.wan_bytes_sent, found.wan_bytes_received, found.dense_bytes) == (12, 4, 201)
    assert {(part.replica, part.kind): (part.sent, part.received) for part in found.wan} == {
        (1, "payload"): (7, 3),
        (1, "result"): (5, 0),
        (1, "activation"): (0, 0),
        (1, "overhead"): (0, 1),
    }
    assert (found.round, found.digest, found.validation_loss) == (1, "ab" * 8, None)
    assert journal.seconds == {"compute": 3.0, "exchange": 3.0, "waiting": 2.0, "bubble": 0.0}
    journal.step(3.0, tokens=10, skipped=1, seconds=4.0, exchange_seconds=0.5, bubble_seconds=1.5)
    assert journal.progress.dense_bytes == 201, "up to the step whose traffic was counted, or their ratio would jump"
    assert journal.progress.seconds == {"compute": 5.0, "exchange": 3.5, "waiting": 2.0, "bubble": 1.5}


def test_what_is_not_saved_counts_from_the_last_checkpoint_or_from_what_the_attempt_began_with() -> None:
    journal = Journal(total_steps=30, dense_bytes_per_step=1)
    began = journal.progress.saved_at
    journal.resume(Progress(step=10, total_steps=20, round=2, tokens=100))
    assert (journal.progress.unsaved_steps, journal.progress.saved_at) == (0, began)
    for _ in range(5):
        journal.step(1.0, tokens=1, skipped=0, seconds=1.0)
    assert journal.progress.unsaved_steps == 5
    before = datetime.now(UTC)
    journal.checkpointed(StoredCheckpoint("s3://models/x", "0" * 64, 13))
    assert journal.progress.unsaved_steps == 2
    assert abs((datetime.fromisoformat(journal.progress.saved_at or "") - before).total_seconds()) < 60


def test_the_best_evaluation_is_remembered_with_its_step() -> None:
    journal = Journal(total_steps=30, dense_bytes_per_step=1)
    for step, loss in ((5, 3.0), (10, 2.0), (15, math.nan), (20, 2.5)):
        journal.validation(step, loss)
    found = journal.progress
    assert (found.validation_step, found.validation_loss, found.perplexity) == (20, 2.5, pytest.approx(12.182494))
    assert (found.best_step, found.best_validation_loss) == (10, 2.0)
    journal.validation(25, 2000.0)
    assert math.isfinite(journal.progress.perplexity or math.inf)


def test_the_loss_is_the_mean_of_the_last_ten_steps() -> None:
    journal = Journal(total_steps=30, dense_bytes_per_step=1)
    for step in range(1, 25):
        journal.step(float(step), tokens=1, skipped=0, seconds=1.0)
    assert journal.progress.loss == sum(range(15, 25)) / 10
    assert journal.progress.first_loss == 1.0


def test_the_speed_is_that_of_the_last_fifty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal = Journal(total_steps=200, dense_bytes_per_step=1)
    told = []
    for step in range(1, 101):
        now += 4.0 if step <= 50 else 0.5
        journal.step(1.0, tokens=64, skipped=0, seconds=1.0)
        told.append(journal.progress.tokens_per_second)
    assert told[:50] == pytest.approx([16.0] * 50)
    assert told[-1] == pytest.approx(128.0)
    assert sorted(told[49:]) == told[49:]


def test_progress_speaks_of_the_last_round_that_the_whole_view_has_prepared() -> None:
    journal = Journal(total_steps=3, dense_bytes_per_step=1)
    told = []
    for settled, applied in enumerate(("a" * 16, "b" * 16, "c" * 16)):
        journal.round(settled + 1, applied, seconds=1.0)
        journal.settled(settled)
        told.append((journal.progress.round, journal.progress.digest))
    journal.settled(3)
    told.append((journal.progress.round, journal.progress.digest))
    assert told == [(0, None), (1, "a" * 16), (2, "b" * 16), (3, "c" * 16)]


Counts = st.dictionaries(st.sampled_from(KINDS), st.integers(0, 2**40))


@given(st.dictionaries(st.integers(0, 5), st.tuples(Counts, Counts)))
def test_traffic_goes_through_a_vector_of_numbers_unchanged(
    counts: dict[int, tuple[dict[str, int], dict[str, int]]],
) -> None:
    replicas = range(6)
    before = {replica: Wan(sent, received) for replica, (sent, received) in counts.items()}
    after = wan_of_vector(wan_vector(before, replicas), replicas)
    for replica in replicas:
        for kind in KINDS:
            assert after[replica].sent[kind] == before.get(replica, Wan()).sent.get(kind, 0)
            assert after[replica].received[kind] == before.get(replica, Wan()).received.get(kind, 0)


def test_metrics_are_served_with_one_prefix_and_the_journals_numbers(tmp_path: Path) -> None:
    found = read_manifest(written(tmp_path, manifest()))
    run = LocalJob(found, record(tmp_path), tmp_path, tmp_path, "/x")._run_document(3)
    journal = Journal(total_steps=8, dense_bytes_per_step=1000)
    journal.step(2.5, tokens=64, skipped=3, seconds=0.75, exchange_seconds=0.125, bubble_seconds=0.25)
    journal.waited(0.25)
    journal.round(1, "ab" * 8, seconds=0.5, skipped=True)
    journal.validation(1, 1.5)
    journal.residual_norm = 0.25
    journal.traffic({1: Wan({"payload": 70, "result": 50}, {"payload": 30})})
    journal.refusals = {"wrong certificate": 2}
    journal.mismatches = 1
    port = free_ports([1])[0][0]
    server = metrics.serve(journal, run, 0, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        server.close()
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    own = {"training_job": "small", "replica": "0"}

    def value(name: str, **labels: str) -> float:
        return samples["crosscloud_trainer_" + name, tuple(sorted({**own, **labels}.items()))]

    assert all(name.startswith("crosscloud_trainer_") for name, _ in samples)
    assert value("loss") == 2.5
    assert value("step") == 1
    assert value("steps") == 8
    assert value("validation_loss") == 1.5
    assert value("validation_perplexity") == pytest.approx(math.e**1.5)
    assert value("tokens_per_second") == pytest.approx(journal.progress.tokens_per_second)
    assert value("tokens_total") == 64
    assert value("dense_bytes_total") == 1000
    assert value("wan_sent_bytes_total", peer="1", kind="payload") == 70
    assert value("wan_received_bytes_total", peer="1", kind="payload") == 30
    assert value("seconds_total", activity="compute") == 0.375
    assert value("seconds_total", activity="exchange") == 0.375
    assert value("seconds_total", activity="waiting") == 0.25
    assert value("seconds_total", activity="bubble") == 0.25
    assert value("skipped_steps_total") == 3
    assert value("skipped_rounds_total") == 1
    assert value("digest_mismatches_total") == 1
    assert 0 <= value("checkpoint_age_seconds") < 600
    assert value("compression_ratio") == 1000 / 120
    assert value("residual_norm") == 0.25
    assert value("unsaved_steps") == 1
    assert value("link_refusals_total", reason="wrong certificate") == 2
    assert value("info", version=metrics.package_version(), attempt="3", incarnation="1") == 1


def test_a_metrics_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    found = read_manifest(written(tmp_path, manifest()))
    run = LocalJob(found, record(tmp_path), tmp_path, tmp_path, "/x")._run_document(1)
    journal = Journal(1, 1)
    port = free_ports([1])[0][0]
    server = metrics.serve(journal, run, 0, port)
    try:
        with pytest.raises(OSError, match="in use"):
            metrics.serve(journal, run, 0, port)
    finally:
        server.close()


def test_a_checkpoint_that_can_not_be_recorded_is_not_acknowledged_until_it_can(tmp_path: Path) -> None:
    kept, acknowledged = record(tmp_path), tmp_path / "checkpoints.json"
    stored = StoredCheckpoint("/x/attempt-1/home-1/step-4/manifest.json", "0" * 64, 4)
    progress = Progress(step=4, total_steps=8, round=1, tokens=4, checkpoint=stored)
    recorder = Recorder(interval=0.0)
    Reporter(recorder, Identity(1, 0, 1), Status(home=1, progress=progress), print).complete(DONE, NEVER)
    draft = tmp_path / ".job.json.part"
    draft.mkdir()  # as good as a full disk
    kept.see(recorder.reports, 2, acknowledged)
    assert (kept.checkpoints, acknowledged.exists()) == ((), False)
    draft.rmdir()
    kept.see(recorder.reports, 2, acknowledged)
    assert JobRecord.open(tmp_path, resume=True).checkpoints == (stored,)
    assert read_json(Acknowledged, acknowledged.read_bytes()).checkpoints == (stored,)


def test_a_run_that_could_go_on_is_not_overwritten_unless_one_says_so(tmp_path: Path) -> None:
    kept = record(tmp_path)
    kept.begin(1)
    JobRecord.open(tmp_path, resume=False)  # there is nothing to go on from
    stored = StoredCheckpoint("/x/attempt-1/home-1/step-4/manifest.json", "0" * 64, 4)
    progress = Progress(step=4, total_steps=8, round=1, tokens=4, checkpoint=stored)
    recorder = Recorder(interval=0.0)
    Reporter(recorder, Identity(1, 0, 1), Status(home=1, progress=progress), print).complete(DONE, NEVER)
    kept.see(recorder.reports, 2, tmp_path / "checkpoints.json")
    with pytest.raises(Failure, match="checkpoint of step 4; --resume goes on from there, --overwrite begins anew"):
        JobRecord.open(tmp_path, resume=False)
    assert JobRecord.open(tmp_path, resume=True).checkpoints == (stored,)
    assert JobRecord.open(tmp_path, resume=False, overwrite=True).checkpoints == ()
    kept.succeed()
    assert JobRecord.open(tmp_path, resume=False).checkpoints == ()
