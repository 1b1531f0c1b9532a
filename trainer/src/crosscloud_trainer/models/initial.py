"""Weights to begin with, from the files that the pod's launcher has brought; what doesn't fit is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from crosscloud_trainer.contract import Model, Problem
from crosscloud_trainer.failures import Failure, invalid
from crosscloud_trainer.models import presets

FIELD = f"{presets.FIELD}.initFrom"

_SHOWN = 8
_CONFIG = "config.json"
_TEACHES = "set it as there, or leave preset and config out to take all of it from there"
# Settings that may differ between the weights and the model that begins with them: they are about training, about the
# tokenizer, about reading and writing, or how long a sequence may be.
_FREE = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "n_ctx",
        "n_positions",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "transformers_version",
        "use_cache",
    ]
)


def described(model: Model, folder: Path) -> Model:
    """`model`, with the configuration that lies beside the weights in `folder` where the manifest gives none. Raises
    Failure(INVALID_INPUT) where that can't be read.
    """
    if model.preset is not None or model.config is not None:
        return model
    if not (folder / _CONFIG).exists():
        raise _refused(model, f"has no {_CONFIG} beside its weights; say by preset or config which model they are of")
    there = _configuration(model, folder)
    # not where they lie: that is another folder in each pod, and all must describe the same model
    known = AutoConfig.for_model(there.model_type).to_dict().keys() - {"transformers_version", "_name_or_path"}
    return replace(model, config={name: value for name, value in there.to_dict().items() if name in known})


def load(model: PreTrainedModel, asked: Model, folder: Path) -> None:
    """Put the weights in `folder` into `model`, which is what `asked` says; raises Failure(INVALID_INPUT) with every
    setting in which the model of the weights differs, or with every parameter.
    """
    if (folder / _CONFIG).exists():
        _check_settings(model.config, asked, folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = set(model.state_dict())
    problems: list[str] = []
    filled: set[int] = set()
    with torch.no_grad():
        for name, values in _stored(folder):
            parameter = parameters.get(name)
            if parameter is None:
                if name not in known:
                    problems.append(f"{name}: the model has no such parameter")
            elif parameter.shape != values.shape:
                shapes = f"{tuple(values.shape)} there, {tuple(parameter.shape)} in the model"
                problems.append(f"{name}: {shapes}")
                filled.add(id(parameter))
            else:
                parameter.copy_(values)
                filled.add(id(parameter))
    names = {id(parameter): name for name, parameter in parameters.items()}
    problems += [
        f"{name}: isn't there" for key, name in sorted(names.items(), key=lambda item: item[1]) if key not in filled
    ]
    if problems:
        raise _refused(asked, "holds the weights of another model:", *problems)


def _check_settings(config: PretrainedConfig, asked: Model, folder: Path) -> None:
    """A model of the same shapes may still be another one: by its number of heads, its rotary base, its norm."""
    there = _configuration(asked, folder)
    if there.model_type != config.model_type:
        raise _refused(asked, f"is a {there.model_type}, and the model is a {config.model_type}; {_TEACHES}")
    before, now = there.to_dict(), config.to_dict()
    given = set(asked.config or {}) - presets.SIZES  # what is no size may be set to something else on purpose
    differ = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    problems = [
        f"{name}: {before[name]} there, {now[name]} in the model"
        for name in differ
        if name not in _FREE and name not in given and "drop" not in name
    ]
    if problems:
        raise _refused(asked, f"is another model by its {_CONFIG}; {_TEACHES}:", *problems)


def _configuration(asked: Model, folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as fault:  # each model type has exceptions of its own
        words = " ".join(str(fault).split())[:300]
        raise _refused(asked, f"has a {_CONFIG} that transformers can't read: {words}") from fault


def _refused(asked: Model, allowed: str, *problems: str) -> Failure:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return invalid([Problem(FIELD, asked.init_from, allowed), *problems[:_SHOWN], *more])


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
