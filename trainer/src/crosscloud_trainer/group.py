"""The ranks of one replica and the few collectives that a round needs among them, over the cluster's own
network.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class ReplicaTotals(Protocol):
    """Sums over the ranks of a replica, of all its stages: each is called by all of them, in the same order."""

    def total(self, counts: Sequence[int]) -> list[int]:
        """Sums over all ranks; each count is from 0 to 2**48."""
        ...

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sums over all ranks; fp64, equally long on all of them, on the device that `values` are on. May
        overwrite `values`.
        """
        ...


class StageGroup(Protocol):
    """The ranks of one stage, which share cells."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[int]) -> list[torch.Tensor]:
        """Sends `outgoing[r]` to each rank r and returns what came from each, `incoming[r]` elements; flat,
        of one type.
        """
        ...


class TorchGroup:
    """A process group of torch.distributed, gloo or NCCL; the default one if none is given."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def total(self, counts: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(counts), dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, group=self._group)
        return [int(count) for count in tensor.tolist()]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        told = values.to(self._device)
        dist.all_reduce(told, group=self._group)
        return told.to(values.device)

    def swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[int]) -> list[torch.Tensor]:
        sent = torch.cat([part.to(self._device) for part in outgoing])
        received = torch.empty(sum(incoming), dtype=sent.dtype, device=self._device)
        sizes = [part.numel() for part in outgoing]
        dist.all_to_all_single(received, sent, list(incoming), sizes, group=self._group)
        return list(torch.split(received, list(incoming)))
