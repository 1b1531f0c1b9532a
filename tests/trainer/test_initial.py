"""Weights to begin with, from a folder or from another job; what doesn't fit is refused by its name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from trainer.jobs import TINY_MODEL, finished, manifest, start_local, written
from trainer.s3 import s3_server
from trainer.test_data import corpus_of
from transformers import PreTrainedModel

from crosscloud_trainer.contract import ExitCode, Model
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.initial import fetch
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.models.initial import described, load
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.result import write_result
from crosscloud_trainer.storage import Storage

TIED = {**TINY_MODEL, "tie_word_embeddings": True}


def asked(address: object = "there", **config: object) -> Model:
    """What a manifest says."""
    return Model(config={**TIED, **config}, init_from=str(address))


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
    load(blank, asked(job), tmp_path / "initial")
    expected = model(1).state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in blank.state_dict().items())


def test_weights_saved_in_halves_are_taken_in_full_precision(tmp_path: Path) -> None:
    model(1).to(torch.bfloat16).save_pretrained(tmp_path / "bf16", max_shard_size="20KB")
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 1
    fetch(str(tmp_path / "bf16"), tmp_path / "initial")
    blank = model(2)
    load(blank, asked(), tmp_path / "initial")
    assert all(
        torch.equal(a, b.to(torch.bfloat16).float())
        for a, b in zip(blank.parameters(), model(1).parameters(), strict=True)
    )


def begun(folder: Path, **config: object) -> PreTrainedModel:
    """A model of these settings with the weights in `folder`."""
    blank = model(2, **config)
    load(blank, asked(**config), folder)
    return blank


def test_every_parameter_that_differs_is_named_where_weights_lie_alone(job: Path, tmp_path: Path) -> None:
    fetch(str(job), tmp_path / "initial")
    (tmp_path / "initial" / "config.json").unlink()
    wider = refused(lambda: begun(tmp_path / "initial", intermediate_size=96))
    assert "model.layers.0.mlp.up_proj.weight: (64, 32) there, (96, 32) in the model" in wider
    assert len(wider.splitlines()) == 1 + 6  # three matrices in each of two layers
    deeper = refused(lambda: begun(tmp_path / "initial", num_hidden_layers=3))
    assert "model.layers.2.input_layernorm.weight: isn't there" in deeper
    assert deeper.endswith("and 1 more")
    flatter = refused(lambda: begun(tmp_path / "initial", num_hidden_layers=1))
    assert "model.layers.1.input_layernorm.weight: the model has no such parameter" in flatter


def test_every_setting_that_differs_is_named_where_a_configuration_lies_beside_the_weights(
    job: Path, tmp_path: Path
) -> None:
    fetch(str(job), tmp_path / "initial")
    told = refused(lambda: begun(tmp_path / "initial", intermediate_size=96, num_hidden_layers=3))
    first, *rest = told.splitlines()
    assert (
        'found "there"; is another model by its config.json; set it as there, or leave preset and config out' in first
    )
    assert rest == ["intermediate_size: 64 there, 96 in the model", "num_hidden_layers: 2 there, 3 in the model"]


def test_settings_that_no_shape_shows_are_compared_too(tmp_path: Path) -> None:
    model(1, rms_norm_eps=1e-3).save_pretrained(tmp_path / "base")
    fetch(str(tmp_path / "base"), tmp_path / "initial")
    heads = refused(lambda: begun(tmp_path / "initial", num_attention_heads=4, num_key_value_heads=4, head_dim=8))
    assert "num_attention_heads: 2 there, 4 in the model" in heads
    assert "rms_norm_eps: 0.001 there, 1e-06 in the model" in heads
    begun(tmp_path / "initial", rms_norm_eps=1e-5)  # said, so meant
    begun(tmp_path / "initial", rms_norm_eps=1e-3, max_position_embeddings=128, attention_dropout=0.1)


def test_another_architecture_is_one_line(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    build_model(Model(config=gpt2), 32, 1).save_pretrained(tmp_path / "base")
    fetch(str(tmp_path / "base"), tmp_path / "initial")
    told = refused(lambda: begun(tmp_path / "initial"))
    assert "is a gpt2, and the model is a llama; " in told
    assert len(told.splitlines()) == 1


def test_without_preset_and_config_the_model_is_the_one_of_the_weights(tmp_path: Path) -> None:
    rotary = {"rope_theta": 5e4, "rope_type": "default"}
    base = model(1, num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-3, rope_parameters=rotary)
    base.save_pretrained(tmp_path / "base")
    fetch(str(tmp_path / "base"), tmp_path / "initial")
    found = described(Model(init_from=str(tmp_path / "base")), tmp_path / "initial")
    blank = build_model(found, 32, 2)
    load(blank, found, tmp_path / "initial")
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(blank(tokens).logits, base(tokens).logits)
    assert described(asked(), tmp_path / "initial") == asked()


def test_weights_that_say_nothing_of_their_model_need_its_configuration(job: Path, tmp_path: Path) -> None:
    fetch(str(job), tmp_path / "initial")
    (tmp_path / "initial" / "config.json").write_text('{"model_type": "none"}')
    told = refused(lambda: described(Model(init_from=str(job)), tmp_path / "initial"))
    assert "has a config.json that transformers can't read: " in told
    (tmp_path / "initial" / "config.json").unlink()
    told = refused(lambda: described(Model(init_from=str(job)), tmp_path / "initial"))
    assert told.endswith("has no config.json beside its weights; say by preset or config which model they are of")


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


def test_the_first_loss_of_a_job_is_that_of_the_model_that_another_one_has_left_on_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which model it is lies beside the weights: the manifest has neither `preset` nor `config`."""
    given = model(1)
    with torch.no_grad():
        given.get_input_embeddings().weight.mul_(20)  # far from any that is drawn
    with s3_server(tmp_path) as server:
        address = server.bucket("models")
        with monkeypatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            write_result(Storage(f"{address}/first"), given, {"job": "first"})
        training = {"model": {"initFrom": f"{address}/first"}, "tokens": 256}
        training["data"] = {"train": ["stdlib:json/*.py"], "packing": "Stream"}
        path = written(tmp_path, manifest(training=training))
        process = start_local(path, tmp_path / "out", "--storage", f"{address}/next", environ=server.environment)
        code, events, _ = finished(process)
    assert code == 0, events[-1]
    spec, losses = read_manifest(path).spec.training, []
    for replica in (0, 1):
        corpus = corpus_of(spec, tmp_path / str(replica), [["a"], ["b"]], replica)
        rows = corpus.split(spec, [["a"], ["b"]], replica).of_replica(0)
        tokens = torch.from_numpy(corpus.take(rows)[0].astype("int64"))
        losses.append(float(given(input_ids=tokens, labels=tokens).loss.detach()))
    assert events[-1]["steps"] == 1
    assert events[-1]["first_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert events[-1]["first_loss"] > 6.0  # a model that knows nothing has ln 259 = 5.6
