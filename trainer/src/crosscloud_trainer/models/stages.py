"""A causal model cut into pipeline stages: which modules a stage keeps, and what it computes.

`transformers` says of each model type that can be cut what its parts are, in their order (`base_model_pp_plan`: an
embedding, maybe its dropout, the layers, what follows them). A stage keeps its own and passes hidden states through the
others' places, so that parameters keep their full-model names and the model's own code makes masks and positions on
every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.models.presets import one_line

FIELD = "replica.stages"

_PROBE_TOKENS = 8
_TOLERANCE = 1e-4  # of the probe: stages compute what the whole does, in the same order


class Passed(torch.nn.Module):
    """Stands in the place of a module that another stage has: hands on its first argument."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


@dataclass(frozen=True)
class _Plan:
    """Names of the parts: the embedding and what else comes before the layers, the layers, what follows them."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]


class Stage(torch.nn.Module):
    """Stage `number` of `count` of a model, which it prunes for good.

    The first takes token ids, shape (sequences, tokens), the others hidden states, shape (sequences, tokens, width);
    the last gives the loss where it gets labels, the others hidden states.
    """

    def __init__(self, model: PreTrainedModel, number: int, count: int) -> None:
        super().__init__()
        plan = plan_of(model, count)
        _check_composition(model, plan, count)
        for owner, name, _ in _foreign(model, plan, number, count):
            setattr(owner, name, Passed())
        self.model = model
        self.first, self.last = number == 0, number == count - 1

    def forward(self, given: torch.Tensor, labels: torch.Tensor | None = None, **more: torch.Tensor) -> torch.Tensor:
        """`more` goes to the model on every stage: positions, attention mask."""
        return _run(self.model, given, labels, first=self.first, last=self.last, **more)


def plan_of(model: PreTrainedModel, count: int) -> _Plan:
    """The parts of `model`. Failure(INVALID_INPUT) where it can't be cut into `count` stages, with the reason."""
    kind = model.config.model_type
    raw = getattr(model.config, "base_model_pp_plan", None) or {}
    base = _base(model)
    layers = [name for name in raw if isinstance(getattr(base, name, None), torch.nn.ModuleList)]
    embedding = [name for name, (inputs, _) in raw.items() if "input_ids" in inputs]
    faults = []
    if len(layers) != 1 or len(embedding) != 1:
        faults.append(f"transformers has no pipeline plan for {kind}; use 1, or another model type")
    elif count > len(getattr(base, layers[0])):
        faults.append(f"must be at most the model's number of layers, {len(getattr(base, layers[0]))}")
    if model.config.get_text_config().tie_word_embeddings:
        faults.append(
            "a tied embedding would lie on two stages; set tie_word_embeddings: false in training.model.config"
        )
    if faults:
        raise invalid([Problem(FIELD, count, fault) for fault in faults])
    names = list(raw)
    place = names.index(layers[0])
    return _Plan(tuple(names[:place]), layers[0], tuple(names[place + 1 :]))


def hidden_size(model: PreTrainedModel) -> int:
    """Values per token of what passes between layers."""
    return int(model.config.get_text_config().hidden_size)


def layers_of(layers: int, number: int, count: int) -> range:
    """The layers of one of `count` stages, dealt evenly; stages later in the line have the odd ones."""
    return range(layers * number // count, layers * (number + 1) // count)


def _base(model: PreTrainedModel) -> torch.nn.Module:
    base: torch.nn.Module = getattr(model, model.base_model_prefix, model)
    return base


def _foreign(
    model: PreTrainedModel, plan: _Plan, number: int, count: int
) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(owner, attribute, module) of all that stage `number` doesn't have."""
    base = _base(model)
    layers: torch.nn.ModuleList = getattr(base, plan.layers)
    own = layers_of(len(layers), number, count)
    found: list[tuple[torch.nn.Module, str, torch.nn.Module]] = [
        (layers, str(place), layer) for place, layer in enumerate(layers) if place not in own
    ]
    if number > 0:
        found += [(base, name, getattr(base, name)) for name in plan.before]
    if number < count - 1:
        found += [(base, name, getattr(base, name)) for name in plan.after]
        found += [(model, name, part) for name, part in model.named_children() if part is not base]
    return found


def _run(
    model: PreTrainedModel,
    given: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    first: bool,
    last: bool,
    **more: torch.Tensor,
) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids" if first else "inputs_embeds": given, "use_cache": False, **more}
    if not last:
        hidden: torch.Tensor = _base(model)(**inputs).last_hidden_state
        return hidden
    answer = model(**inputs) if labels is None else model(**inputs, labels=labels)
    result: torch.Tensor = answer.logits if labels is None else answer.loss
    return result


@contextmanager
def _pruned(model: PreTrainedModel, plan: _Plan, number: int, count: int) -> Iterator[None]:
    """The model as stage `number`, and whole again afterwards."""
    foreign = _foreign(model, plan, number, count)
    try:
        for owner, name, _ in foreign:
            setattr(owner, name, Passed())
        yield
    finally:
        for owner, name, module in foreign:
            setattr(owner, name, module)


def _check_composition(model: PreTrainedModel, plan: _Plan, count: int) -> None:
    """Refuses a model whose own code does more than its plan says, like scaling what comes from an embedding.

    It is tried without dropout, then with it: drawn from one seed, it is the same only where each stage has its own.
    """
    training, kind = model.training, model.config.model_type
    for drops, what in ((False, "computes more"), (True, "drops out more")):
        model.train(drops)
        try:
            whole, passed = _tried(model, plan, count)
        except Exception as fault:  # whatever the code of a model type makes of odd sizes, or of stages
            allowed = f"{kind} fails in a trial ({one_line(fault)}); use 1, other sizes or another model type"
            raise invalid([Problem(FIELD, count, allowed)]) from fault
        if not torch.allclose(whole, passed, rtol=_TOLERANCE, atol=_TOLERANCE):
            allowed = f"{kind} {what} between its parts than its pipeline plan says; use 1"
            raise invalid([Problem(FIELD, count, allowed)])
    model.train(training)


def _tried(model: PreTrainedModel, plan: _Plan, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a few tokens from the whole model, and from its stages one after the other."""
    tokens = torch.arange(_PROBE_TOKENS).remainder(model.config.get_text_config().vocab_size).unsqueeze(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of the CPU alone: a GPU's goes on as seeded
        whole = _run(model, tokens, None, first=True, last=True)
        torch.default_generator.manual_seed(0)
        passed = tokens
        for number in range(count):
            with _pruned(model, plan, number, count):
                passed = _run(model, passed, None, first=number == 0, last=number == count - 1)
    return whole, passed
