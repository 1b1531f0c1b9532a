"""Two bytes per value: the upper half of the fp32 number, rounded to nearest, ties to even; little endian."""

import torch

from crosscloud_trainer.compress.codec import NOT_FINITE, Lengths, check_values, encodable
from crosscloud_trainer.sizes import CodecSpec


class BF16Codec:
    """Keeps sign, exponent and 7 bits of the fraction: an error of 2**-8 of each value at most, -0.0 stays -0.0."""

    spec = CodecSpec("BF16")
    lossless = False
    decay = 1.0

    def encode(self, values: torch.Tensor, lengths: Lengths) -> torch.Tensor:  # noqa: ARG002
        check_values(values)
        return values.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, lengths: Lengths) -> torch.Tensor:  # noqa: ARG002
        # A copy, since bytes can be seen as numbers only where they are aligned.
        return data.clone().view(torch.bfloat16).to(torch.float32)

    def fault(self, data: torch.Tensor, lengths: Lengths) -> str:
        return "" if encodable(self.decode(data, lengths)) else NOT_FINITE
