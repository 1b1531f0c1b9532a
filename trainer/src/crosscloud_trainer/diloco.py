"""DiLoCo: replicas train on their own for a window of inner steps, then exchange one compressed update
(Douillard et al. 2023).

A round, on every rank of every replica of the view:

1. the pseudo-gradient: outer weights minus local weights, on the rank's own shard;
2. the ranks of the replica agree whether it is finite. If not, the replica refuses: it takes part with weight
   0 and no payload;
3. parts of cells go to their holders, which encode them with error feedback;
4. the exchange brings each holder the agreed result of its cells;
5. holders pass the encoded result on, each rank decodes its own elements and tries the outer update on them;
6. the ranks agree that all of them have got that far (the replica has prepared the round) and that the new
   state is finite;
7. all apply it, with no further word to anyone, and go on from the new outer weights.

Each of these goes through the shard piece by piece and keeps nothing of its size: what was tried is thrown away, and
computed once more to be applied.

All replicas see the same results and have the same outer state, so that a round which would end in numbers
that aren't finite is skipped by all alike: they go back to the outer weights and the round is counted.

In a view of one replica there is nobody to agree with: no exchange and no outer update happen, the outer
weights follow the local ones, and training is the same to the bit as without DiLoCo.
"""

from collections.abc import Iterator

import torch

from crosscloud_trainer.agreement import agree
from crosscloud_trainer.compress import Codec, EncodedCells
from crosscloud_trainer.compress.codec import encodable
from crosscloud_trainer.contract import OuterOptimizer
from crosscloud_trainer.exchange import RoundExchange, RoundReport, RoundRequest
from crosscloud_trainer.group import ReplicaTotals, StageGroup
from crosscloud_trainer.holding import Agreed, Holding
from crosscloud_trainer.layout import ReplicaLayout
from crosscloud_trainer.outer import OuterState
from crosscloud_trainer.schedule import ends_window
from crosscloud_trainer.shard import Digest, Shard, digest


class DiLoCo:
    """The algorithm on one rank. `on_step` is called on every rank of the replica after every inner step."""

    rewrites_weights = True

    def __init__(
        self,
        layout: ReplicaLayout,
        shard: Shard,
        group: StageGroup,
        replica: ReplicaTotals,
        exchange: RoundExchange,
        codec: Codec,
        *,
        inner_steps: int,
        settings: OuterOptimizer,
        error_feedback: bool = True,
    ) -> None:
        self.round = 0
        self.outer = OuterState.at(shard.copy())
        self._shard = shard
        self._replica = replica
        self._exchange = exchange
        self._inner_steps = inner_steps
        self._settings = settings
        self._holding = Holding(layout, group, codec, shard.device, error_feedback=error_feedback)
        self._steps = 0
        self._tokens = 0
        self.digest = agree(self._replica, [], self._digest())[1]

    @property
    def residual(self) -> torch.Tensor:
        """What encoding has lost so far of the cells that this rank holds, flat fp32; empty without error
        feedback.
        """
        return self._holding.residual

    def weights(self) -> torch.Tensor:
        """This rank's part of the weights that all replicas have, compact flat fp32."""
        return self.outer.weights

    def resume(self, number: int, steps: int, _digest: int) -> None:
        """Goes on after round `number` and inner step `steps`, once the outer state was overwritten by a stored one;
        the shard follows it. Collective.
        """
        self.round, self._steps, self._tokens = number, steps, 0
        self._shard.write(self.outer.weights)
        self.digest = agree(self._replica, [], self._digest())[1]

    def on_step(self, tokens: int, *, last: bool = False) -> RoundReport | None:
        """Counts an inner step (one that DeepSpeed skipped too) in which this rank saw `tokens` tokens.

        At the end of a window, which the `last` step of a run ends early, it runs the round and returns its
        report: the shard's fp32 weights were rewritten then, and the working weights must follow. Raises what the
        exchange raises, after which the attempt must end.
        """
        self._steps += 1
        self._tokens += tokens
        if not last and not ends_window(self._steps, self._inner_steps):
            return None
        return self._end_window()

    def finish(self) -> RoundReport | None:
        """The round of a window that the end of the run cuts short; None where no step has been done since the last.
        As `on_step`, where one didn't know which step was the last.
        """
        return None if ends_window(self._steps, self._inner_steps) else self._end_window()

    def _end_window(self) -> RoundReport:
        self.round += 1
        tokens, self._tokens = self._tokens, 0
        if len(self._exchange.view) == 1:
            return self._alone(tokens)
        return self._together(tokens)

    def _alone(self, tokens: int) -> RoundReport:
        """A round in a view of one: the outer weights become the local ones."""
        for start, stop in self._shard.pieces():
            self.outer.weights[start:stop].copy_(self._shard.elements_at(start, stop))
        (tokens,), self.digest = agree(self._replica, [tokens], self._digest())
        weights = {self._exchange.replica: tokens}
        return RoundReport(self.round, self.digest, weights, 0, refused=False, applied=True)

    def _together(self, tokens: int) -> RoundReport:
        usable = all(encodable(self._update(start, stop)) for start, stop in self._shard.pieces())
        refusals, tokens = self._replica.total([int(not usable), tokens])
        payload = None
        if not refusals and tokens:
            payload = self._holding.encode(self._holding.gather(self._update))
        request = RoundRequest(self.round, tokens if payload else 0, payload, self.digest)
        answer = self._exchange.exchange(request)
        applied = self._apply(answer.result)
        self._shard.write(self.outer.weights)
        return RoundReport(
            self.round,
            self.digest,
            answer.weights,
            payload.nbytes if payload else 0,
            refused=refusals > 0,
            applied=applied,
        )

    def _update(self, start: int, stop: int) -> torch.Tensor:
        """The pseudo-gradient of some elements of this rank."""
        return self.outer.weights[start:stop].sub(self._shard.elements_at(start, stop))

    def _apply(self, result: EncodedCells | None) -> bool:
        """Takes the agreed result of this rank's cells into the outer state; False if all replicas skip the
        round.
        """
        agreed = None if result is None else self._holding.spread(result)
        found, usable = Digest(self._shard.index, self._shard.intervals), agreed is not None
        for start, stepped in self._stepped(agreed):
            usable = usable and stepped.finite()
            found.add(0, start, stepped.weights)
            found.add(1, start, stepped.momentum)
        (unusable,), new_digest = agree(self._replica, [int(not usable)], found.value)
        self._exchange.prepared(self.round)
        if unusable:
            return False
        for start, stepped in self._stepped(agreed):
            self.outer.part(start, stepped.weights.numel()).become(stepped)
        self.digest = new_digest
        return True

    def _stepped(self, agreed: Agreed | None) -> Iterator[tuple[int, OuterState]]:
        """The outer state after the round, by pieces: the first one's place, and the state from there on."""
        for start, gradient in agreed.parts() if agreed else ():
            yield start, self.outer.part(start, gradient.numel()).stepped(gradient, self._settings)

    def _digest(self) -> int:
        return digest(self._shard.index, self._shard.intervals, [self.outer.weights, self.outer.momentum])
