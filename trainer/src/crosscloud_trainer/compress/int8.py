"""Eight bits per value, with one fp32 scale for each block of 256 values of a cell.

Symmetric absmax quantisation, block by block as in Dettmers et al., "8-bit Optimizers via Block-wise
Quantization" (2022), with linear steps: scale = max |x| / 127, code = x / scale rounded half to even. The
scale is fp32 and not bf16, since it costs 1.6 % of the bytes and makes the largest value of each block exact
to 2**-24.

A cell's bytes: its scales (fp32, little endian), then its codes (int8). Only single IEEE operations, each
rounded once, are used, so that every machine makes the same bytes. Blocks whose scale would be below the
smallest normal number become zeros: there machines may differ in how they treat subnormals. Error feedback
sends such values later, once they add up.
"""

import torch

from crosscloud_trainer.compress.codec import MAX_MAGNITUDE, NOT_FINITE, Lengths, check_values, runs, sizes_of
from crosscloud_trainer.sizes import FP32_BYTES, INT8_BLOCK, CodecSpec

LEVELS = 127
SMALLEST_SCALE = 2.0**-126


class Int8Codec:
    spec = CodecSpec("Int8")
    lossless = False
    decay = 1.0

    def encode(self, values: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        check_values(values)
        total = int(sizes_of(self.spec, lengths).sum())
        data = torch.empty(total, dtype=torch.uint8, device=values.device)
        read = written = 0
        for cells, length in runs(lengths):
            source = values[read : read + cells * length].view(cells, length)
            width = length + FP32_BYTES * _blocks(length)
            target = data[written : written + cells * width].view(cells, width)
            _encode_run(source, target)
            read += cells * length
            written += cells * width
        return data

    def decode(self, data: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        values = torch.empty(int(lengths.sum()), dtype=torch.float32, device=data.device)
        read = written = 0
        for cells, length in runs(lengths):
            width = length + FP32_BYTES * _blocks(length)
            source = data[read : read + cells * width].view(cells, width)
            scales = _scales(source, length)
            codes = source[:, FP32_BYTES * _blocks(length) :].view(torch.int8)
            target = values[written : written + cells * length].view(cells, length)
            for block, part in _parts(length):
                target[:, part].view(cells, -1, _width(part)).copy_(
                    codes[:, part].reshape(cells, -1, _width(part))
                ).mul_(scales[:, block].unsqueeze(-1))
            read += cells * width
            written += cells * length
        return values

    def fault(self, data: torch.Tensor, lengths: Lengths) -> str:
        read = 0
        limit = MAX_MAGNITUDE / LEVELS
        for cells, length in runs(lengths):
            width = length + FP32_BYTES * _blocks(length)
            scales = _scales(data[read : read + cells * width].view(cells, width), length)
            if not bool(((scales >= 0) & (scales <= limit)).all()):
                return NOT_FINITE
            read += cells * width
        return ""


def _encode_run(source: torch.Tensor, target: torch.Tensor) -> None:
    """Encodes cells of one length: (cells, length) fp32 into (cells, bytes) uint8."""
    cells, length = source.shape
    blocks = _blocks(length)
    scales = torch.empty((cells, blocks), dtype=torch.float32, device=source.device)
    codes = target[:, FP32_BYTES * blocks :].view(torch.int8)
    levels = torch.tensor(float(LEVELS), device=source.device)
    for block, part in _parts(length):
        values = source[:, part].view(cells, -1, _width(part))
        # A division by a Python number may become a product with its reciprocal, which rounds twice.
        scale = values.abs().amax(dim=-1) / levels
        scale = torch.where(scale >= SMALLEST_SCALE, scale, 0.0)
        divisor = torch.where(scale > 0, scale, torch.inf).unsqueeze(-1)
        code = (values / divisor).round_().clamp_(-LEVELS, LEVELS)
        codes[:, part] = code.view(cells, -1).to(torch.int8)
        scales[:, block] = scale
    target[:, : FP32_BYTES * blocks] = scales.view(torch.uint8)


def _blocks(length: int) -> int:
    return -(-length // INT8_BLOCK)


def _parts(length: int) -> list[tuple[slice, slice]]:
    """The whole blocks of a cell and its last short one, as slices of its blocks and of its values."""
    whole = length // INT8_BLOCK
    cut = whole * INT8_BLOCK
    parts = []
    if whole:
        parts.append((slice(0, whole), slice(0, cut)))
    if cut < length:
        parts.append((slice(whole, whole + 1), slice(cut, length)))
    return parts


def _width(part: slice) -> int:
    """Values per block in a part that `_parts` gave."""
    elements = int(part.stop - part.start)
    return min(elements, INT8_BLOCK)


def _scales(encoded: torch.Tensor, length: int) -> torch.Tensor:
    """Scales of cells of one length, shape (cells, blocks), from their bytes."""
    # A flat copy, since bytes can be seen as fp32 only where they are aligned.
    scales = encoded[:, : FP32_BYTES * _blocks(length)].flatten().clone()
    return scales.view(torch.float32).view(len(encoded), _blocks(length))
