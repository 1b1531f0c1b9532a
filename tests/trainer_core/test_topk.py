import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_core.reference import bf16_decoded, bf16_encoded, topk_kept
from trainer_core.strategies import of

from crosscloud_trainer.compress import EncodedCells, ErrorFeedback, PayloadError, Reducer, codec_of
from crosscloud_trainer.layout import Index
from crosscloud_trainer.sizes import CodecSpec, top_k_parts

WHOLE = np.array([4096])
keeps = st.sampled_from([1, 2, 64, 65, 700, 2048])


@st.composite
def cells(draw):
    """Whole cells: of a bell curve, of a long tail, or of a few values that come often."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "cauchy", "few", "sparse"]))
    if kind == "normal":
        return generator.standard_normal(4096).astype(np.float32)
    if kind == "cauchy":
        return np.clip(generator.standard_cauchy(4096), -1e6, 1e6).astype(np.float32)
    if kind == "few":
        return generator.integers(-2, 3, 4096).astype(np.float32)
    return np.where(generator.random(4096) < 0.01, generator.standard_normal(4096), 0).astype(np.float32)


def bf16(value):
    return float(bf16_decoded(bf16_encoded(np.array([value])))[0])


def arrived(spec, cell):
    codec = codec_of(spec)
    return codec.decode(codec.encode(torch.from_numpy(cell), WHOLE), WHOLE).numpy()


@given(cells(), keeps, st.sampled_from([2, 4, 8]))
def test_no_value_that_was_left_out_is_larger_than_one_that_was_kept(cell, keep, bits):
    result = arrived(CodecSpec("TopK", keep, bits), cell)
    kept = topk_kept(cell, keep)
    left_out = np.delete(np.arange(4096), kept)
    assert not result[left_out].any()
    assert (np.sign(result[kept]) * np.sign(cell[kept]) >= 0).all()
    assert np.abs(cell[left_out]).max(initial=0) <= np.abs(cell[kept]).min()


def test_of_equal_values_the_first_ones_are_kept():
    result = arrived(CodecSpec("TopK"), np.full(4096, -3, dtype=np.float32))
    assert np.flatnonzero(result).tolist() == list(range(64))
    assert set(result[:64].tolist()) == {-3.0}


@given(cells(), keeps, st.sampled_from([4, 8]))
def test_kept_values_are_off_by_half_a_step_and_the_rounding_of_the_levels(cell, keep, bits):
    kept = topk_kept(cell, keep)
    magnitudes = np.abs(cell[kept])
    step = (magnitudes.max() - magnitudes.min()) / (2 ** (bits - 1) - 1)
    error = np.abs(arrived(CodecSpec("TopK", keep, bits), cell)[kept] - cell[kept]).max()
    assert error <= 0.5001 * step + magnitudes.max() * 2.0**-8


@given(cells(), keeps)
def test_two_levels_leave_no_more_than_the_best_of_all_cuts(cell, keep):
    magnitudes = np.sort(np.abs(cell[topk_kept(cell, keep)]).astype(np.float64))
    best = min(
        sum(((part - part.mean()) ** 2).sum() for part in np.split(magnitudes, [cut]) if len(part))
        for cut in range(keep)
    )
    kept = topk_kept(cell, keep)
    left = ((arrived(CodecSpec("TopK", keep), cell)[kept].astype(np.float64) - cell[kept]) ** 2).sum()
    rounding = (magnitudes**2).sum() * 2.0**-16
    assert left <= best + rounding + 2 * np.sqrt(best * rounding)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("keep", [64, 256])
def test_residuals_stop_growing_and_nothing_but_the_decay_is_lost(keep, bits):
    codec = codec_of(CodecSpec("TopK", keep, bits))
    feedback = ErrorFeedback(codec, WHOLE, torch.device("cpu"))
    generator = np.random.default_rng(1)
    norms = []
    for _ in range(80):
        values = generator.standard_normal(4096).astype(np.float32)
        before = feedback.residual.numpy().astype(np.float64)
        sent = codec.decode(feedback.encode(of(torch.from_numpy(values))), WHOLE).numpy()
        assert np.abs(sent + feedback.residual.numpy() - (values + 0.95 * before)).max() < 1e-5
        norms.append(float(feedback.residual.norm()))
    assert max(norms[40:]) < 1.1 * max(norms[:40])


@given(st.integers(0, 99), keeps)
def test_with_two_levels_what_was_sent_and_the_residual_are_the_values_to_the_bit(seed, keep):
    """Of numbers so short that fp32 subtracts them exactly."""
    codec = codec_of(CodecSpec("TopK", keep))
    feedback = ErrorFeedback(codec, WHOLE, torch.device("cpu"))
    values = (np.random.default_rng(seed).integers(-2048, 2049, 4096) / 256).astype(np.float32)
    sent = codec.decode(feedback.encode(of(torch.from_numpy(values))), WHOLE).numpy()
    assert (sent + feedback.residual.numpy() == values).all()


def test_an_encoding_that_was_taken_back_leaves_the_residuals_as_they_were():
    codec = codec_of(CodecSpec("TopK"))
    feedback = ErrorFeedback(codec, WHOLE, torch.device("cpu"))
    feedback.encode(of(torch.randn(4096)))
    before, values = feedback.residual.clone(), torch.randn(4096)
    feedback.take_back(of(values), feedback.encode(of(values)))
    torch.testing.assert_close(feedback.residual, before, rtol=0, atol=1e-5)


def test_the_second_encoding_sends_later_what_it_could_not_send_at_once():
    """Two replicas keep unlike elements, so that the mean has twice as many as a result can name."""
    index, codec = Index.of({"a": 4096}), codec_of(CodecSpec("TopK"))
    first, second = torch.zeros(4096), torch.zeros(4096)
    first[:64], second[64:128] = 2, 1
    reducer = Reducer(codec, index, np.array([0]), error_feedback=True)
    nothing = torch.zeros(4096)
    for updates, expected in [((first, second), 1.0), ((nothing, nothing), bf16(0.95 * 0.5))]:
        payloads = {
            number: EncodedCells(codec, np.array([0]), WHOLE, codec.encode(update, WHOLE))
            for number, update in enumerate(updates)
        }
        result = reducer.reduce(payloads, {0: 1, 1: 1}).decode()
        assert set(result[result != 0].tolist()) == {expected}
        assert int((result != 0).sum()) == 64
    assert reducer.residual.abs().max() < 0.5 * 2.0**-8


PARTS = top_k_parts(CodecSpec("TopK"))


def changed(place, value):
    """The bytes of a cell with other ones put somewhere."""
    cell = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    data = codec_of(CodecSpec("TopK")).encode(torch.from_numpy(cell), WHOLE).numpy()
    data[place : place + len(value)] = np.frombuffer(value, dtype=np.uint8)
    return data.tobytes()


def levels(low, high):
    return bf16_encoded(np.array([low, high], dtype=np.float32))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, levels(0, np.inf), "not finite"),
        (0, levels(0, np.nan), "not finite"),
        (0, levels(np.nan, 1), "not finite"),
        (0, levels(-1, 1), "not finite"),
        (0, levels(2, 1), "not finite"),
        (0, levels(1, 2.0**127 * 1.01), "not finite"),
        (PARTS.levels, bytes(PARTS.bitmap), "does not name 64 elements"),
        (PARTS.levels, b"\xff" * PARTS.bitmap, "does not name 64 elements"),
        (PARTS.levels, b"\xff" * 8 + bytes(8), "names an element of a cell twice"),
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(place, value, message):
    codec, index = codec_of(CodecSpec("TopK")), Index.of({"a": 3 * 4096})
    good = changed(0, b"")
    with pytest.raises(PayloadError, match=message):
        EncodedCells.received(codec, index, np.arange(3), good + changed(place, value) + good)
    assert torch.isfinite(EncodedCells.received(codec, index, np.arange(3), 3 * good).decode()).all()


def test_levels_are_ordered_and_as_bf16_holds_them():
    low, high = bf16_decoded(changed(0, b"")[:4])
    assert 0 < low < high
