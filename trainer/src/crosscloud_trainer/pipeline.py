"""One inner step of a replica that is cut into stages: micro-batches in 1F1B (Narayanan et al. 2019, PipeDream-Flush).

Each stage has an engine of its own. It makes as many forward passes ahead as there are stages after it, then one
backward pass for each forward pass, and at the end the backward passes that are left: at no time does it keep more
micro-batches than there are stages. Gradients add up over the micro-batches; the optimizer steps once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from crosscloud_trainer.engine import Engine, StepReport
from crosscloud_trainer.group import ReplicaTotals
from crosscloud_trainer.shard import Shard

Batch = Mapping[str, torch.Tensor]


class Neighbours(Protocol):
    """The ranks with this one's number in the stages before and after it. Values go out from any device and come in on
    any. Calls that wait raise what ends the attempt.
    """

    def send_activation(self, micro_batch: int, values: torch.Tensor) -> None:
        """To the next stage."""
        ...

    def receive_activation(self, micro_batch: int) -> torch.Tensor:
        """From the stage before."""
        ...

    def send_gradient(self, micro_batch: int, values: torch.Tensor) -> None:
        """To the stage before, of the activation that it sent."""
        ...

    def receive_gradient(self, micro_batch: int) -> torch.Tensor:
        """From the next stage."""
        ...


@dataclass(frozen=True)
class Position:
    """Stage `number` of `count`, from 0."""

    number: int
    count: int

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1


@dataclass(frozen=True)
class _Pending:
    """A micro-batch between its passes: what came in, and what came out of it."""

    number: int
    given: torch.Tensor
    result: torch.Tensor


class Pipeline:
    """The passes of one stage's rank. The engine's module is a `Stage` on `device`, and its settings leave accumulation
    to us.
    """

    def __init__(self, engine: Engine, position: Position, neighbours: Neighbours, device: torch.device) -> None:
        self._engine, self._position, self._neighbours = engine, position, neighbours
        self._device = device

    def step(self, batches: Sequence[tuple[Batch, float]]) -> tuple[float, StepReport]:
        """An inner step; returns the mean loss over the micro-batches (NaN on all stages but the last) and what the
        step did. Every rank of every stage gets as many `batches`, each with the weight of its loss; of each the first
        stage reads `input_ids`, the last `labels`, and all what else is in it.
        """
        losses: list[torch.Tensor] = []
        pending: deque[_Pending] = deque()
        ahead = min(self._position.count - 1 - self._position.number, len(batches))
        for number, (batch, weight) in enumerate(batches):
            pending.append(self._forward(number, batch, weight, losses))
            if number >= ahead:
                self._backward(pending.popleft(), len(batches))
        while pending:
            self._backward(pending.popleft(), len(batches))
        report = self._engine.step()
        assert report is not None, "an engine of a stage steps whenever it is told to"
        return float(torch.stack(losses).mean()) if losses else float("nan"), report

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """Losses of the batches, without training; empty on all stages but the last."""
        losses: list[torch.Tensor] = []
        self._engine.train(False)
        with torch.no_grad():
            for number, batch in enumerate(batches):
                self._forward(number, batch, 1.0, losses)
        self._engine.train()
        return [float(loss) for loss in losses]

    def _forward(self, number: int, batch: Batch, weight: float, losses: list[torch.Tensor]) -> _Pending:
        position = self._position
        more = {name: values for name, values in batch.items() if name not in ("input_ids", "labels")}
        if position.first:
            given = batch["input_ids"]
        else:
            given = self._neighbours.receive_activation(number).to(self._device)
            given.requires_grad_(torch.is_grad_enabled())
        result: torch.Tensor = self._engine(given, labels=batch["labels"] if position.last else None, **more)
        if position.last:
            result = result * weight
            losses.append(result.detach())
        else:
            self._neighbours.send_activation(number, result.detach())
        return _Pending(number, given, result)

    def _backward(self, pending: _Pending, micro_batches: int) -> None:
        if self._position.last:
            loss = pending.result / micro_batches
        else:
            # A loss whose gradient at the result is the one that the next stage found; also ZeRO 0 takes a scalar.
            gradient = self._neighbours.receive_gradient(pending.number).to(self._device)
            loss = (pending.result.float() * gradient.float()).sum()
        self._engine.backward(loss)
        if not self._position.first:
            assert pending.given.grad is not None
            self._neighbours.send_gradient(pending.number, pending.given.grad)


class StageNorm:
    """The engine's `exchange` where gradients stay in the replica: only their norm is taken, over all its stages."""

    def __init__(self, replica: ReplicaTotals) -> None:
        self._replica = replica

    def reduce(self, gradient: Shard) -> float | None:
        """The norm over the whole model; None if the gradient of another stage isn't finite."""
        square = sum(float(part.double().square_().sum()) for part in gradient.parts)
        total, bad = self._replica.sums(torch.tensor([square, 0.0], dtype=torch.float64)).tolist()
        return None if bad else float(total**0.5)

    def skip(self) -> None:
        """This stage's gradient isn't finite: all stages skip the step."""
        self._replica.sums(torch.tensor([0.0, 1.0], dtype=torch.float64))


class Leaders(Protocol):
    """The first ranks of all stages of a replica."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sums over the stages, added in their order, so that all get the same bits."""
        ...


class StageTotals:
    """Totals over all stages of a replica: inside each by its own group, between them by their first ranks."""

    def __init__(self, stage: ReplicaTotals, leaders: Leaders | None) -> None:
        """Only the first rank of each stage has `leaders`."""
        self._stage, self._leaders = stage, leaders

    def total(self, counts: Sequence[int]) -> list[int]:
        # Counts are below 2**48, and so exact in fp64.
        return [int(count) for count in self.sums(torch.tensor(list(counts), dtype=torch.float64)).tolist()]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        mine = self._stage.sums(values)
        whole = self._leaders.sums(mine) if self._leaders is not None else torch.zeros_like(mine)
        return self._stage.sums(whole)  # the others add nothing: this hands it to them
