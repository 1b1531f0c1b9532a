"""What a person sees of a local run, made from reports alone."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from trainer.jobs import manifest, written

from crosscloud_trainer.contract import REPORT_VERSION, Activity, Completion, Outcome, Progress, Report
from crosscloud_trainer.launcher.display import LiveDisplay, render, sparkline, status_line, summary_lines
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.state import RunState, Summary


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    made = RunState(read_manifest(written(tmp_path, manifest())), tmp_path)
    made.next_attempt()
    return made


def report(replica: int, sequence: int, **progress: object) -> Report:
    values = {"step": sequence, "total_steps": 8, "round": sequence // 4, "tokens": 100 * sequence, **progress}
    return Report(
        api_version=REPORT_VERSION,
        attempt=1,
        home=1,
        term=1,
        view=1,
        replica=replica,
        incarnation=1,
        sequence=sequence,
        time="2026-01-01T00:00:00Z",
        activity=Activity.TRAINING,
        progress=Progress(**values),  # type: ignore[arg-type]
    )


def shown(state: RunState) -> str:
    console = Console(file=StringIO(), width=120, force_terminal=False)
    console.print(render(state, 120))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_before_the_first_report_all_replicas_are_starting(state: RunState) -> None:
    assert status_line(state).startswith("replica 0: starting; replica 1: starting")
    assert shown(state).count("0/?") == 2


def test_what_takes_time_before_the_first_step_is_said(state: RunState) -> None:
    loading = replace(report(0, 1, step=0), activity=Activity.STARTING, detail="loading torch and DeepSpeed")
    state.see(0, loading)
    assert status_line(state) == "replica 0: starting: loading torch and DeepSpeed; replica 1: starting"
    assert "starting: loading torch and DeepSpeed" in shown(state)


def test_the_last_line_and_the_summary_tell_the_same_losses(state: RunState) -> None:
    for replica, (loss, validation) in enumerate([(2.0, 2.4), (3.0, 2.6)]):
        state.see(replica, report(replica, 7, loss=9.0, first_loss=5.0))
        state.see(replica, report(replica, 8, loss=loss, first_loss=5.0, validation_loss=validation))
    assert "5.000 → 2.500, validation 2.500" in shown(state)
    assert state.curve[-1] == (8, 2.5)
    told = "\n".join(summary_lines(Summary.of(state)))
    assert "loss        5.000 → 2.500" in told
    assert "validation  2.500" in told


def test_bytes_are_shown_beside_what_dense_fp32_would_have_cost(state: RunState) -> None:
    for replica in (0, 1):
        state.see(
            replica,
            report(replica, 1, loss=5.0, wan_bytes_sent=2_000_000, wan_bytes_received=7, dense_bytes=80_000_000),
        )
    assert "WAN 4.0 MB sent; dense fp32: 160.0 MB (40x)" in status_line(state)


def test_digests_are_compared_in_the_last_round_that_all_have_told_of(state: RunState) -> None:
    state.see(0, report(0, 4, digest="aa"))
    assert state.agreement() is None
    state.see(0, report(0, 8, digest="bb"))
    state.see(1, report(1, 4, digest="aa"))
    assert state.agreement() == (1, True)
    state.see(1, report(1, 8, digest="cc"))
    assert state.agreement() == (2, False)
    assert "digests DIFFERENT (round 2)" in shown(state)


def test_old_reports_and_those_of_other_attempts_change_nothing(state: RunState) -> None:
    state.see(0, report(0, 5, loss=3.0))
    state.see(0, report(0, 4, loss=9.0))
    state.see(0, replace(report(0, 6, loss=9.0), attempt=2))
    assert state.reports[0].progress.loss == 3.0
    state.next_attempt()
    assert state.reports == {}


def test_a_replica_that_waits_says_for_whom(state: RunState) -> None:
    state.see(0, replace(report(0, 4, loss=2.0, waiting_for=(1,)), activity=Activity.WAITING))
    assert "waiting for replica 1" in shown(state)
    assert "step 4/8, loss 2.000, waiting for replica 1; " in status_line(state)
    state.see(0, replace(report(0, 5, loss=2.0, waiting_for_stages=(1, 2)), activity=Activity.WAITING))
    assert "waiting for its own stage 1, 2; " in status_line(state)


def test_the_curve_keeps_the_whole_run_in_bounded_room(state: RunState) -> None:
    for step in range(1, 5000):
        state.see(0, report(0, step, loss=10.0 - step / 1000))
    assert state.curve[0] == (1, 9.999)
    assert state.curve[-1][0] == 4999
    assert len(state.curve) <= 400


def test_the_summary_has_the_way_to_try_the_result(state: RunState) -> None:
    done = Completion(
        outcome=Outcome.SUCCEEDED, exit_code=0, message="", result_uri="/x/result", checkpoint_uri="/x/manifest.json"
    )
    for replica in (0, 1):
        last = report(replica, 8, loss=2.0, first_loss=5.0, validation_loss=2.5, digest="aa")
        best = replace(last.progress, best_step=6 + replica, best_validation_loss=2.25 + replica)
        last = replace(last, progress=best)
        state.see(replica, replace(last, completion=done))
    told = "\n".join(summary_lines(Summary.of(state)))
    assert "loss        5.000 → 2.000" in told
    assert "validation  2.500, perplexity 12.18 " in told
    assert "best        2.250 after step 6" in told
    assert "digests     equal in all replicas after 2 rounds" in told
    assert "crosscloud-trainer generate /x/result --prompt" in told


def test_what_is_printed_to_be_pasted_stands_on_one_line_of_a_narrow_terminal(state: RunState) -> None:
    console = Console(file=StringIO(), width=60, force_terminal=True)
    with LiveDisplay(console) as display:
        display.progress(state)
        display.finish(replace(Summary.of(state), result="/x/[a] folder/result", checkpoint="/x/manifest.json"))
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line for line in printed if "generate /x/[a] folder/result --prompt 'def ' --tokens 200" in line]


def test_why_a_run_has_ended_stands_below_its_last_picture(state: RunState) -> None:
    console = Console(file=StringIO(), width=60, force_terminal=True)
    with LiveDisplay(console) as display:
        display.progress(state)
        display.failure(state, "rank 0 of replica 1 was killed, and its last words are longer than a line", last=True)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.rindex("╯") < printed.index(
        "error: attempt 1 ended: rank 0 of replica 1 was killed, and its last words"
    )


def test_the_summary_of_a_run_that_went_on_says_which_numbers_are_of_its_last_attempt(state: RunState) -> None:
    state.see(0, report(0, 8, loss=2.0, first_loss=5.0, wan_bytes_sent=2_000_000, dense_bytes=80_000_000))
    first, loss, wan, *_ = summary_lines(replace(Summary.of(state), attempts=3, seconds=61))
    assert first.endswith(": 8 steps, 800 tokens, attempt 3 took 1:01")
    assert "(its first step's → mean of the last 10" in loss
    assert "2.0 MB sent by this attempt; dense fp32 at every step: 80.0 MB" in wan


def test_the_best_checkpoint_is_told_where_it_is_not_the_last_one(state: RunState) -> None:
    last, best = "s3://models/x/step-8/manifest.json", "s3://models/x/step-4/manifest.json"
    summary = replace(Summary.of(state), result="s3://models/x/result", checkpoint=last, best_checkpoint=best)
    told = summary_lines(summary)
    assert f"checkpoint  {last}" in told
    assert f"best one    {best} (the lowest validation loss)" in told
    assert not [line for line in told if line.startswith("try")]  # `generate` takes a folder
    assert not [line for line in summary_lines(replace(summary, best_checkpoint=last)) if line.startswith("best")]


def test_a_path_on_a_terminal_is_shown_as_it_is(state: RunState) -> None:
    out = StringIO()
    summary = replace(Summary.of(state), result="/runs[red]/result[/x]", checkpoint="/runs[red]/manifest.json")
    LiveDisplay(Console(file=out, width=200, highlight=False, force_terminal=True)).finish(summary)
    assert "result      /runs[red]/result[/x]\n" in out.getvalue()


def test_a_sparkline_runs_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3], 8) == "▁▁▁"
    assert len(sparkline(list(range(1000)), 60)) <= 60
