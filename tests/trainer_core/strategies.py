"""Models and layouts for property tests, and the shard rules of each ZeRO stage."""

import numpy as np
import torch
from hypothesis import strategies as st

from crosscloud_trainer.compress.feedback import ValuesOf
from crosscloud_trainer.layout import Index, Interval, ReplicaLayout, contiguous_shard, dealt_shard, split_shard

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
    stage = draw(st.sampled_from([0, 1, 3]))
    if stage == 0:
        shards = [dealt_shard(index, order, ranks, rank) for rank in range(ranks)]
    elif stage == 3:
        shards = [split_shard(index, order, ranks, rank) for rank in range(ranks)]
    else:
        alignment = draw(st.sampled_from([1, 4, 4096]))
        size = max(1, -(-index.elements // (ranks * alignment)) * alignment)
        shards = [contiguous_shard(index, order, size, rank) for rank in range(ranks)]
    return ReplicaLayout(index, tuple(shards))


def of(values: torch.Tensor) -> ValuesOf:
    """The values of each stretch, from those of all cells."""
    return lambda stretch: values[stretch.values]


def compact(vector: np.ndarray, index: Index, shard: tuple[Interval, ...]) -> np.ndarray:
    """A rank's compact part of a full-model vector in canonical order."""
    firsts = index.first_elements
    parts = [vector[firsts[i.parameter] + i.start : firsts[i.parameter] + i.stop] for i in shard]
    return np.concatenate([vector[:0], *parts])


def whole(parts: list[np.ndarray], layout: ReplicaLayout) -> np.ndarray:
    """The full-model vector in canonical order from the ranks' compact parts."""
    firsts = layout.index.first_elements
    vector = np.full(layout.index.elements, np.nan, dtype=np.float32)
    for part, shard in zip(parts, layout.shards, strict=True):
        position = 0
        for interval in shard:
            start = firsts[interval.parameter] + interval.start
            vector[start : start + interval.elements] = part[position : position + interval.elements]
            position += interval.elements
        assert position == len(part)
    return vector
