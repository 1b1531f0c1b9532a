"""Error feedback: what an encoding lost is kept and added to the next values (Seide et al. 2014; Karimireddy
et al. 2019).
"""

import numpy as np
import torch

from crosscloud_trainer.compress.codec import MAX_MAGNITUDE, Codec, Lengths, check_values, put, take
from crosscloud_trainer.layout import Ids


def encode_with_residual(
    codec: Codec, values: torch.Tensor, lengths: Lengths, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes `values + decay * residual`; returns the bytes and the new residual. Pure.

    Raises NonFiniteError if `values` can't be encoded. The sum is limited to `MAX_MAGNITUDE`, so the residual
    stays finite whatever is added up.
    """
    check_values(values)
    wanted = residual.mul(codec.decay).add_(values).clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    data = codec.encode(wanted, lengths)
    return data, wanted.sub_(codec.decode(data, lengths))


class ErrorFeedback:
    """Any codec, with a residual for each of a fixed set of cells; without residuals if the codec is lossless
    or `enabled` is off.
    """

    def __init__(self, codec: Codec, lengths: Lengths, device: torch.device, *, enabled: bool = True) -> None:
        self._codec = codec
        self._lengths = lengths
        self._keeps = enabled and not codec.lossless
        self.residual = torch.zeros(int(lengths.sum()) if self._keeps else 0, device=device)
        """Flat fp32, the cells' residuals end to end; empty where none are kept."""

    def encode(self, values: torch.Tensor, positions: Ids | None = None) -> torch.Tensor:
        """Encodes the cells at `positions` of the set (sorted; all if not given), and keeps what was lost.

        Raises NonFiniteError with the residuals as they were.
        """
        if positions is None:
            positions = np.arange(len(self._lengths))
        lengths = self._lengths[positions]
        if not self._keeps:
            return self._codec.encode(values, lengths)
        residual = take(self.residual, self._lengths, positions)
        data, left = encode_with_residual(self._codec, values, lengths, residual)
        put(self.residual, self._lengths, positions, left)
        return data

    def take_back(self, values: torch.Tensor, data: torch.Tensor) -> None:
        """Undoes an `encode` of all cells whose bytes nobody applied: residuals are as before, but for rounding."""
        if self._keeps:
            decoded = self._codec.decode(data, self._lengths)
            self.residual.add_(decoded).sub_(values).div_(self._codec.decay).clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
