"""Models cut into stages, one after the other in this process, beside the whole model."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crosscloud_trainer.failures import Failure
from crosscloud_trainer.models.stages import Stage, layers_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MORE_SIZES = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rotary_dim": 4,
}
"""Of experts, and of kinds of attention that only some model types have."""
LARGEST = 2_000_000  # parameters


def model(kind, **more):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **more}), dtype=torch.float32)


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 61, (3, 16), generator=generator)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "glm4", "mistral", "gpt_neox"])
def test_stages_one_after_the_other_have_the_loss_and_the_gradients_of_the_whole(kind, count):
    whole, tokens = model(kind), batch()
    stages = [Stage(copy.deepcopy(whole), number, count) for number in range(count)]
    loss = whole(input_ids=tokens, labels=tokens).loss
    loss.backward()
    passed = tokens
    for stage in stages:
        passed = stage(passed, tokens) if stage.last else stage(passed)
    assert float(passed.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    passed.backward()
    parameters = dict(whole.named_parameters())
    seen = []
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            seen.append(name)
            torch.testing.assert_close(parameter.grad, parameters[name].grad, rtol=1e-4, atol=1e-7)
    assert sorted(seen) == sorted(parameters)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt_neox", {"hidden_dropout": 0.3}),
        ("phi", {"embd_pdrop": 0.3}),
        ("gptj", {"embd_pdrop": 0.3, "rotary_dim": 4}),
        ("codegen", {"embd_pdrop": 0.3, "rotary_dim": 4}),
    ],
)
def test_dropout_is_where_the_whole_model_has_it(kind, more):
    whole, tokens = model(kind, **more), batch()
    drawn = torch.get_rng_state()
    stages = [Stage(copy.deepcopy(whole), number, 3) for number in range(3)]
    assert torch.equal(torch.get_rng_state(), drawn)
    places = [name for stage in stages for name, part in stage.named_modules() if isinstance(part, torch.nn.Dropout)]
    assert sorted(places) == sorted(
        f"model.{name}" for name, part in whole.named_modules() if isinstance(part, torch.nn.Dropout)
    )
    torch.manual_seed(7)
    expected = whole(input_ids=tokens, labels=tokens).loss
    torch.manual_seed(7)  # the stages draw what the whole model draws, in the same order
    passed = tokens
    for stage in stages:
        passed = stage(passed, tokens) if stage.last else stage(passed)
    assert float(passed.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    whole.eval()
    undropped = whole(input_ids=tokens, labels=tokens).loss
    assert float(expected.detach()) != pytest.approx(float(undropped.detach()), rel=1e-4)


def test_padding_and_positions_reach_every_stage():
    whole, tokens = model("llama"), batch()
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    positions = torch.arange(16).expand(3, 16).flip(0).clone() + 2
    expected = whole(input_ids=tokens, attention_mask=mask, position_ids=positions, labels=tokens).loss
    passed = tokens
    for number in range(2):
        stage = Stage(copy.deepcopy(whole), number, 2)
        labels = tokens if stage.last else None
        passed = stage(passed, labels, attention_mask=mask, position_ids=positions)
    assert float(passed.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(expected.detach()) != pytest.approx(
        float(whole(input_ids=tokens, labels=tokens).loss.detach()), rel=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "more", "count", "words"),
    [
        ("gpt2", {}, 2, "no pipeline plan for gpt2"),
        ("llama", {}, 5, "at most the model's number of layers, 4"),
        (
            "granite",
            {"embedding_multiplier": 12.0},
            2,
            "granite computes more between its parts than its pipeline plan says",
        ),
        (
            "starcoder2",
            {"embedding_dropout": 0.1},
            3,
            "starcoder2 drops out more between its parts than its pipeline plan says",
        ),
        ("gptj", {"rotary_dim": 16}, 2, r"gptj fails in a trial \(The size of tensor a \(8\)"),
        ("llama", {"tie_word_embeddings": True}, 2, "tied embedding would lie on two stages"),
    ],
)
def test_a_model_that_can_not_be_cut_is_refused_with_the_reason(kind, more, count, words):
    with pytest.raises(Failure, match=rf"replica\.stages: found {count}; .*{words}"):
        Stage(model(kind, **more), 0, count)


def small(kind):
    """A small model of this type; None where it has no plan, or can't be built of sizes alone."""
    try:
        if not getattr(AutoConfig.for_model(kind), "base_model_pp_plan", None):
            return None
        with torch.device("meta"):
            elements = sum(parameter.numel() for parameter in model(kind, **MORE_SIZES).parameters())
        return model(kind, **MORE_SIZES) if elements < LARGEST else None
    except Exception:  # noqa: BLE001 - each model type has exceptions of its own
        return None


def test_every_model_type_with_a_plan_is_cut_or_refused_by_the_name_of_the_field():
    cut, refused = set(), {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (whole := small(kind)) is None:
            continue
        try:
            Stage(whole, 0, 2)
            cut.add(kind)
        except Failure as failure:
            refused[kind] = str(failure)
    assert {"llama", "mixtral", "qwen3_moe", "gpt_oss", "starcoder2"} <= cut
    assert len(cut) > 4 * len(refused)
    assert all(message.startswith("replica.stages: found 2; ") for message in refused.values()), refused


def test_layers_are_dealt_evenly_and_each_once():
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            parts = [layers_of(layers, number, count) for number in range(count)]
            assert [layer for part in parts for layer in part] == list(range(layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
