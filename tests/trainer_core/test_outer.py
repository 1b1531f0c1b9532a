import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_core.strategies import compact, layouts, models

from crosscloud_trainer.compress import weighted_mean
from crosscloud_trainer.contract import OuterOptimizer
from crosscloud_trainer.layout import Index, Interval
from crosscloud_trainer.outer import OuterState
from crosscloud_trainer.shard import Shard, digest

f32 = np.float32


@pytest.mark.parametrize("elements", [0, 1, 3, 7, 8, 9, 15, 17, 31, 33, 63, 65, 127, 1001, 4097, 100_003])
@pytest.mark.parametrize("rates", [(0.7, 0.9), (1.0, 0.0), (0.1, 0.99)])
def test_outer_steps_are_what_numpy_computes_to_the_bit(elements, rates):
    rate, momentum = rates
    generator = np.random.default_rng(elements)
    weights = generator.standard_normal(elements).astype(f32)
    velocity = np.zeros(elements, dtype=f32)
    state = OuterState.at(torch.from_numpy(weights))
    for _ in range(3):
        gradient = (generator.standard_normal(elements) * 1e-2).astype(f32)
        velocity = velocity * f32(momentum) + gradient
        weights = weights - (velocity * f32(momentum) + gradient) * f32(rate)
        state = state.stepped(torch.from_numpy(gradient), OuterOptimizer(rate, momentum))
        assert state.weights.numpy().tobytes() == weights.tobytes()
        assert state.momentum.numpy().tobytes() == velocity.tobytes()


def test_outer_steps_agree_with_nesterov_sgd_of_torch():
    weights = torch.nn.Parameter(torch.randn(999))
    sgd = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    state = OuterState.at(weights.detach())
    for _ in range(5):
        weights.grad = torch.randn(999)
        state = state.stepped(weights.grad, OuterOptimizer(0.7, 0.9))
        sgd.step()
        torch.testing.assert_close(state.weights, weights.detach())


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 10**12), min_size=1), st.integers(0, 40), st.randoms())
def test_the_weighted_mean_adds_in_order_of_replica_numbers_in_fp32(weights, elements, random):
    if not any(weights.values()):
        weights[3] = 1
    generator = np.random.default_rng(elements)
    values = {replica: generator.standard_normal(elements).astype(f32) for replica in weights}
    expected = np.zeros(elements, dtype=f32)
    for replica in sorted(weights):
        expected = expected + values[replica] * f32(weights[replica] / sum(weights.values()))
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    given_values = {replica: torch.from_numpy(part) for replica, part in values.items() if weights[replica]}
    assert weighted_mean(given_values, dict(shuffled)).tolist() == expected.tolist()


@pytest.mark.parametrize("weights", [{}, {0: 0, 1: 0}, {0: -1, 1: 2}])
def test_a_mean_without_weight_is_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        weighted_mean(dict.fromkeys(weights, torch.ones(1)), weights)


@given(st.data())
def test_any_partition_of_the_state_gives_the_digest_that_numpy_computes(data):
    model = data.draw(models)
    index = Index.of(model)
    generator = np.random.default_rng(index.elements)
    weights, momentum = generator.standard_normal((2, index.elements)).astype(f32)
    layout = data.draw(layouts(model))
    parts = [
        digest(index, shard, [torch.from_numpy(compact(v, index, shard)) for v in (weights, momentum)])
        for shard in layout.shards
    ]
    assert sum(parts) % 2**64 == keyed_sum(np.concatenate([weights, momentum]))


def keyed_sum(vector):
    numbers = np.arange(len(vector), dtype=np.uint64)
    bits = vector.view(np.int32).astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        keys = (splitmix(numbers % np.uint64(4096)) | np.uint64(1)) * (
            splitmix(np.uint64(4096) + numbers // np.uint64(4096)) | np.uint64(1)
        )
        return int((bits * keys).sum(dtype=np.uint64))


def splitmix(number):
    state = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def test_the_numbers_behind_the_keys_are_those_of_splitmix64():
    """From seed 0, as its authors' implementation gives them."""
    with np.errstate(over="ignore"):
        found = splitmix(np.arange(3, dtype=np.uint64))
    assert [f"{number:016x}" for number in found.tolist()] == [
        "e220a8397b1dcdaf",
        "6e789e6aa1b965f4",
        "06c45d188009454f",
    ]


def test_digests_show_a_single_bit_a_swap_and_a_sign_of_zero():
    index = Index.of({"a": 1000})
    interval = (Interval(0, 0, 1000, 0),)
    values = torch.randn(1000)
    values[5] = 0.0
    changes = [values.clone() for _ in range(4)]
    changes[1][7] = torch.nextafter(values[7], torch.tensor(torch.inf))
    changes[2][[3, 4]] = values[[4, 3]]
    changes[3][5] = -0.0
    assert len({digest(index, interval, [change]) for change in changes}) == 4


@given(st.data())
def test_a_shard_never_reads_or_writes_padding(data):
    layout = data.draw(layouts(data.draw(models)))
    for intervals in layout.shards:
        stop = max((i.offset + i.elements for i in intervals), default=0)
        values = torch.full((stop + 3,), torch.nan)
        shard = Shard.of_flat(layout.index, intervals, values)
        assert shard.read().numel() == shard.elements
        shard.write(torch.arange(float(shard.elements)))
        assert shard.read().tolist() == list(range(shard.elements))
        assert int(values.isnan().sum()) == stop + 3 - shard.elements
