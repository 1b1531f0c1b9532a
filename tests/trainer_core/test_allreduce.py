"""Gradients of replicas with unlike layouts, each rank a thread, against numpy on the whole model."""

import math
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from trainer_core.local_exchange import Seat, StoreExchange
from trainer_core.reference import decay, through
from trainer_core.strategies import Stages, compact, cut_layouts, models, whole

from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.compress import codec_named
from crosscloud_trainer.layout import Index, ReplicaLayout, contiguous_shard, split_shard
from crosscloud_trainer.shard import Shard
from crosscloud_trainer.sizes import CODECS

pytestmark = pytest.mark.usefixtures("short_stretches")
f32 = np.float32


class Rank(threading.Thread):
    """One rank of one replica: gives it the gradient of each step, or None for a step that isn't finite; a list of
    them has one for each stage.
    """

    def __init__(self, seat, exchange, codec, start, gradients, tokens, more):
        super().__init__(daemon=True)
        self.seat, self.index, self.intervals = seat, seat.layout.index, seat.intervals
        self.gradients = [step[seat.stage] if isinstance(step, list) else step for step in gradients]
        parts = (seat.layout, self.shard_of(start), seat.group, seat.replica, exchange, codec_named(codec))
        settings = {"tokens": tokens, **more(self, exchange.replica)}
        self.make = lambda: AllReduce(*parts, **settings)
        self.norms: list[float | None] = []
        self.means: list[np.ndarray] = []
        self.reports = []
        self.error: Exception | None = None

    def shard_of(self, vector):
        size = max((i.offset + i.elements for i in self.intervals), default=0) + 2
        shard = Shard.of_flat(self.index, self.intervals, torch.full((size,), torch.nan))
        shard.write(torch.from_numpy(compact(vector, self.index, self.intervals)))
        return shard

    def run(self):
        try:
            self.algorithm = self.make()
            for vector in self.gradients:
                if vector is None:
                    self.algorithm.skip()
                    self.norms.append(None)
                    self.means.append(np.empty(0, dtype=f32))
                else:
                    gradient = self.shard_of(vector)
                    self.norms.append(self.algorithm.reduce(gradient))
                    self.means.append(gradient.read().clone().numpy())
                self.reports.append(self.algorithm.on_step(0))
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error
            self.seat.abort()


def play(replicas, codec, start, gradients, tokens, more=lambda _rank, _replica: {}):
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    holders = {replica: stages.holders for replica, stages in replicas.items()}
    ranks = {replica: [] for replica in replicas}
    for replica, stages in replicas.items():
        for seat in Seat.of(stages.layouts):
            exchange = StoreExchange(store, stages.index, holders, replica, seat.number, codec_named(codec))
            rank = Rank(seat, exchange, codec, start, gradients[replica], tokens[replica], more)
            ranks[replica].append(rank)
            rank.start()
    for rank in (rank for group in ranks.values() for rank in group):
        rank.join(timeout=60)
        assert not rank.is_alive()
        assert rank.error is None
    return ranks


def numpy_means(index, codec, gradients, tokens):
    """Mean gradient of each step, from the algorithm's definition, over the whole model at once; None for a skip."""
    bounds = np.cumsum(index.cell_lengths)[:-1]

    def sent(vector, residual):
        wanted = vector + residual * decay(codec)
        cells = np.split(wanted, bounds) if index.cells else []
        got = np.concatenate([wanted[:0], *(through(codec, cell) for cell in cells)])
        return got, wanted - got

    zero = np.zeros(index.elements, dtype=f32)
    residuals, second = dict.fromkeys(gradients, zero), zero
    for number in range(len(next(iter(gradients.values())))):
        mean = None
        for replica in sorted(gradients):
            payload, residuals[replica] = sent(gradients[replica][number], residuals[replica])
            term = payload * f32(tokens[replica] / sum(tokens.values()))
            mean = term if mean is None else mean + term
        result, second = sent(mean, second)
        yield result


def drawn(index, seed, steps, replicas):
    generator = np.random.default_rng(seed)
    start = generator.standard_normal(index.elements).astype(f32)
    return start, {
        replica: [generator.standard_normal(index.elements).astype(f32) for _ in range(steps)] for replica in replicas
    }


@settings(max_examples=20)
@given(data=st.data(), model=models, seed=st.integers(0, 2**32 - 1), count=st.integers(2, 5))
@pytest.mark.parametrize("codec", CODECS)
def test_every_rank_has_the_mean_that_numpy_computes_and_the_same_norm_whatever_the_layouts(
    codec, data, model, seed, count
):
    index = Index.of(model)
    replicas = {number: data.draw(cut_layouts(model, most_ranks=3)) for number in range(count)}
    tokens = {number: data.draw(st.integers(1, 1000)) for number in range(count)}
    start, gradients = drawn(index, seed, 3, replicas)
    ranks = play(replicas, codec, start, gradients, tokens)
    for number, mean in enumerate(numpy_means(index, codec, gradients, tokens)):
        for replica, stages in replicas.items():
            found = whole([rank.means[number] for rank in ranks[replica]], stages)
            np.testing.assert_array_equal(found, mean)
        norms = {rank.norms[number] for group in ranks.values() for rank in group}
        assert len(norms) == 1
        assert norms.pop() == pytest.approx(math.sqrt(float((mean.astype(np.float64) ** 2).sum())), rel=1e-12)
        reports = [rank.reports[number] for group in ranks.values() for rank in group]
        assert len({report.digest for report in reports}) == 1
        assert all(report.weights == tokens and report.applied for report in reports)


MODEL = {"embedding": 9000, "norm": 33}
INDEX = Index.of(MODEL)
TWO = Stages(
    (ReplicaLayout(INDEX, tuple(contiguous_shard(INDEX, ["norm", "embedding"], 4600, rank) for rank in range(2))),)
)
THREE = Stages((ReplicaLayout(INDEX, tuple(split_shard(INDEX, ["embedding", "norm"], 3, rank) for rank in range(3))),))
CUT = Stages(
    tuple(
        ReplicaLayout(INDEX, tuple(split_shard(INDEX, [name], 2, rank) for rank in range(2)), frozenset([number]))
        for name, number in INDEX.numbers.items()
    )
)
"""In two stages of two ranks each."""


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, None])
@pytest.mark.parametrize("codec", ["None", "BF16", "Int8", "TopK"])
@pytest.mark.parametrize("other", [THREE, CUT], ids=["whole", "cut"])
def test_a_gradient_that_is_not_finite_on_one_rank_has_all_replicas_skip_that_step_and_go_on(other, codec, bad):
    start, gradients = drawn(INDEX, 5, 4, (0, 1))
    if bad is None:  # DeepSpeed found it first, in one stage; other stages may have a gradient
        gradients[1][1] = [None, gradients[1][1]] if other is CUT else None
    else:
        gradients[1][1][4711] = bad
    ranks = play({0: TWO, 1: other}, codec, start, gradients, {0: 10, 1: 10})
    for rank in (rank for group in ranks.values() for rank in group):
        assert [norm is None for norm in rank.norms] == [False, True, False, False]
        assert [report.applied for report in rank.reports] == [True, False, True, True]
        assert rank.reports[1].weights == {0: 10, 1: 0}
        assert bool(torch.isfinite(rank.algorithm.residual).all())
        assert all(np.isfinite(mean).all() for number, mean in enumerate(rank.means) if number != 1)
    assert [report.refused for report in ranks[1][0].reports] == [False, True, False, False]
    assert len({rank.algorithm.digest for group in ranks.values() for rank in group}) == 1


@pytest.mark.parametrize("codec", ["BF16", "Int8", "TopK"])
def test_a_step_that_all_skip_leaves_the_residuals_as_they_were(codec):
    start, gradients = drawn(INDEX, 6, 2, (0, 1))
    before = play({0: TWO, 1: THREE}, codec, start, {r: g[:1] for r, g in gradients.items()}, {0: 1, 1: 1})
    gradients[1][1] = None
    after = play({0: TWO, 1: THREE}, codec, start, gradients, {0: 1, 1: 1})
    for replica in (0, 1):
        for old, new in zip(before[replica], after[replica], strict=True):
            torch.testing.assert_close(new.algorithm.residual, old.algorithm.residual, rtol=0, atol=1e-5)


class Kept:
    """The state of a replica on one rank: its vectors, as they would be after steps on unlike hardware."""

    def __init__(self, rank, vectors):
        self.shards = [rank.shard_of(vector) for vector in vectors]

    def state(self):
        return [shard.read().clone() for shard in self.shards]

    def set_state(self, vectors):
        for shard, vector in zip(self.shards, vectors, strict=True):
            shard.write(vector)


@pytest.mark.parametrize("codec", ["None", "Int8", "TopK"])
@pytest.mark.parametrize("alike", [True, False])
def test_replicas_whose_states_have_drifted_apart_take_over_that_of_the_first_one(codec, alike):
    start, gradients = drawn(INDEX, 8, 5, (0, 1, 2))
    other = -start
    other[0] = -0.0
    drifted = np.nextafter(start, np.inf)
    vectors = {0: [start, other], 1: [start, other if alike else np.nextafter(other, np.inf)]}
    vectors[2] = [start if alike else drifted, other]

    def kept(rank, replica):
        rank.kept = Kept(rank, vectors[replica])
        return {"state": rank.kept, "resync_rounds": 3}

    replicas = {0: TWO, 1: THREE, 2: CUT}
    ranks = play(replicas, codec, start, gradients, dict.fromkeys(range(3), 1), kept)
    for replica, stages in replicas.items():
        for number, vector in enumerate(vectors[0]):
            found = whole([rank.kept.state()[number].numpy() for rank in ranks[replica]], stages)
            assert found.tobytes() == vector.tobytes()
    every = [rank for group in ranks.values() for rank in group]
    assert len({rank.algorithm.digest for rank in every}) == 1
    # the step of round 3 is followed by one round for each vector
    assert {tuple(report.round for report in rank.reports) for rank in every} == {
        (1, 2, 3, 4, 5) if alike else (1, 2, 3, 6, 7)
    }


def test_replicas_that_start_from_unlike_weights_have_unlike_digests():
    start, _ = drawn(INDEX, 7, 0, (0, 1))
    digests = [
        play({0: TWO}, "None", vector, {0: []}, {0: 1})[0][0].algorithm.digest for vector in (start, start, -start)
    ]
    assert digests[0] == digests[1] != digests[2]
