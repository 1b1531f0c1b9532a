"""Causal language modelling: each token is predicted from those before it in its sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from crosscloud_trainer.data.corpus import Corpus
from crosscloud_trainer.data.split import Split, evaluation_share

EVALUATION_SEQUENCES = 128  # enough for a steady mean, few enough to cost no more than a few steps


class CausalTask:
    """Batches of one rank. A batch is what a `transformers` model takes: ids and labels, shape (n, sequence_length)."""

    def __init__(self, corpus: Corpus, split: Split, replica: int, rank: int, ranks: int, micro: int) -> None:
        """`micro` is the number of sequences in one micro-batch of a rank."""
        self._micro = micro
        self._corpus = corpus
        self._split = split
        self._replica, self._rank, self._ranks = replica, rank, ranks

    def micro_batches(self, step: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's share of inner step `step` (from 0), a micro-batch at a time."""
        chosen = self._split.of_rank(step, self._replica, self._rank, self._ranks)
        for first in range(0, len(chosen), self._micro):
            yield _as_batch(self._corpus.train[chosen[first : first + self._micro]], device)

    def evaluate(
        self, losses_of: Callable[[Sequence[dict[str, torch.Tensor]]], list[float]], device: torch.device
    ) -> tuple[float, int]:
        """(sum of this rank's validation losses, sequences that it saw); (0, 0) where `losses_of` tells none.

        All ranks go through the model equally often, since under ZeRO 3 each time is collective.
        """
        shares = [
            evaluation_share(len(self._corpus.validation), EVALUATION_SEQUENCES, rank, self._ranks)
            for rank in range(self._ranks)
        ]
        share, longest = shares[self._rank], max(map(len, shares))
        chosen = [share[first : first + self._micro] for first in range(0, longest, self._micro)]
        batches = [_as_batch(self._corpus.validation[part if len(part) else shares[0][:1]], device) for part in chosen]
        losses = losses_of(batches)
        if not losses:
            return 0.0, 0
        return sum(loss * len(part) for loss, part in zip(losses, chosen, strict=True)), len(share)


def _as_batch(tokens: NDArray[np.uint16], device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    return {"input_ids": ids, "labels": ids}
