import numpy as np
import pytest
import torch
from trainer_core.reference import decay, through

from crosscloud_trainer.compress import EncodedCells, Reducer, codec_named
from crosscloud_trainer.layout import Index
from crosscloud_trainer.sizes import CODECS

INDEX = Index.of({"a": 9000, "b": 300, "c": 1})
f32 = np.float32


def encoded(codec, ids, values):
    codec, ids = codec_named(codec), np.array(ids, dtype=np.int64)
    return EncodedCells(codec, ids, INDEX.lengths(ids), codec.encode(values, INDEX.lengths(ids)))


def drawn(ids, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(INDEX.lengths(np.array(ids, dtype=np.int64)).sum()), generator=generator)


@pytest.mark.parametrize("codec", CODECS)
def test_results_of_three_rounds_are_what_numpy_computes_with_a_second_residual(codec):
    owned, weights = [0, 2, 4], {7: 30, 2: 10}
    lengths = INDEX.lengths(np.array(owned))
    reducer = Reducer(codec_named(codec), INDEX, np.array(owned), error_feedback=True)
    residual = np.zeros(int(lengths.sum()), dtype=f32)
    for number in range(3):
        values = {replica: drawn(owned, 10 * number + replica) for replica in weights}
        payloads = {replica: encoded(codec, owned, part) for replica, part in values.items()}
        result = reducer.reduce(payloads, weights)

        def arrived(vector):
            return np.concatenate([through(codec, cell) for cell in np.split(vector, np.cumsum(lengths)[:-1])])

        mean = arrived(values[2].numpy()) * f32(0.25) + arrived(values[7].numpy()) * f32(0.75)
        wanted = mean + residual * decay(codec)
        assert result.decode().numpy().tobytes() == arrived(wanted).tobytes()
        residual = wanted - arrived(wanted)
    assert reducer.residual.tolist() == (residual.tolist() if codec != "None" else [])


def test_a_replica_that_refused_its_update_does_not_count():
    reducer = Reducer(codec_named("None"), INDEX, np.array([3, 4]), error_feedback=True)
    values = drawn([3, 4], 1)
    result = reducer.reduce({0: None, 1: encoded("None", [3, 4], values), 2: None}, {0: 0, 1: 5, 2: 0})
    assert torch.equal(result.decode(), values)


def test_a_mean_of_the_largest_values_stays_finite_round_after_round():
    reducer = Reducer(codec_named("Int8"), INDEX, np.array([4]), error_feedback=True)
    payload = encoded("Int8", [4], torch.tensor([2.0**127]))
    for _ in range(5):
        result = reducer.reduce({0: payload, 1: payload, 2: payload}, {0: 1, 1: 1, 2: 1})
        assert torch.isfinite(result.decode()).all()
        assert torch.isfinite(reducer.residual).all()


@pytest.mark.parametrize(
    ("payloads", "weights", "message"),
    [
        ({0: [3, 4], 1: [3, 4]}, {0: 1}, "don't fit"),
        ({0: [3, 4], 1: None}, {0: 1, 1: 1}, "don't fit"),
        ({0: [3, 4], 1: [3, 4]}, {0: 1, 1: 0}, "don't fit"),
        ({0: [3, 4], 1: [4]}, {0: 1, 1: 1}, "other cells"),
        ({0: [2, 3], 1: [2, 3]}, {0: 1, 1: 1}, "other cells"),
    ],
)
def test_payloads_that_do_not_fit_together_are_refused(payloads, weights, message):
    reducer = Reducer(codec_named("None"), INDEX, np.array([3, 4]), error_feedback=True)
    given_payloads = {r: ids and encoded("None", ids, drawn(ids, 1)) for r, ids in payloads.items()}
    with pytest.raises(ValueError, match=message):
        reducer.reduce(given_payloads, weights)
