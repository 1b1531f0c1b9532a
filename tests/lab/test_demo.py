"""What the demo makes of a job's metrics and status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from crosscloud_lab.demo.follow import Sample, Story, line, view
from crosscloud_lab.demo.plot import counted, draw, rounds, validations
from crosscloud_lab.demo.summary import mean_speed
from crosscloud_lab.demo.trainers import Progress, combine, of_status, parse

METRICS = """\
# HELP crosscloud_trainer_step Inner steps done
# TYPE crosscloud_trainer_step gauge
crosscloud_trainer_step{{replica="{replica}",training_job="tiny"}} {step}.0
crosscloud_trainer_steps{{replica="{replica}",training_job="tiny"}} 220.0
crosscloud_trainer_loss{{replica="{replica}",training_job="tiny"}} {loss}
crosscloud_trainer_tokens_total{{replica="{replica}",training_job="tiny"}} 4.096e+03
crosscloud_trainer_dense_bytes_total{{replica="{replica}",training_job="tiny"}} 1e+06
crosscloud_trainer_seconds_total{{activity="compute",replica="{replica}",training_job="tiny"}} 3.5
"""


def story(reason: str, message: str, *samples: Sample, **progress: Any) -> Story:
    condition = {"type": "Running", "reason": reason, "message": message}
    status = {"conditions": [condition], "progress": progress, "replicaStatuses": [], "plan": []}
    return Story(
        {"spec": {"sync": {"innerSteps": 20}, "training": {"evaluateEvery": 20}}, "status": status}, list(samples)
    )


def sample(seconds: float, step: int, loss: float | None = 3.0, validation: float | None = None) -> Sample:
    return Sample(seconds, Progress(step, 0, step * 100, step * 1000, loss, validation), step * 10)


def shown(drawn: Any) -> str:
    console = Console(width=130)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()


def test_metrics_of_all_replicas_make_one_progress() -> None:
    replicas = [
        parse(METRICS.format(replica=0, step=41, loss=2.5)),
        parse(METRICS.format(replica=1, step=43, loss=2.0)),
    ]
    assert combine(replicas) == Progress(41, 0, 8192, 2_000_000, 2.25, None)
    assert combine([replicas[0], {}]) is None, "one doesn't tell its step yet"
    assert combine([]) is None


def test_a_status_makes_the_same_progress() -> None:
    told = {"step": 20, "round": 1, "tokens": 81920, "denseBytes": 5, "loss": "3.4172", "validationLoss": "3.1"}
    assert of_status({"progress": told}) == Progress(20, 1, 81920, 5, 3.4172, 3.1)
    assert of_status({}) == Progress(0, 0, 0, 0, None, None)


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("Starting", "attempt 1: trainers are starting", "imports torch"),
        ("Starting", "r0-s0-n0: ImagePullBackOff", "ImagePullBackOff"),
        ("Training", "attempt 1: 2 replica(s) are training", "first inner step is under way"),
        ("Waiting", "no room in east", "no room in east"),
    ],
)
def test_before_the_first_step_the_demo_says_what_it_waits_for(reason: str, message: str, said: str) -> None:
    waits = story(reason, message, sample(9, 0, loss=None), totalSteps=0)
    assert said in line(waits)
    assert said in shown(view(waits))
    assert "0/0" not in line(waits) + shown(view(waits))


def test_while_it_trains_the_demo_tells_step_loss_and_bytes() -> None:
    trains = story("Training", "", sample(1, 1), sample(9, 40, 2.5, 2.6), totalSteps=220, tokensPerSecond=8000)
    assert "step 40/220" in line(trains)
    assert "loss 2.500  8000 tokens/s" in line(trains)
    assert "40/220 steps, loss 2.500, validation 2.600" in shown(view(trains))
    assert mean_speed(trains) == (4000 - 100) / 8


def test_rounds_are_found_where_they_were_seen_first_and_evaluations_once_all_replicas_have_told() -> None:
    seen = [sample(1, 5), sample(2, 21, validation=3.1), sample(3, 39, validation=3.1), sample(4, 40, validation=2.9)]
    seen.append(sample(5, 41, validation=2.8))
    assert [item.seconds for item in rounds(seen, 20)] == [2, 4]
    assert validations(seen, 20) == [(20, 3.1), (40, 2.8)]


def test_bytes_in_fp32_stand_where_replicas_have_counted_them() -> None:
    seen = [sample(second, step) for second, step in ((1, 0), (2, 20), (3, 20), (4, 40), (5, 40))]
    once = seen[1].progress.dense_bytes
    assert counted(seen) == [(2, once), (4, 2 * once)]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    trained = story("Succeeded", "", *(sample(second, 3 * second) for second in range(70)))
    assert draw(trained, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
