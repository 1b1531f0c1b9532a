"""Models by preset and by configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer.jobs import TINY_MODEL
from transformers import AutoModelForCausalLM

from crosscloud_trainer import checkpoint
from crosscloud_trainer.checkpoint import WEIGHTS, Checkpoint, CheckpointId, Part, Scope, Span
from crosscloud_trainer.contract import ExitCode, Model, ModelPreset
from crosscloud_trainer.data.tokenizer import byte_tokenizer
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.layout import Index
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.result import fill, write_result
from crosscloud_trainer.storage import Storage

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


ROBERTA = {"model_type": "roberta", "is_decoder": True, "hidden_size": 32, "intermediate_size": 64}
ROBERTA |= {"num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(("preset", "millions"), [(ModelPreset.TINY_LLAMA, 1.1), (ModelPreset.SMALL_LLAMA, 14.4)])
def test_a_preset_has_the_size_that_it_says(preset: ModelPreset, millions: float) -> None:
    model = build_model(Model(preset=preset), 128, 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(millions * 1e6, rel=0.05)


@pytest.mark.parametrize("config", [TINY_MODEL, GPT2])
def test_the_seed_alone_decides_the_weights(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    first = build_model(Model(config=config), 32, 5).state_dict()
    torch.manual_seed(2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    second = build_model(Model(config=config), 32, 5).state_dict()
    assert torch.equal(drawn, torch.rand(1))  # the caller's own random numbers go on as if nothing had been
    other = build_model(Model(config=config), 32, 6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def stored_weights(storage: Storage, parameters: dict[str, torch.nn.Parameter]) -> Checkpoint:
    """A checkpoint of these weights, in pieces of 700 elements."""
    which = CheckpointId("u", "d", attempt=1, home=1, step=1, round=1)
    index = Index.of({name: parameter.numel() for name, parameter in parameters.items()})
    parts = [
        Part(WEIGHTS, Scope.MODEL, Span(number, start, stop), parameters[item.name].detach().view(-1)[start:stop])
        for number, item in enumerate(index.parameters)
        for start in range(0, item.elements, 700)
        for stop in [min(start + 700, item.elements)]
    ]
    chunks = checkpoint.write_chunks(storage, which, 0, 0, index, parts)
    checkpoint.write_list(storage, which, 0, 0, {"chunks": chunks, "sections": {WEIGHTS: Scope.MODEL.value}})
    state = {"parameters": [[item.name, item.elements] for item in index.parameters]}
    return Checkpoint(checkpoint.write_manifest(storage, which, {0: 1}, state, lambda _: None))


@pytest.mark.parametrize("config", [TINY_MODEL, {**TINY_MODEL, "tie_word_embeddings": True}, GPT2])
def test_a_result_made_of_pieces_has_the_same_logits(config: dict[str, Any], tmp_path: Any) -> None:
    trained = build_model(Model(config=config), 32, 1).eval()
    blank = build_model(Model(config=config), 32, 2)
    fill(blank, stored_weights(Storage(str(tmp_path)), dict(trained.named_parameters())))
    write_result(Storage(str(tmp_path)), blank, {"job": "x"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    ids = torch.arange(32)[None] * 8
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained(ids).logits)


def test_weights_that_leave_a_hole_are_refused(tmp_path: Any) -> None:
    model = build_model(Model(config=TINY_MODEL), 32, 1)
    others = {name: p for name, p in model.named_parameters() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match="32 elements of the model have no value"):
        fill(model, stored_weights(Storage(str(tmp_path)), others))


def test_the_tokenizer_turns_any_text_into_its_bytes_and_back() -> None:
    tokenizer = byte_tokenizer(build_model(Model(config=TINY_MODEL), 32, 1).config)
    text = "tabs\tand\r\n<bo s> ünï \U0001f600 \x00\x7f"
    ids = tokenizer(text)["input_ids"]
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, 'training.model.config.model_type: found "lama"; must be a causal language model'),
        ({"model_type": "vit"}, 'training.model.config.model_type: found "vit"'),
        ({"model_type": "bert"}, "training.model.config.is_decoder: found null"),
        (
            {"model_type": "gpt2", "n_embed": 64},
            "training.model.config.n_embed: found 64; gpt2 has no such setting; it has n_embd",
        ),
        (
            {"model_type": "gpt2", "vocab_size": 100},
            "training.model.config.vocab_size: found 100; must be at least 259",
        ),
        (
            {"model_type": "gpt2", "n_positions": 16},
            "config.n_positions: found 16; must be at least training.sequenceLength (32)",
        ),
        ({**TINY_MODEL, "num_hidden_layers": 0}, "config.num_hidden_layers: found 0; must be at least 1"),
        ({**TINY_MODEL, "hidden_size": -32}, "config.hidden_size: found -32; must be at least 1"),
        ({"model_type": "gpt2", "n_head": 0}, "config.n_head: found 0; must be at least 1"),
        (
            {**ROBERTA, "max_position_embeddings": 259 + 31},
            "config.max_position_embeddings: found 290; must be at least 291: roberta counts positions from 259 on,",
        ),
        ({**ROBERTA, "max_position_embeddings": 34}, "config.max_position_embeddings: found 34; must be at least 291"),
        ({**TINY_MODEL, "hidden_size": 33}, "not a multiple of the number of attention heads"),
        ({**TINY_MODEL, "hidden_size": "wide"}, "training.model.config: found"),
        ({**TINY_MODEL, "hidden_act": "magic"}, "training.model.config: found"),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_message(config: dict[str, Any], words: str) -> None:
    with pytest.raises(Failure) as caught:
        build_model(Model(config=config), 32, 0)
    assert caught.value.code == ExitCode.INVALID_INPUT
    assert words in str(caught.value)


def test_all_that_is_wrong_with_a_configuration_is_told_at_once() -> None:
    config = {"model_type": "gpt2", "n_layer": 0, "n_head": -1, "n_embed": 64, "vocab_size": 7}
    with pytest.raises(Failure) as caught:
        build_model(Model(config=config), 32, 0)
    told = [line.partition(":")[0].rpartition(".")[2] for line in str(caught.value).splitlines()]
    assert sorted(told) == ["n_embed", "n_head", "n_layer", "vocab_size"]


def test_positions_that_are_counted_from_the_padding_on_suffice_when_they_are_as_many_as_that_takes() -> None:
    model = build_model(Model(config={**ROBERTA, "max_position_embeddings": 291}), 32, 0)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
