"""Small numbers side by side in bytes, the lowest bit of the first number in the lowest bit of the first byte."""

import torch
from torch.nn.functional import pad


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers below 2**bits, shape (rows, n), as rows of ceil(n * bits / 8) bytes; spare bits are 0."""
    rows, count = numbers.shape
    places = torch.arange(bits, device=numbers.device)
    ones = ((numbers.unsqueeze(-1) >> places) & 1).to(torch.uint8).view(rows, count * bits)
    eights = pad(ones, (0, -count * bits % 8)).view(rows, -(-count * bits // 8), 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=numbers.device)
    return torch.sum(eights * weights, dim=-1, dtype=torch.uint8)


def unpack(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` numbers of each row of bytes, as int64: the inverse of `pack`."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    ones = ((data.unsqueeze(-1) >> places) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits, device=data.device)
    return torch.sum(ones.reshape(len(data), count, bits) * weights, dim=-1)
