"""Causal language modelling: each token is predicted from those before it in its document, or in its sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from crosscloud_trainer.contract import Packing
from crosscloud_trainer.data.corpus import Corpus
from crosscloud_trainer.data.sequences import Batch
from crosscloud_trainer.data.split import Split, evaluation_share

EVALUATION_SEQUENCES = 128  # enough for a steady mean, few enough to cost no more than a few steps
_NOT_PREDICTED = -100  # a label that the loss of `transformers` models leaves out


@dataclass(frozen=True)
class MicroBatch:
    """What a `transformers` model takes, ids and labels and where documents are kept apart positions too, all of shape
    (sequences, sequence_length); and what the mean loss that it gives for them counts for.

    With `weight` the mean over all micro-batches of a replica's step is the mean over the tokens that are predicted.
    """

    inputs: dict[str, torch.Tensor]
    weight: float


class CausalTask:
    """Micro-batches of one rank."""

    def __init__(self, corpus: Corpus, split: Split, packing: Packing, rank: int, ranks: int, micro: int) -> None:
        """`micro` is the number of sequences in one micro-batch of a rank."""
        self._corpus, self._split, self._micro = corpus, split, micro
        self._apart = packing is Packing.DOCUMENTS
        self._rank, self._ranks = rank, ranks

    def micro_batches(self, step: int, device: torch.device) -> Iterator[MicroBatch]:
        """This rank's share of inner step `step` (from 0), a micro-batch at a time."""
        rows = self._split.of_replica(step)
        mean = self._predicted(self._corpus.starts(rows)) * self._micro / len(rows)
        share = len(rows) // self._ranks
        for first in range(self._rank * share, (self._rank + 1) * share, self._micro):
            batch = self._corpus.take(rows[first : first + self._micro])
            yield MicroBatch(self._inputs(batch, device), self._predicted(batch[1]) / mean)

    def evaluate(
        self, losses_of: Callable[[Sequence[Mapping[str, torch.Tensor]]], list[float]], device: torch.device
    ) -> tuple[float, int]:
        """(sum of the validation losses of all tokens that this rank has predicted, their number); (0, 0) where
        `losses_of` tells none.

        All ranks go through the model equally often, since under ZeRO 3 each time is collective.
        """
        held = self._corpus.validation
        shares = [evaluation_share(len(held), EVALUATION_SEQUENCES, rank, self._ranks) for rank in range(self._ranks)]
        share, longest = shares[self._rank], max(map(len, shares))
        chosen = [share[first : first + self._micro] for first in range(0, longest, self._micro)]
        batches = [held.read((part if len(part) else shares[0][:1]).tolist()) for part in chosen]
        losses = losses_of([self._inputs(batch, device) for batch in batches])
        if not losses:
            return 0.0, 0
        counts = [self._predicted(batch[1]) if len(part) else 0 for batch, part in zip(batches, chosen, strict=True)]
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)), sum(counts)

    def _predicted(self, starts: NDArray[np.bool_]) -> int:
        """Tokens of these sequences that are predicted: none is from nothing, nor from another document."""
        inner = starts[:, 1:]
        return int(inner.size - inner.sum()) if self._apart else int(inner.size)

    def _inputs(self, batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
        ids, starts = torch.from_numpy(batch[0].astype(np.int64)).to(device), batch[1]
        if not self._apart:
            return {"input_ids": ids, "labels": ids}
        labels = ids.masked_fill(torch.from_numpy(starts).to(device), _NOT_PREDICTED)
        return {"input_ids": ids, "labels": labels, "position_ids": torch.from_numpy(positions(starts)).to(device)}


def positions(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The place of each token in its document, or from the sequence's start if the document began before it; both of
    shape (sequences, sequence_length).

    Causal models of `transformers` let a token see back to where the positions last began anew, and no further.
    """
    places = np.broadcast_to(np.arange(starts.shape[1], dtype=np.int64), starts.shape)
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
