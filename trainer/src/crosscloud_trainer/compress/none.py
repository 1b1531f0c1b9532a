"""No compression: fp32, little endian."""

import sys

import torch

from crosscloud_trainer.compress.codec import NOT_FINITE, Lengths, check_values, encodable
from crosscloud_trainer.sizes import CodecSpec

if sys.byteorder != "little":
    raise ImportError("the codecs write little-endian numbers by copying memory; this machine is big-endian")


class NoneCodec:
    """Sends values as they are: 4 bytes each, and -0.0 stays -0.0."""

    spec = CodecSpec("None")
    lossless = True
    decay = 1.0

    def encode(self, values: torch.Tensor, lengths: Lengths) -> torch.Tensor:  # noqa: ARG002
        check_values(values)
        return values.contiguous().clone().view(torch.uint8)

    def decode(self, data: torch.Tensor, lengths: Lengths) -> torch.Tensor:  # noqa: ARG002
        return data.clone().view(torch.float32)

    def fault(self, data: torch.Tensor, lengths: Lengths) -> str:
        return "" if encodable(self.decode(data, lengths)) else NOT_FINITE
