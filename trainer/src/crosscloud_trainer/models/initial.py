"""Weights to begin with, from the files that the pod's launcher has brought; what doesn't fit is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.models import presets

FIELD = f"{presets.FIELD}.initFrom"

_SHOWN = 8


def load(model: PreTrainedModel, address: str, folder: Path) -> None:
    """Put the weights in `folder` into `model`; raises Failure(INVALID_INPUT) with every parameter that differs."""
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
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise invalid([Problem(FIELD, address, "holds the weights of another model:"), *problems[:_SHOWN], *more])


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
