"""Models by preset or by a `transformers` configuration, with weights that are equal on all ranks of all replicas."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from crosscloud_trainer.contract import Model, ModelPreset, Problem
from crosscloud_trainer.data.tokens import BYTES, Vocabulary
from crosscloud_trainer.failures import invalid

FIELD = "training.model"

_PRESETS: dict[ModelPreset, dict[str, Any]] = {
    ModelPreset.TINY_LLAMA: {  # 1.1 million parameters
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    ModelPreset.SMALL_LLAMA: {  # 14.4 million
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "tie_word_embeddings": False,
    },
}

_POSITIONS = ("n_positions", "max_position_embeddings")  # as different model types call it; the first is never an alias
# What counts layers, heads and widths, as different model types call it. transformers builds a model of none, too.
SIZES = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "n_embd",
        "n_inner",
        "n_layer",
        "n_head",
        "n_layers",
        "n_heads",
        "num_layers",
        "num_heads",
        "attention_heads",
        "d_model",
        "d_ff",
        "d_kv",
        "ffn_dim",
        "dim",
        "hidden_dim",
        "embed_dim",
        "embedding_size",
        "word_embed_proj_dim",
        "decoder_layers",
        "decoder_attention_heads",
        "decoder_ffn_dim",
        "moe_intermediate_size",
        "state_size",
        "conv_kernel",
        "n_positions",
        "max_position_embeddings",
    ]
)


def model_config(model: Model, sequence_length: int, vocabulary: Vocabulary = BYTES) -> PretrainedConfig:
    """The configuration of `model`; Failure(INVALID_INPUT) names all that `transformers` or training doesn't take."""
    given = dict(_PRESETS[model.preset]) if model.preset else dict(model.config or {})
    field = field_of(model)
    given.setdefault("vocab_size", vocabulary.size)
    if model.preset:
        given["max_position_embeddings"] = max(2048, sequence_length)
    kind = given.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        allowed = "must be a causal language model that the installed transformers knows, like llama or gpt2"
        raise invalid([Problem(f"{field}.model_type", kind, allowed)])
    problems = list(_faults(kind, given, field, vocabulary))
    wrong = {problem.path.rpartition(".")[2] for problem in problems}
    given.update(bos_token_id=vocabulary.bos, eos_token_id=vocabulary.eos, pad_token_id=vocabulary.pad, use_cache=False)
    config = None
    try:
        config = AutoConfig.for_model(kind, **{name: value for name, value in given.items() if name not in wrong})
        problems += _positions(config, field, sequence_length)
    except Exception as fault:  # noqa: BLE001 - each model type has exceptions of its own
        if not wrong & {
            *SIZES,
            "model_type",
        }:  # else it may be no more than what follows from a default in the wrong one's place
            problems.append(Problem(field, given, one_line(fault)))
    if problems or config is None:
        raise invalid(problems)
    return config


def build_model(model: Model, sequence_length: int, seed: int, vocabulary: Vocabulary = BYTES) -> PreTrainedModel:
    """A causal language model in fp32 with weights drawn from `seed`: the same on every rank of every replica."""
    config = model_config(model, sequence_length, vocabulary)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as fault:  # whatever a model type makes of odd sizes
        raise invalid([Problem(field_of(model), model.config, f"no model can be built: {one_line(fault)}")]) from fault
    finally:
        torch.random.set_rng_state(state)


def parameter_count(model: Model, sequence_length: int, vocabulary: Vocabulary = BYTES) -> int:
    """Values in all parameters, a tied one once. Takes no memory for them."""
    config = model_config(model, sequence_length, vocabulary)
    try:
        return sum(parameter.numel() for parameter in _outline(config).parameters())
    except Exception as fault:  # as above
        raise invalid([Problem(field_of(model), model.config, f"no model can be built: {one_line(fault)}")]) from fault


def field_of(model: Model) -> str:
    """The field of a manifest that says which model it is."""
    return f"{FIELD}.preset" if model.preset else f"{FIELD}.config"


def _outline(config: PretrainedConfig) -> PreTrainedModel:
    """The model without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _faults(kind: str, given: dict[str, Any], field: str, vocabulary: Vocabulary) -> Iterator[Problem]:
    """What can be said of single settings."""
    # transformers keeps names that it doesn't know as plain attributes: a slip of the pen would go unnoticed.
    try:
        plain = AutoConfig.for_model(kind)
    except Exception as fault:  # noqa: BLE001 - each model type has exceptions of its own
        yield Problem(f"{field}.model_type", kind, f"transformers has no defaults for it: {one_line(fault)}")
        return
    known = set(plain.to_dict()) | set(type(plain).attribute_map) | {"bos_token_id", "eos_token_id", "pad_token_id"}
    for name in sorted(set(given) - known - {"use_cache"}):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
        yield Problem(f"{field}.{name}", given[name], f"{kind} has no such setting; it has {', '.join(near)}")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not given.get("is_decoder"):
        allowed = f"{kind} looks at both sides of a token unless this is true"
        yield Problem(f"{field}.is_decoder", given.get("is_decoder"), allowed)
    for name in sorted(SIZES & set(given) & known):
        value = given[name]
        if not isinstance(value, int) or isinstance(value, bool):
            continue  # None is the type's own default, and transformers judges the rest
        if name == "vocab_size" and value < vocabulary.size:
            whose = "tokenizer Bytes" if vocabulary == BYTES else "the ids of tokenizerFile"
            allowed = f"must be at least {vocabulary.size} for {whose}; leave it out to get that"
            yield Problem(f"{field}.{name}", value, allowed)
        elif value < 1:
            yield Problem(f"{field}.{name}", value, "must be at least 1")


def _positions(config: PretrainedConfig, field: str, sequence_length: int) -> Iterator[Problem]:
    """Whether there is a position for each token of a sequence."""
    name = next((name for name in _POSITIONS if isinstance(getattr(config, name, None), int)), None)
    if name is None:
        return
    positions = getattr(config, name)
    if positions < sequence_length:
        yield Problem(f"{field}.{name}", positions, f"must be at least training.sequenceLength ({sequence_length})")
        return
    roomy = copy.deepcopy(config)
    setattr(roomy, name, positions + (config.pad_token_id or 0) + 1)
    for path, module in _outline(roomy).named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in path and module.padding_idx is not None:
            first = module.padding_idx + 1  # as in RoBERTa: the padding's id and those below it are no positions
            if positions < first + sequence_length:
                allowed = (
                    f"must be at least {first + sequence_length}: {config.model_type} counts positions from {first} "
                    f"on, and training.sequenceLength is {sequence_length}"
                )
                yield Problem(f"{field}.{name}", positions, allowed)
            return


def one_line(fault: Exception) -> str:
    """What a fault says, for a message of ours."""
    return " ".join(str(fault).split()) or type(fault).__name__
