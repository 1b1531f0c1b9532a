"""Weights to begin with, from a folder or from another job; what doesn't fit is refused by its name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from trainer.jobs import TINY_MODEL
from transformers import PreTrainedModel

from crosscloud_trainer.contract import ExitCode, Model
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.initial import fetch
from crosscloud_trainer.models.initial import load
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.result import write_result
from crosscloud_trainer.storage import Storage

TIED = {**TINY_MODEL, "tie_word_embeddings": True}


def model(seed: int, **config: object) -> PreTrainedModel:
    return build_model(Model(config={**TIED, **config}), 32, seed)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The storage of a job that has ended."""
    folder = tmp_path / "job"
    write_result(Storage(str(folder)), model(1), {"job": "x"})
    return folder


def refused(action: object) -> str:
    with pytest.raises(Failure) as caught:
        action()  # type: ignore[operator]
    assert caught.value.code in (ExitCode.INVALID_INPUT, ExitCode.STORAGE_REFUSED)
    assert str(caught.value).startswith("training.model.initFrom: found ")
    return str(caught.value)


@pytest.mark.parametrize("below", ["", "/result"])
def test_a_model_begins_with_the_weights_of_a_job_or_of_a_folder(job: Path, tmp_path: Path, below: str) -> None:
    fetch(f"{job}{below}", tmp_path / "initial")
    blank = model(2)
    load(blank, str(job), tmp_path / "initial")
    expected = model(1).state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in blank.state_dict().items())


def test_weights_saved_in_halves_are_taken_in_full_precision(tmp_path: Path) -> None:
    model(1).to(torch.bfloat16).save_pretrained(tmp_path / "bf16", max_shard_size="20KB")
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 1
    fetch(str(tmp_path / "bf16"), tmp_path / "initial")
    blank = model(2)
    load(blank, "there", tmp_path / "initial")
    assert all(
        torch.equal(a, b.to(torch.bfloat16).float())
        for a, b in zip(blank.parameters(), model(1).parameters(), strict=True)
    )


def test_every_parameter_that_differs_is_named(job: Path, tmp_path: Path) -> None:
    fetch(str(job), tmp_path / "initial")
    wider = refused(lambda: load(model(2, intermediate_size=96), str(job), tmp_path / "initial"))
    assert "model.layers.0.mlp.up_proj.weight: (64, 32) there, (96, 32) in the model" in wider
    assert len(wider.splitlines()) == 1 + 6  # three matrices in each of two layers
    deeper = refused(lambda: load(model(2, num_hidden_layers=3), str(job), tmp_path / "initial"))
    assert "model.layers.2.input_layernorm.weight: isn't there" in deeper
    assert deeper.endswith("and 1 more")
    flatter = refused(lambda: load(model(2, num_hidden_layers=1), str(job), tmp_path / "initial"))
    assert "model.layers.1.input_layernorm.weight: the model has no such parameter" in flatter


def test_what_holds_no_weights_is_refused(job: Path, tmp_path: Path) -> None:
    assert "must be a folder with .safetensors files" in refused(lambda: fetch(str(tmp_path / "none"), tmp_path / "i"))
    assert "no file system serves" in refused(lambda: fetch("foo://bar", tmp_path / "i"))
    weights = job / "result" / "model.safetensors"
    for part in (0.0, 0.5, 0.99):
        cut = tmp_path / f"cut-{part}"
        shutil.copytree(job, cut)
        data = weights.read_bytes()
        (cut / "result" / "model.safetensors").write_bytes(data[: int(len(data) * part)])
        told = refused(lambda cut=cut, part=part: fetch(str(cut), tmp_path / f"initial-{part}"))
        assert re.search(r"model.safetensors is no whole safetensors file$", told)
