"""Models by preset or by a `transformers` configuration, with weights that are equal on all ranks of all replicas."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from crosscloud_trainer.contract import Model, ModelPreset, Problem
from crosscloud_trainer.data.tokens import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE
from crosscloud_trainer.failures import invalid

FIELD = "training.model"

_PRESETS: dict[ModelPreset, dict[str, Any]] = {
    ModelPreset.TINY_LLAMA: {  # 1.0 million parameters
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    ModelPreset.SMALL_LLAMA: {  # 14.3 million
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
}

_POSITIONS = ("n_positions", "max_position_embeddings")  # as different model types call it; the first is never an alias


def model_config(model: Model, sequence_length: int) -> PretrainedConfig:
    """The configuration of `model`; Failure(INVALID_INPUT) names what `transformers` doesn't take."""
    given = dict(_PRESETS[model.preset]) if model.preset else dict(model.config or {})
    field = f"{FIELD}.preset" if model.preset else f"{FIELD}.config"
    given.setdefault("vocab_size", VOCABULARY_SIZE)
    if model.preset:
        given["max_position_embeddings"] = max(2048, sequence_length)
    kind = given.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        allowed = "must be a causal language model that the installed transformers knows, like llama or gpt2"
        raise invalid([Problem(f"{field}.model_type", kind, allowed)])
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not given.get("is_decoder"):
        allowed = f"{kind} looks at both sides of a token unless this is true"
        raise invalid([Problem(f"{field}.is_decoder", given.get("is_decoder"), allowed)])
    given.update(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, use_cache=False)
    if isinstance(given["vocab_size"], int) and given["vocab_size"] < VOCABULARY_SIZE:
        allowed = f"must be at least {VOCABULARY_SIZE} for tokenizer Bytes; leave it out to get that"
        raise invalid([Problem(f"{field}.vocab_size", given["vocab_size"], allowed)])
    try:
        config = AutoConfig.for_model(kind, **given)
    except Exception as fault:  # each model type has exceptions of its own
        raise invalid([Problem(field, given, _one_line(fault))]) from fault
    _check(config, given, field, sequence_length)
    return config


def build_model(model: Model, sequence_length: int, seed: int) -> PreTrainedModel:
    """A causal language model in fp32 with weights drawn from `seed`: the same on every rank of every replica."""
    config = model_config(model, sequence_length)
    field = f"{FIELD}.preset" if model.preset else f"{FIELD}.config"
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as fault:  # whatever a model type makes of odd sizes
        raise invalid([Problem(field, model.config, f"no model can be built: {_one_line(fault)}")]) from fault
    finally:
        torch.random.set_rng_state(state)


def _check(config: PretrainedConfig, given: dict[str, Any], field: str, sequence_length: int) -> None:
    problems = []
    # transformers keeps names that it doesn't know as plain attributes: a slip of the pen would go unnoticed.
    plain = type(config)()
    known = set(plain.to_dict()) | set(type(config).attribute_map) | {"bos_token_id", "eos_token_id", "pad_token_id"}
    for name in sorted(set(given) - known - {"use_cache"}):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
        allowed = f"{config.model_type} has no such setting; it has {', '.join(near)}"
        problems.append(Problem(f"{field}.{name}", given[name], allowed))
    for name in _POSITIONS:
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions < sequence_length:
            allowed = f"must be at least training.sequenceLength ({sequence_length})"
            problems.append(Problem(f"{field}.{name}", positions, allowed))
            break
    if problems:
        raise invalid(problems)


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__
