"""Models and layouts for property tests, and the shard rules of each ZeRO stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from crosscloud_trainer.compress.feedback import ValuesOf
from crosscloud_trainer.layout import (
    HolderMap,
    Index,
    Interval,
    ReplicaLayout,
    contiguous_shard,
    dealt_shard,
    split_shard,
)

names = st.text(alphabet="abz.0_é", min_size=1, max_size=6)
element_counts = st.one_of(st.integers(0, 9), st.sampled_from([4095, 4096, 4097, 8192]), st.integers(10, 20_000))
models = st.dictionaries(names, element_counts, min_size=1, max_size=6)


@st.composite
def layouts(draw: st.DrawFn, model: dict[str, int], most_ranks: int = 6) -> ReplicaLayout:
    """A replica of the model with any number of ranks, ZeRO 0, 1, 2 (one rule) or 3, parameters in any order,
    any padding.
    """
    index = Index.of(model)
    order = draw(st.permutations(sorted(model)))
    ranks = draw(st.integers(1, most_ranks))
    return ReplicaLayout(index, draw(_shards(index, order, ranks, draw(st.sampled_from([0, 1, 3])))))


@st.composite
def _shards(
    draw: st.DrawFn, index: Index, order: Sequence[str], ranks: int, zero: int
) -> tuple[tuple[Interval, ...], ...]:
    """Those of the ranks that share the parameters in `order`."""
    if zero == 0:
        return tuple(dealt_shard(index, order, ranks, rank) for rank in range(ranks))
    if zero == 3:
        return tuple(split_shard(index, order, ranks, rank) for rank in range(ranks))
    alignment = draw(st.sampled_from([1, 4, 4096]))
    elements = sum(index.parameters[index.numbers[name]].elements for name in order)
    size = max(1, -(-elements // (ranks * alignment)) * alignment)
    return tuple(contiguous_shard(index, order, size, rank) for rank in range(ranks))


@dataclass(frozen=True)
class Stages:
    """A replica: the layout of each of its stages. Ranks are numbered through, one stage after the other."""

    layouts: tuple[ReplicaLayout, ...]

    @property
    def index(self) -> Index:
        return self.layouts[0].index

    @property
    def shards(self) -> tuple[tuple[Interval, ...], ...]:
        """Of all ranks."""
        return tuple(shard for layout in self.layouts for shard in layout.shards)

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @property
    def holders(self) -> HolderMap:
        """Of all cells, as those who met all stages know them."""
        joined, first = HolderMap.none(self.index.cells), 0
        for layout in self.layouts:
            joined = joined.joined(layout.holders.shifted(first))
            first += layout.ranks
        return joined


@st.composite
def cut_layouts(draw: st.DrawFn, model: dict[str, int], most_ranks: int = 6) -> Stages:
    """A replica whose parameters are shared out over any number of stages, as many ranks in each."""
    index = Index.of(model)
    order = draw(st.permutations(sorted(model)))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=most_ranks - 1)) if len(order) > 1 else [])
    parts = [order[first:stop] for first, stop in pairwise([0, *cuts, len(order)])]
    ranks = draw(st.integers(1, max(1, most_ranks // len(parts))))
    zero = draw(st.sampled_from([0, 1, 3]))
    return Stages(
        tuple(
            ReplicaLayout(
                index,
                draw(_shards(index, part, ranks, zero)),
                None if len(parts) == 1 else frozenset(index.numbers[name] for name in part),
            )
            for part in parts
        )
    )


def of(values: torch.Tensor) -> ValuesOf:
    """The values of each stretch, from those of all cells."""
    return lambda stretch: values[stretch.values]


def compact(vector: np.ndarray, index: Index, shard: tuple[Interval, ...]) -> np.ndarray:
    """A rank's compact part of a full-model vector in canonical order."""
    firsts = index.first_elements
    parts = [vector[firsts[i.parameter] + i.start : firsts[i.parameter] + i.stop] for i in shard]
    return np.concatenate([vector[:0], *parts])


def whole(parts: list[np.ndarray], stages: Stages) -> np.ndarray:
    """The full-model vector in canonical order from the compact parts of a replica's ranks."""
    firsts = stages.index.first_elements
    vector = np.full(stages.index.elements, np.nan, dtype=np.float32)
    for part, shard in zip(parts, stages.shards, strict=True):
        position = 0
        for interval in shard:
            start = firsts[interval.parameter] + interval.start
            vector[start : start + interval.elements] = part[position : position + interval.elements]
            position += interval.elements
        assert position == len(part)
    return vector
