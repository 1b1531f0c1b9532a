"""Causal language modelling: each token is predicted from those before it in its sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosscloud_trainer.data.corpus import Corpus
from crosscloud_trainer.data.split import Split, evaluation_share

EVALUATION_SEQUENCES = 128  # enough for a steady mean, few enough to cost no more than a few steps


class CausalTask:
    """Batches of one rank. A batch is what a `transformers` model takes: ids and labels, shape (n, sequence_length)."""

    def __init__(self, corpus: Corpus, split: Split, replica: int, rank: int, ranks: int) -> None:
        self._corpus = corpus
        self._split = split
        self._replica, self._rank, self._ranks = replica, rank, ranks

    def batch(self, step: int, device: torch.device) -> dict[str, torch.Tensor]:
        """This rank's share of inner step `step` (from 0)."""
        chosen = self._split.of_rank(step, self._replica, self._rank, self._ranks)
        return _as_batch(self._corpus.train[chosen], device)

    def evaluate(self, model: Any, device: torch.device) -> tuple[float, int]:
        """(sum of this rank's validation losses, sequences that it saw); dropout is off meanwhile."""
        share = evaluation_share(len(self._corpus.validation), EVALUATION_SEQUENCES, self._rank, self._ranks)
        size = self._split.batch_size // self._ranks
        total = 0.0
        model.eval()
        with torch.no_grad():
            for first in range(0, len(share), size):
                chosen = share[first : first + size]
                batch = _as_batch(self._corpus.validation[chosen], device)
                total += float(model(**batch).loss) * len(chosen)
        model.train()
        return total, len(share)


def _as_batch(tokens: NDArray[np.uint16], device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    return {"input_ids": ids, "labels": ids}
