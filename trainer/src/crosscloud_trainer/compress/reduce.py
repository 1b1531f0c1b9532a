"""The arithmetic of an owner: payloads of all replicas in, one result for all replicas out.

Values are never added in encoded form. The owner decodes each payload, weights it by its replica's tokens,
adds in fp32 in the order of replica numbers, and encodes the mean once; that second encoding has error
feedback of its own.
"""

from collections.abc import Mapping

import numpy as np
import torch

from crosscloud_trainer.compress.cells import EncodedCells
from crosscloud_trainer.compress.codec import MAX_MAGNITUDE, Codec, Stretch
from crosscloud_trainer.compress.feedback import ErrorFeedback
from crosscloud_trainer.layout import Ids, Index


def weighted_mean(values: Mapping[int, torch.Tensor], weights: Mapping[int, int]) -> torch.Tensor:
    """Mean of flat fp32 tensors by replica number, weighted by tokens; replicas of weight 0 need no values.

    Each weight is the fp32 nearest to tokens / all tokens; products and sums are rounded one by one, in order
    of replica numbers. The result is limited to `MAX_MAGNITUDE`. ValueError if no replica has a weight.
    """
    total = sum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"weights are {dict(weights)}; none may be negative and their sum must be positive")
    mean: torch.Tensor | None = None
    for replica in sorted(weights):
        if not weights[replica]:
            continue
        share = float(np.float32(weights[replica] / total))
        term = values[replica].mul(share)
        mean = term if mean is None else mean.add_(term)
    assert mean is not None
    return mean.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)


class Reducer:
    """Adds the cells that one rank owns for the whole view, and keeps the residuals of the second encoding."""

    def __init__(self, codec: Codec, index: Index, owned: Ids, *, error_feedback: bool) -> None:
        self.owned = owned
        self._codec = codec
        self._feedback = ErrorFeedback(codec, index.lengths(owned), torch.device("cpu"), enabled=error_feedback)

    @property
    def residual(self) -> torch.Tensor:
        """Flat fp32 over the owned cells; empty where none is kept."""
        return self._feedback.residual

    def reduce(self, payloads: Mapping[int, EncodedCells | None], weights: Mapping[int, int]) -> EncodedCells:
        """The result of the owned cells, from `payloads` of exactly these cells by replica of the view.

        None stands for a replica that refused its update; its weight is 0. Call it once per round, since it changes
        the residuals: keep the result to send it again. ValueError if payloads and weights don't fit.
        """
        given = {replica: cells for replica, cells in payloads.items() if cells is not None}
        if set(payloads) != set(weights) or set(given) != {r for r, weight in weights.items() if weight}:
            raise ValueError(f"payloads of {sorted(given)} don't fit the weights {dict(weights)}")
        first = next(iter(given.values()))
        if any(not np.array_equal(cells.ids, self.owned) for cells in given.values()):
            raise ValueError("payloads have other cells than those that this rank owns")

        def mean(stretch: Stretch) -> torch.Tensor:
            parts = {replica: cells.data[stretch.data] for replica, cells in given.items()}
            decoded = {replica: self._codec.decode(data, stretch.lengths) for replica, data in parts.items()}
            return weighted_mean(decoded, weights)

        return EncodedCells(self._codec, self.owned, first.lengths, self._feedback.encode(mean))
