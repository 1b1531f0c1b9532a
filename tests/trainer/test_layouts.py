"""A job that goes on with other numbers of replicas, ranks and stages and at other ZeRO stages learns as if one process
had trained all the time (C59).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer.jobs import TINY_MODEL, finished, manifest, start_local, written
from trainer.runs import Run, broken_off

SEQUENCES, LENGTH = 24, 32  # of the whole job at each step
STEPS = 2  # at each layout


def layout(replicas: int, gpus: int, zero: int, stages: int = 1) -> dict[str, Any]:
    return {"replicas": replicas, "replica": {"stages": stages, "gpusPerStage": gpus, "zeroStage": zero}}


LAYOUTS = {
    "2 replicas of 2 ranks, ZeRO 2": layout(2, 2, 2),
    "4 ranks, ZeRO 1": layout(1, 4, 1),
    "2 replicas of 1 rank, ZeRO 0": layout(2, 1, 0),
    "3 ranks, ZeRO 3": layout(1, 3, 3),
    "2 ranks, ZeRO 1": layout(1, 2, 1),
    "2 stages of 1 rank, ZeRO 2": layout(1, 1, 2, stages=2),
    "8 ranks, ZeRO 3": layout(1, 8, 3),
    "2 stages of 1 rank, ZeRO 1, beside a replica of 2 ranks, ZeRO 3": {
        **layout(2, 1, 1, stages=2),
        "replicaOverrides": [{"name": "whole", "index": 1, "stages": 1, "gpusPerStage": 2, "zeroStage": 3}],
    },
}


def job(folder: Path, steps: int, layout: dict[str, Any], **spec: Any) -> Path:
    """`steps` steps on the same sequences, whatever the layout: without dropout, and each predicts as many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    training = {
        "model": {"config": {**TINY_MODEL, "tie_word_embeddings": False}},
        "tokens": steps * SEQUENCES * LENGTH,
        "batchSize": SEQUENCES // layout["replicas"],
        "sequenceLength": LENGTH,
        "schedule": "Constant",
        "evaluateEvery": STEPS,
        "data": {"train": ["stdlib:json/*.py", "stdlib:email/*.py"], "packing": "Stream"},
    }
    spec = {"sync": {"algorithm": "AllReduce", "codec": "None"}, **layout, **spec}
    return written(folder, manifest(training=training, **spec))


def ran(path: Path, out: Path, *options: str) -> Run:
    code, events, err = finished(start_local(path, out, *options))
    assert (code, err) == (0, ""), events[-1]
    return Run(code, events, out)


def weights(run: Run) -> torch.Tensor:
    """All that the result holds."""
    found = load_file(Path(run.end["result"]) / "model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, from the first step to the last."""
    folder = tmp_path_factory.mktemp("alone")
    return ran(job(folder, STEPS * len(LAYOUTS), layout(1, 1, 0)), folder / "out")


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The same job, at each layout for two steps."""
    folder = tmp_path_factory.mktemp("changing")
    runs = []
    for number, places in enumerate(LAYOUTS.values(), start=1):
        path = job(folder / str(number), STEPS * number, places)
        runs.append(ran(path, folder / "out", *(["--resume"] if number > 1 else [])))
    return runs


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_goes_on_where_the_one_before_has_ended(alone: Run, changing: list[Run], name: str) -> None:
    number = list(LAYOUTS).index(name) + 1
    run = changing[number - 1]
    last = LAYOUTS[name]["replica"]["stages"]
    log = run.log(number) if last == 1 else run.log(number, "0-0")
    if number > 1:
        assert f"/step-{STEPS * (number - 1)}/manifest.json: step {STEPS * (number - 1)}, round" in log
    place: int | str = 0 if last == 1 else "0-0"
    assert run.validation(number, place)[STEPS * number] == pytest.approx(alone.validation(1)[STEPS * number], abs=2e-4)


def test_after_all_layouts_the_result_is_that_of_one_process(alone: Run, changing: list[Run]) -> None:
    end = changing[-1].end
    assert end["validation_loss"] == pytest.approx(alone.end["validation_loss"], rel=1e-5)
    difference = weights(changing[-1]) - weights(alone)
    assert float(difference.norm() / weights(alone).norm()) < 1e-5


def test_outer_state_and_residuals_go_on_in_replicas_of_other_ranks(tmp_path: Path) -> None:
    sync = {"innerSteps": 2, "codec": "Int8"}
    spec: dict[str, Any] = {"sync": sync, "checkpoint": {"everySteps": 4}}
    whole = ran(job(tmp_path / "whole", 8, layout(2, 1, 1), **spec), tmp_path / "whole" / "out")
    out = tmp_path / "changed"
    broken_off(whole, out, step=4)
    override = {"name": "other", "index": 1, "gpusPerStage": 1, "zeroStage": 0}
    path = job(tmp_path / "job", 8, layout(2, 2, 3), replicaOverrides=[override], **spec)
    changed = ran(path, out, "--resume")
    assert "/step-4/manifest.json: step 4, round 2" in changed.log(2)
    assert "begin at zero" not in changed.log(2)
    assert "are dropped" not in changed.log(2)
    assert changed.end["digests_equal"] is True
    assert changed.validation(2)[8] == pytest.approx(whole.validation(1)[8], abs=2e-4)
    difference = weights(changed) - weights(whole)
    assert float(difference.norm() / weights(whole).norm()) < 1e-5
