"""Rounds of replicas with unlike layouts, each rank a thread, against numpy on the whole model."""

import threading
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from trainer_core.local_exchange import Seat, StoreExchange, ThreadGroup
from trainer_core.reference import decay, through
from trainer_core.strategies import Stages, compact, cut_layouts, models, whole

from crosscloud_trainer.compress import codec_named
from crosscloud_trainer.contract import OuterOptimizer
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.exchange import RoundReport
from crosscloud_trainer.layout import Index, ReplicaLayout, contiguous_shard, split_shard
from crosscloud_trainer.membership.errors import Diverged
from crosscloud_trainer.shard import Shard
from crosscloud_trainer.sizes import CODECS, cell_bytes

pytestmark = pytest.mark.usefixtures("short_stretches")
f32 = np.float32
OUTER = OuterOptimizer(0.7, 0.9)


class Rank(threading.Thread):
    """Runs one rank of one replica: for each window adds the given change to its weights, then ends the
    window.
    """

    def __init__(self, replica, seat, exchange, codec, start, windows, tokens, inner_steps=1):
        super().__init__(daemon=True)
        self.index, self.intervals = seat.layout.index, seat.intervals
        size = max((i.offset + i.elements for i in self.intervals), default=0) + 2
        self.shard = Shard.of_flat(self.index, self.intervals, torch.full((size,), torch.nan))
        self.shard.write(torch.from_numpy(compact(start, self.index, self.intervals)))
        parts = (seat.layout, self.shard, seat.group, seat.replica, exchange, codec_named(codec))
        self.make = lambda: DiLoCo(*parts, inner_steps=inner_steps, settings=OUTER)
        self.replica, self.rank = replica, seat.number
        self.seat, self.exchange = seat, exchange
        self.windows, self.tokens, self.inner_steps = windows, tokens, inner_steps
        self.reports: list[RoundReport] = []
        self.weights: list[np.ndarray] = []
        self.error: Exception | None = None
        self.algorithm: DiLoCo | None = None

    def run(self):
        try:
            self.algorithm = self.make()
            for window in self.windows:
                for _ in range(self.inner_steps):
                    change = torch.from_numpy(compact(window, self.index, self.intervals))
                    self.shard.write(self.shard.read() + change)
                    report = self.algorithm.on_step(self.tokens if self.rank == 0 else 0)
                self.reports.append(report)
                self.weights.append(self.shard.read().clone().numpy())
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error
            self.seat.abort()


@dataclass
class Run:
    ranks: dict[int, list[Rank]]
    replicas: dict[int, Stages]

    def weights(self, replica, window):
        parts = [rank.weights[window] for rank in self.ranks[replica]]
        return whole(parts, self.replicas[replica])

    def reports(self, window):
        return [rank.reports[window] for ranks in self.ranks.values() for rank in ranks]

    def errors(self):
        return [rank.error for ranks in self.ranks.values() for rank in ranks if rank.error]


def play(replicas, codec, starts, windows, tokens, inner_steps=1):
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    holders = {replica: stages.holders for replica, stages in replicas.items()}
    ranks = {}
    for replica, stages in replicas.items():
        ranks[replica] = []
        for seat in Seat.of(stages.layouts):
            exchange = StoreExchange(store, stages.index, holders, replica, seat.number, codec_named(codec))
            rank = Rank(replica, seat, exchange, codec, starts[replica], windows[replica], tokens[replica], inner_steps)
            ranks[replica].append(rank)
    everyone = [rank for group in ranks.values() for rank in group]
    for rank in everyone:
        rank.start()
    for rank in everyone:
        rank.join(timeout=60)
        assert not rank.is_alive()
    return Run(ranks, replicas)


def numpy_rounds(index, codec, start, windows, tokens):
    """The outer weights after each round, from the algorithm's definition, over the whole model at once."""
    bounds = np.cumsum(index.cell_lengths)[:-1]

    def sent(vector, residual):
        wanted = vector + residual * decay(codec)
        cells = np.split(wanted, bounds) if index.cells else []
        got = np.concatenate([wanted[:0], *(through(codec, cell) for cell in cells)])
        return got, wanted - got

    zero = np.zeros(index.elements, dtype=f32)
    outer, momentum, residuals, second = start, zero, dict.fromkeys(windows, zero), zero
    rounds = len(next(iter(windows.values())))
    for number in range(rounds):
        mean = None
        for replica in sorted(windows):
            update = outer - (outer + windows[replica][number])
            payload, residuals[replica] = sent(update, residuals[replica])
            term = payload * f32(tokens[replica] / sum(tokens.values()))
            mean = term if mean is None else mean + term
        result, second = sent(mean, second)
        momentum = momentum * f32(OUTER.momentum) + result
        outer = outer - (momentum * f32(OUTER.momentum) + result) * f32(OUTER.learning_rate)
        yield outer


def drawn(index, seed, rounds, replicas, scale=1e-2):
    generator = np.random.default_rng(seed)
    start = generator.standard_normal(index.elements).astype(f32)
    windows = {
        replica: [(generator.standard_normal(index.elements) * scale).astype(f32) for _ in range(rounds)]
        for replica in replicas
    }
    return start, windows


@settings(max_examples=25)
@given(st.data())
@pytest.mark.parametrize("codec", CODECS)
def test_rounds_give_what_numpy_computes_whatever_the_layouts(codec, data):
    model = data.draw(models)
    index = Index.of(model)
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=3, unique=True))
    replicas = {number: data.draw(cut_layouts(model, most_ranks=4)) for number in numbers}
    tokens = {number: data.draw(st.integers(1, 10**6)) for number in numbers}
    start, windows = drawn(index, data.draw(st.integers(0, 99)), 3, numbers)
    run = play(replicas, codec, dict.fromkeys(numbers, start), windows, tokens)
    assert run.errors() == []
    for window, expected in enumerate(numpy_rounds(index, codec, start, windows, tokens)):
        assert len({report.digest for report in run.reports(window)}) == 1
        for number in numbers:
            assert run.weights(number, window).tobytes() == expected.tobytes()
        assert all(report.weights == tokens and report.applied for report in run.reports(window))


MODEL = {"embed": 5000, "norm": 48, "bias": 1, "head": 9000}


def two_and_four_ranks():
    index, order = Index.of(MODEL), sorted(MODEL, reverse=True)
    two = [contiguous_shard(index, order, 7026, rank) for rank in range(2)]
    four = [split_shard(index, order, 4, rank) for rank in range(4)]
    return index, {number: Stages((ReplicaLayout(index, tuple(shards)),)) for number, shards in enumerate((two, four))}


@pytest.mark.parametrize("codec", CODECS)
def test_a_replica_of_two_ranks_and_one_of_four_agree_to_the_bit_after_every_round(codec):
    index, replicas = two_and_four_ranks()
    start, windows = drawn(index, 1, 5, replicas)
    run = play(replicas, codec, {0: start, 1: start}, windows, {0: 300, 1: 100}, inner_steps=3)
    assert run.errors() == []
    for window in range(5):
        assert run.weights(0, window).tobytes() == run.weights(1, window).tobytes()
        assert len({report.digest for report in run.reports(window)}) == 1
        assert [report.round for report in run.reports(window)] == [window + 1] * 6
        assert run.reports(window)[0].weights == {0: 900, 1: 300}
    for rank in [*run.ranks[0], *run.ranks[1]]:
        assert rank.exchange.prepared_rounds == [1, 2, 3, 4, 5]
        held = run.replicas[rank.replica].holders.held(rank.rank)
        assert rank.reports[0].payload_bytes == sum(
            cell_bytes(codec_named(codec).spec, int(elements)) for elements in index.lengths(held)
        )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_an_update_that_is_not_finite_is_refused_and_all_replicas_go_on_without_it(codec, bad):
    index, replicas = two_and_four_ranks()
    start, windows = drawn(index, 2, 3, replicas)
    windows[1][1][12_345] = bad
    run = play(replicas, codec, {0: start, 1: start}, windows, {0: 10, 1: 30})
    assert run.errors() == []
    assert [report.weights for report in run.reports(1)] == [{0: 10, 1: 0}] * 6
    assert [report.refused for report in run.reports(1)] == [False, False, True, True, True, True]
    for window in range(3):
        assert np.isfinite(run.weights(0, window)).all()
        assert run.weights(0, window).tobytes() == run.weights(1, window).tobytes()
        assert len({report.digest for report in run.reports(window)}) == 1
    for ranks in run.ranks.values():
        assert all(torch.isfinite(rank.algorithm.residual).all() for rank in ranks)


def test_a_round_that_all_replicas_refuse_leaves_the_outer_state_and_is_counted():
    index, replicas = two_and_four_ranks()
    start, windows = drawn(index, 3, 3, replicas)
    windows[0][1][0] = windows[1][1][99] = np.nan
    run = play(replicas, "Int8", {0: start, 1: start}, windows, {0: 1, 1: 1})
    assert run.errors() == []
    assert [report.applied for report in run.reports(1)] == [False] * 6
    assert {report.digest for report in run.reports(1)} == {report.digest for report in run.reports(0)}
    assert run.weights(0, 1).tobytes() == run.weights(1, 0).tobytes()
    assert all(report.applied for report in run.reports(2))


def test_an_outer_step_that_would_not_be_finite_is_skipped_by_all_replicas_alike():
    index, replicas = two_and_four_ranks()
    start, windows = drawn(index, 4, 5, replicas)
    for window in windows[0] + windows[1]:
        window[77] = -1.2e38
    run = play(replicas, "None", {0: start, 1: start}, windows, {0: 1, 1: 1})
    assert run.errors() == []
    applied = [[report.applied for report in run.reports(window)] for window in range(5)]
    assert all(len(set(flags)) == 1 for flags in applied)
    assert applied[0][0]
    assert not applied[4][0]
    for window in range(5):
        assert np.isfinite(run.weights(0, window)).all()
        assert run.weights(0, window).tobytes() == run.weights(1, window).tobytes()


def test_replicas_that_start_from_unlike_weights_are_told_apart_by_their_digests():
    index, replicas = two_and_four_ranks()
    start, windows = drawn(index, 5, 1, replicas)
    other = start.copy()
    other[1] = np.nextafter(other[1], f32(9))
    run = play(replicas, "Int8", {0: start, 1: other}, windows, {0: 1, 1: 1})
    assert len(run.errors()) == 6
    for error in run.errors():
        assert isinstance(error, Diverged)
        assert "before round 1: replica 0 has" in str(error)


def test_a_replica_alone_keeps_its_own_weights_and_exchanges_nothing():
    index, replicas = two_and_four_ranks()
    start, windows = drawn(index, 6, 3, [0])
    run = play({0: replicas[0]}, "Int8", {0: start}, windows, {0: 5})
    assert run.errors() == []
    expected = start
    for window in range(3):
        expected = expected + windows[0][window]
        assert run.weights(0, window).tobytes() == expected.tobytes()
        assert all(report.applied and report.payload_bytes == 0 for report in run.reports(window))
    assert len({run.reports(window)[0].digest for window in range(3)}) == 3


def test_a_round_happens_only_at_the_end_of_a_window():
    index = Index.of({"a": 3})
    layout = ReplicaLayout(index, (contiguous_shard(index, ["a"], 3, 0),))
    shard = Shard.of_flat(index, layout.shards[0], torch.zeros(3))
    [group] = ThreadGroup.of(1)
    exchange = StoreExchange(HashStore(), index, {0: layout.holders}, 0, 0, codec_named("None"))
    algorithm = DiLoCo(layout, shard, group, group, exchange, codec_named("None"), inner_steps=3, settings=OUTER)
    reports = [algorithm.on_step(10) for _ in range(7)]
    assert [report.round if report else None for report in reports] == [None, None, 1, None, None, 2, None]
    assert reports[2].weights == {0: 30}
