"""Encoded cells with their numbers: what ranks hand to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from crosscloud_trainer.compress.codec import Codec, Lengths, Stretch, check_payload, put, sizes_of, stretches, take
from crosscloud_trainer.layout import Ids, Index


@dataclass(frozen=True)
class EncodedCells:
    """Cells (sorted numbers, each once) and their bytes end to end, in main memory."""

    codec: Codec
    ids: Ids
    lengths: Lengths
    data: torch.Tensor

    @staticmethod
    def received(codec: Codec, index: Index, ids: Ids, buffer: bytes | bytearray | memoryview) -> "EncodedCells":
        """Cells from bytes that came from elsewhere: raises PayloadError unless they may be decoded. A bytearray is
        not copied and must stay as it is.
        """
        if isinstance(buffer, bytearray) and buffer:
            data = torch.frombuffer(buffer, dtype=torch.uint8)
        else:
            data = torch.empty(len(buffer), dtype=torch.uint8)
            data.numpy()[:] = np.frombuffer(buffer, dtype=np.uint8)
        lengths = index.lengths(ids)
        check_payload(codec, data, lengths)
        return EncodedCells(codec, ids, lengths, data)

    @staticmethod
    def merged(parts: Sequence["EncodedCells"]) -> "EncodedCells":
        """One batch of all parts, which have no cell in common; there is at least one part. Where only one has cells,
        that is it.
        """
        parts = [part for part in parts if len(part.ids)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        ids = np.concatenate([part.ids for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        order = np.argsort(ids, kind="stable")
        ids, lengths = ids[order], lengths[order]
        if len(ids) and bool((np.diff(ids) <= 0).any()):
            raise ValueError("parts to merge have cells in common")
        codec = parts[0].codec
        sizes = sizes_of(codec.spec, lengths)
        data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        for part in parts:
            put(data, sizes, np.searchsorted(ids, part.ids), part.data)
        return EncodedCells(codec, ids, lengths, data)

    @cached_property
    def sizes(self) -> Lengths:
        """Bytes of each cell."""
        return sizes_of(self.codec.spec, self.lengths)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The cells in stretches that are to be worked on together."""
        return stretches(self.codec.spec, self.lengths)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def buffer(self) -> memoryview:
        """The bytes, without a copy."""
        return self.data.numpy().data

    def select(self, ids: Ids) -> "EncodedCells":
        """The cells `ids`, all of which are in this batch (ValueError if not); the batch itself if these are all."""
        if np.array_equal(ids, self.ids):
            return self
        positions = np.searchsorted(self.ids, ids)
        if len(ids) and (positions[-1] >= len(self.ids) or bool((self.ids[positions] != ids).any())):
            raise ValueError("cells to select are not in the batch")
        return EncodedCells(self.codec, ids, self.lengths[positions], take(self.data, self.sizes, positions))

    def decode(self) -> torch.Tensor:
        """The cells' values, flat fp32, end to end."""
        return self.codec.decode(self.data, self.lengths)
