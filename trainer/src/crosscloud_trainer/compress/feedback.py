"""Error feedback: what an encoding lost is kept and added to the next values (Seide et al. 2014; Karimireddy
et al. 2019).
"""

from collections.abc import Callable

import torch

from crosscloud_trainer.compress.codec import MAX_MAGNITUDE, Codec, Lengths, Stretch, check_values, sizes_of, stretches


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


ValuesOf = Callable[[Stretch], torch.Tensor]
"""The values of a stretch, flat fp32, end to end."""


class ErrorFeedback:
    """Any codec, with a residual for each of a fixed set of cells; without residuals if the codec is lossless
    or `enabled` is off.
    """

    def __init__(self, codec: Codec, lengths: Lengths, device: torch.device, *, enabled: bool = True) -> None:
        self._codec = codec
        self._keeps = enabled and not codec.lossless
        self._stretches = stretches(codec.spec, lengths)
        self._bytes = int(sizes_of(codec.spec, lengths).sum())
        self.residual = torch.zeros(int(lengths.sum()) if self._keeps else 0, device=device)
        """Flat fp32, the cells' residuals end to end; empty where none are kept."""

    def encode(self, values: ValuesOf) -> torch.Tensor:
        """The bytes of all cells, in main memory; keeps what was lost. `values` are on the device of the residuals.

        Raises NonFiniteError for a stretch that can't be encoded, with the residuals of those before it changed:
        whoever wants to go on then looks first (`encodable`).
        """
        data = torch.empty(self._bytes, dtype=torch.uint8)
        for stretch in self._stretches:
            if self._keeps:
                residual = self.residual[stretch.values]
                data[stretch.data], left = encode_with_residual(self._codec, values(stretch), stretch.lengths, residual)
                residual.copy_(left)
            else:
                data[stretch.data] = self._codec.encode(values(stretch), stretch.lengths)
        return data

    def take_back(self, values: ValuesOf, data: torch.Tensor) -> None:
        """Undoes an `encode` of values whose bytes nobody applied: residuals are as before, but for rounding."""
        if not self._keeps:
            return
        for stretch in self._stretches:
            residual = self.residual[stretch.values]
            decoded = self._codec.decode(data[stretch.data].to(residual.device), stretch.lengths)
            residual.add_(decoded).sub_(values(stretch)).div_(self._codec.decay).clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
