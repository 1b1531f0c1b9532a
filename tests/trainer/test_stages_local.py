"""Whole jobs on this machine whose replicas are cut into pipeline stages, each in a member of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.jobs import TINY_MODEL, finished, manifest, start_local, written
from transformers import AutoModelForCausalLM

UNTIED = {"config": {**TINY_MODEL, "num_hidden_layers": 3, "tie_word_embeddings": False}}
PROBE = torch.arange(24).remainder(259).view(2, 12)


def end_of(folder: Path, **spec: Any) -> dict[str, Any]:
    """The last event of a job, with its logits on a probe and the text of all logs."""
    document = manifest(**spec)
    document["spec"]["training"]["model"] = UNTIED
    code, events, err = finished(start_local(written(folder, document), folder / "out"))
    assert (code, err) == (0, "")
    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "result").eval()
    with torch.no_grad():
        logits = model(input_ids=PROBE).logits
    logs = {path.stem: path.read_text() for path in (folder / "out" / "logs" / "attempt-1").iterdir()}
    return {**events[-1], "logits": logits, "logs": logs}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One replica in three stages of two ranks each, which take one sequence at a time: each has two."""
    return end_of(tmp_path_factory.mktemp("cut"), replicas=1, replica={"stages": 3, "gpusPerStage": 2, "zeroStage": 2})


def test_a_replica_in_stages_ends_with_the_model_of_one_that_is_whole(cut: dict[str, Any], tmp_path: Path) -> None:
    whole = end_of(tmp_path, replicas=1, replica={"gpusPerStage": 2, "zeroStage": 1}, training={"microBatchSize": 1})
    assert cut["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-5)
    assert cut["first_loss"] == pytest.approx(whole["first_loss"], rel=1e-5)
    torch.testing.assert_close(cut["logits"], whole["logits"], rtol=1e-3, atol=1e-4)
    assert cut["wan_bytes"] > 0 == whole["wan_bytes"]


def test_every_stage_has_a_pod_and_the_first_one_speaks_for_the_replica(cut: dict[str, Any]) -> None:
    assert sorted(cut["logs"]) == ["replica-0-0", "replica-0-1", "replica-0-2"]
    assert "step 24 of 24" in cut["logs"]["replica-0-0"]
    assert "step 24 of 24" not in cut["logs"]["replica-0-2"]
    assert "2 micro-batches in a step for 3 stages, which stand still by turns" in cut["logs"]["replica-0-0"]


def test_replicas_cut_into_unlike_stages_agree_to_the_bit_after_every_round(tmp_path: Path) -> None:
    end = end_of(
        tmp_path,
        replica={"stages": 2, "gpusPerStage": 1, "zeroStage": 1},
        replicaOverrides=[{"name": "whole", "index": 1, "stages": 1, "gpusPerStage": 2, "zeroStage": 3}],
        activations={"codec": "BF16"},
        sync={"innerSteps": 3, "codec": "Int8"},
    )
    assert end["digests_equal"] is True
    assert end["rounds"] == 4
    assert end["validation_loss"] < end["first_loss"]
    assert "stand still" not in end["logs"]["replica-0-0"]
