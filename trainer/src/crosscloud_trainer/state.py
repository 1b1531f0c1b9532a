"""The state of one rank as parts of vectors: the very memory that training works on, so that saving is reading it and
resuming is writing it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from crosscloud_trainer import engine
from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.checkpoint import WEIGHTS, Part, Scope, Span
from crosscloud_trainer.compress import Reducer
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.layout import Ids, Index, Interval

MOMENTUM = "outer.momentum"
RESIDUAL = "residual"
OWNER_RESIDUAL = "owner.residual"
OPTIMIZER = "optimizer."


def outer_parts(trained: engine.Engine, algorithm: AllReduce | DiLoCo) -> list[Part]:
    """Weights, and what else all replicas have alike to the bit."""
    spans = spans_of(trained.shard.intervals)
    if isinstance(algorithm, DiLoCo):
        weights = parts_of(WEIGHTS, Scope.MODEL, spans, algorithm.outer.weights)
        return [*weights, *parts_of(MOMENTUM, Scope.MODEL, spans, algorithm.outer.momentum)]
    return [Part(WEIGHTS, Scope.MODEL, s, v) for s, v in zip(spans, trained.shard.parts, strict=True)]


def residual_parts(trained: engine.Engine, algorithm: AllReduce | DiLoCo, reducer: Reducer | None) -> list[Part]:
    """What encodings have lost so far: of the cells that this rank holds, and of those that it owns."""
    held = trained.layout.holders.held(trained.rank)
    found = []
    if algorithm.residual.numel():
        found += parts_of(RESIDUAL, Scope.REPLICA, cell_spans(trained.index, held), algorithm.residual)
    if reducer is not None and reducer.residual.numel():
        spans = cell_spans(trained.index, reducer.owned)
        found += parts_of(OWNER_RESIDUAL, Scope.VIEW, spans, reducer.residual)
    return found


def optimizer_scope(algorithm: AllReduce | DiLoCo) -> Scope:
    """Under AllReduce all replicas have taken the same steps."""
    return Scope.REPLICA if isinstance(algorithm, DiLoCo) else Scope.MODEL


def optimizer_parts(trained: engine.Engine, scope: Scope) -> list[Part]:
    """What the user's optimizer keeps for each element."""
    found = []
    for interval, state in trained.optimizer_tensors():
        (span,) = spans_of([interval])
        found += [Part(f"{OPTIMIZER}{key}", scope, span, value) for key, value in state.items() if value.dim()]
    return found


def optimizer_counts(trained: engine.Engine) -> dict[str, dict[str, float]]:
    """What the user's optimizer counts, like its steps: by name, then by number of the parameter."""
    found: dict[str, dict[str, float]] = {}
    for interval, state in trained.optimizer_tensors():
        for key, value in state.items():
            if not value.dim():
                found.setdefault(key, {})[str(interval.parameter)] = float(value)
    return found


def random_state() -> dict[str, str]:
    """The states of torch's generators of this rank, as text."""
    found = {"cpu": _text(torch.get_rng_state())}
    if torch.cuda.is_available():
        found["cuda"] = _text(torch.cuda.get_rng_state())
    return found


def set_random_state(found: Mapping[str, str]) -> None:
    """The inverse of `random_state`; of a device that isn't here it takes nothing."""
    torch.set_rng_state(_bytes(found["cpu"]))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(found["cuda"]))


def snapshot(parts: Iterable[Part]) -> list[Part]:
    """Copies in host memory."""
    return [Part(p.section, p.scope, p.span, p.values.detach().to("cpu", copy=True)) for p in parts]


def finite(parts: Iterable[Part]) -> bool:
    return all(bool(torch.isfinite(part.values).all()) for part in parts)


def spans_of(intervals: Iterable[Interval]) -> list[Span]:
    return [Span(interval.parameter, interval.start, interval.stop) for interval in intervals]


def cell_spans(index: Index, ids: Ids) -> list[Span]:
    """The spans of cells, neighbouring ones in one."""
    return list(_joined(index, ids))


def _joined(index: Index, ids: Ids) -> Iterator[Span]:
    last: Span | None = None
    for number in ids.tolist():
        name, start, stop = index.cell(number)
        parameter = index.numbers[name]
        if last is not None and (last.parameter, last.stop) == (parameter, start):
            last = Span(parameter, last.start, stop)
            continue
        if last is not None:
            yield last
        last = Span(parameter, start, stop)
    if last is not None:
        yield last


def parts_of(section: str, scope: Scope, spans: Iterable[Span], flat: torch.Tensor) -> list[Part]:
    """Views of a flat tensor in which the spans' values lie end to end."""
    found, position = [], 0
    for span in spans:
        length = span.stop - span.start
        found.append(Part(section, scope, span, flat[position : position + length]))
        position += length
    return found


def _text(state: Any) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
