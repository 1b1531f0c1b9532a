"""AllReduce: replicas exchange their gradients before every inner step, so that all of them take the same step.

A round is one inner step. In it, on every rank of every replica of the view:

1. DeepSpeed has averaged the gradient over the replica's ranks; the ranks agree whether it can be encoded. A replica
   whose gradient isn't finite takes part with weight 0 and no payload, and then all replicas skip the step;
2. parts of cells go to their holders, which encode them with error feedback;
3. the exchange brings each holder the mean gradient of its cells, weighted by tokens;
4. holders pass the encoded result on, each rank decodes its own elements into its gradient;
5. one collective brings every cell's sum of squares to all ranks, which add them in canonical order: the norm for
   clipping is the same number in all replicas, whatever their layouts.

The user's optimizer then steps on the same gradient everywhere. Its arithmetic isn't ours, so unlike hardware may drift
apart in the last bits; the digest therefore chains what was agreed (results and participants), not the weights.

Now and then replicas tell each other a digest of their weights and optimizer state. Where these differ, rounds follow
the step whose content is those of the first replica, as they are: one for the weights, one for each thing that the
optimizer keeps of an element. All replicas take them over, and are alike again to the bit.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from crosscloud_trainer.agreement import agree
from crosscloud_trainer.compress import Codec, EncodedCells, NoneCodec
from crosscloud_trainer.compress.codec import Lengths, Stretch, encodable, runs
from crosscloud_trainer.exchange import RoundExchange, RoundReport, RoundRequest, RoundResult
from crosscloud_trainer.group import ReplicaTotals, StageGroup
from crosscloud_trainer.holding import Elements, Holding
from crosscloud_trainer.layout import ReplicaLayout
from crosscloud_trainer.shard import DIGEST_BITS, Shard, digest

_CHAIN = 0x9E3779B97F4A7C15  # odd, so that no history is lost: the multiplier of SplitMix64


RESYNC_ROUNDS = 500  # replicas compare their states so often; that costs 8 bytes


class ReplicaState(Protocol):
    """What the steps of a replica make, on one rank. Both calls are collective."""

    def state(self) -> list[torch.Tensor]:
        """Weights, then each thing that the optimizer keeps of an element: compact flat fp32, by intervals."""
        ...

    def set_state(self, vectors: Sequence[torch.Tensor]) -> None:
        """The inverse of `state`; working weights and other ranks follow."""
        ...


class AllReduce:
    """The algorithm on one rank: the engine's `exchange`, with `on_step` called after every inner step."""

    rewrites_weights = False

    def __init__(
        self,
        layout: ReplicaLayout,
        shard: Shard,
        group: StageGroup,
        replica: ReplicaTotals,
        exchange: RoundExchange,
        codec: Codec,
        *,
        tokens: int,
        error_feedback: bool = True,
        state: ReplicaState | None = None,
        resync_rounds: int = RESYNC_ROUNDS,
    ) -> None:
        """`tokens` is what the whole replica trains on in a step; `shard` the fp32 weights, of which replicas start
        with equal ones. Of `state` replicas are kept alike; without it nothing is compared.
        """
        self.round = 0
        self._shard = shard
        self._replica = replica
        self._exchange = exchange
        self.tokens = tokens
        """Of the whole replica in a step: the weight of its gradient. A step may have another number."""
        self._layout = layout
        self._holding = Holding(layout, group, codec, shard.device, error_feedback=error_feedback)
        self._report: RoundReport | None = None
        self._group, self._state, self._resync_rounds = group, state, resync_rounds
        self._unlike = False  # replicas have told unlike states in the round of this step
        self.digest = self._weights_digest()

    @property
    def residual(self) -> torch.Tensor:
        """What encoding has lost so far of the cells that this rank holds, flat fp32; empty without error
        feedback.
        """
        return self._holding.residual

    @property
    def alone(self) -> bool:
        """A view of one: nobody to exchange with, so that the engine shouldn't ask."""
        return len(self._exchange.view) == 1

    def weights(self) -> torch.Tensor:
        """This rank's part of the weights that all replicas have, compact flat fp32."""
        return self._shard.read()

    def resume(self, number: int, _steps: int, agreed: int) -> None:
        """Goes on after round `number`, whose digest was `agreed`, once the weights were overwritten by stored ones."""
        self.round, self.digest = number, agreed

    def on_step(self, tokens: int, *, last: bool = False) -> RoundReport | None:  # noqa: ARG002 - as in DiLoCo
        """The round of the inner step that has just been done; None in a view of one, but for the last step."""
        if self.alone:
            if not last:
                return None
            self.round += 1
            self.digest = self._weights_digest()
            self._report = self._told({self._exchange.replica: self.tokens}, None, applied=True)
            self._exchange.prepared(self.round)
        if self._unlike:
            self._resync()
        report, self._report = self._report, None
        assert report is not None, "the engine has not asked for the exchange of this step"
        return report

    def finish(self) -> RoundReport | None:
        """The end of a run whose last step wasn't known to be the last: no window is open; in a view of one the last
        digest is made now.
        """
        return self.on_step(0, last=True) if self.alone else None

    def reduce(self, gradient: Shard) -> float | None:
        """Replaces the replica's gradient by the mean of all replicas; returns the mean's norm over the whole model,
        or None if all replicas skip the step.
        """
        usable = all(encodable(gradient.elements_at(start, stop)) for start, stop in gradient.pieces())
        if self._replica.total([int(not usable)])[0]:
            self._skip()
            return None
        values = self._holding.gather(gradient.elements_at)
        payload = self._holding.encode(values)
        answer = self._ask(payload)
        if answer.result is None or not all(answer.weights.values()):
            self._holding.take_back(values, payload)
            self._end(answer, payload, agreed=0, applied=False)
            return None
        norm = self._take(answer.result, gradient)
        self._end(answer, payload, gradient.digest(), applied=True)
        return norm

    def _take(self, result: EncodedCells, gradient: Shard) -> float:
        """Overwrites the gradient by the agreed mean; returns that one's norm over the whole model. Collective."""
        squares = torch.zeros(self._layout.index.cells, dtype=torch.float64, device=gradient.device)
        cells = torch.from_numpy(result.ids).to(gradient.device)

        def square(stretch: Stretch, means: torch.Tensor) -> None:
            squares[cells[stretch.cells]] = _squares(means, stretch.lengths)

        for start, means in self._holding.spread(result).parts(square):
            gradient.elements_at(start, start + means.numel()).copy_(means)
        return float(np.sqrt(np.add.reduce(self._replica.sums(squares).cpu().numpy())))

    def skip(self) -> None:
        """Takes part in the round without a gradient: all replicas skip the step."""
        self._replica.total([1])  # other stages of this replica may have one, and ask
        self._skip()

    def _skip(self) -> None:
        self._end(self._ask(None), None, agreed=0, applied=False)

    def _ask(self, payload: EncodedCells | None) -> RoundResult:
        self.round += 1
        weight = self.tokens if payload is not None else 0
        told = self._state_digest() if self.round % self._resync_rounds == 0 else 0
        answer = self._exchange.exchange(RoundRequest(self.round, weight, payload, self.digest, told))
        self._unlike = len(set(answer.states.values())) > 1
        return answer

    def _state_digest(self) -> int:
        if self._state is None:
            return 0
        own = digest(self._shard.index, self._shard.intervals, self._state.state())
        return agree(self._replica, [], own)[1]

    def _resync(self) -> None:
        """All replicas take over the state of the first one."""
        assert self._state is not None
        self._unlike = False
        holding = Holding(self._layout, self._group, NoneCodec(), self._shard.device, error_feedback=False)
        mine = self._exchange.replica == self._exchange.view[0]
        taken = []
        for vector in self._state.state():
            self.round += 1
            values = holding.gather(_elements_of(vector))
            payload = holding.encode(values) if mine else None
            answer = self._exchange.exchange(RoundRequest(self.round, int(mine), payload, self.digest, exact=True))
            assert answer.result is not None, "the first replica sends its state"
            agreed = torch.empty_like(vector)
            for start, part in holding.spread(answer.result).parts():
                agreed[start : start + part.numel()].copy_(part)
            taken.append(agreed)
            self._replica.total([0])  # all ranks of this replica have what they need
            self._exchange.prepared(self.round)
        self._state.set_state(taken)

    def _end(self, answer: RoundResult, payload: EncodedCells | None, agreed: int, *, applied: bool) -> None:
        """The replica has prepared the round: all its ranks have what they need."""
        _, whole = agree(self._replica, [], agreed)
        participants = sum(weight * _CHAIN ** (replica + 1) for replica, weight in answer.weights.items())
        self.digest = (self.digest * _CHAIN + whole + participants) % (1 << DIGEST_BITS)
        self._exchange.prepared(self.round)
        self._report = self._told(answer.weights, payload, applied=applied)

    def _told(self, weights: Mapping[int, int], payload: EncodedCells | None, *, applied: bool) -> RoundReport:
        nbytes = payload.nbytes if payload else 0
        return RoundReport(
            self.round, self.digest, weights, nbytes, refused=not weights[self._exchange.replica], applied=applied
        )

    def _weights_digest(self) -> int:
        return agree(self._replica, [], self._shard.digest())[1]


def _elements_of(vector: torch.Tensor) -> Elements:
    return lambda start, stop: vector[start:stop]


def _squares(values: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Sum of squares of each cell, in fp64, of cells whose values lie end to end."""
    sums = []
    position = 0
    for cells, length in runs(lengths):
        block = values[position : position + cells * length].view(cells, length)
        sums.append(block.double().square_().sum(dim=1))
        position += cells * length
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.float64, device=values.device)
