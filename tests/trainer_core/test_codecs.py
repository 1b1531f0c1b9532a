import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_core.reference import decoded, encoded
from trainer_core.strategies import of

from crosscloud_trainer import sizes
from crosscloud_trainer.compress import EncodedCells, ErrorFeedback, NonFiniteError, PayloadError, codec_named, codec_of
from crosscloud_trainer.compress.codec import stretches
from crosscloud_trainer.layout import Index
from crosscloud_trainer.sizes import CodecSpec

SPECS = [
    *(CodecSpec(name) for name in sizes.CODECS),
    *(CodecSpec("TopK", keep, bits) for keep, bits in [(1, 2), (1000, 4), (2048, 8)]),
]


def each(specs):
    names = [f"{spec.name}-{spec.keep}-{spec.bits}" for spec in specs]
    return pytest.mark.parametrize("codec", [codec_of(spec) for spec in specs], ids=names)


every_codec, every_lossy_codec = each(SPECS), each(SPECS[1:])
cell_lists = st.lists(st.integers(1, 600) | st.sampled_from([4095, 4096]), min_size=1, max_size=6)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


@st.composite
def batches(draw):
    """Cells of unlike lengths with values of unlike magnitude, extreme ones among them."""
    lengths = np.array(draw(cell_lists), dtype=np.int64)
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-44, 38, len(lengths)).repeat(lengths)
    values = (generator.standard_normal(int(lengths.sum())) * 10.0**exponents).astype(np.float32)
    for position, value in draw(st.dictionaries(st.integers(0, len(values) - 1), finite, max_size=5)).items():
        values[position] = value
    return np.clip(values, -(2.0**127), 2.0**127).astype(np.float32), lengths


def cells_of(values, lengths):
    return np.split(values, np.cumsum(lengths)[:-1])


@every_codec
@settings(max_examples=20)
@given(batch=batches())
def test_a_codec_gives_the_bytes_that_numpy_computes_cell_by_cell(codec, batch):
    values, lengths = batch
    expected = b"".join(encoded(codec.spec, cell) for cell in cells_of(values, lengths))
    assert codec.encode(torch.from_numpy(values), lengths).numpy().tobytes() == expected


@every_codec
@settings(max_examples=20)
@given(batch=batches())
def test_a_codec_decodes_to_the_values_that_numpy_computes(codec, batch):
    values, lengths = batch
    parts = [encoded(codec.spec, cell) for cell in cells_of(values, lengths)]
    data = torch.from_numpy(np.frombuffer(b"".join(parts), dtype=np.uint8).copy())
    expected = np.concatenate([decoded(codec.spec, part, n) for part, n in zip(parts, lengths.tolist(), strict=True)])
    assert codec.fault(data, lengths) == ""
    assert codec.decode(data, lengths).numpy().tobytes() == expected.tobytes()


@every_codec
@settings(max_examples=20)
@given(batch=batches())
def test_a_cell_has_the_same_bytes_alone_and_in_a_batch(codec, batch):
    values, lengths = batch
    together = codec.encode(torch.from_numpy(values), lengths).numpy().tobytes()
    alone = [
        codec.encode(torch.from_numpy(cell.copy()), np.array([len(cell)])).numpy().tobytes()
        for cell in cells_of(values, lengths)
    ]
    assert together == b"".join(alone)


@given(batches())
def test_int8_is_off_by_half_a_step_at_most(batch):
    values, lengths = batch
    codec = codec_named("Int8")
    arrived = codec.decode(codec.encode(torch.from_numpy(values), lengths), lengths).numpy()
    for cell, result in zip(cells_of(values, lengths), cells_of(arrived, lengths), strict=True):
        for start in range(0, len(cell), 256):
            block = cell[start : start + 256].astype(np.float64)
            error = np.abs(block - result[start : start + 256]).max()
            assert error <= max(np.abs(block).max() / 127 * 0.5001, 127 * 2.0**-126)


@given(batches())
def test_bf16_is_off_by_half_a_unit_of_its_last_bit_at_most(batch):
    values, lengths = batch
    codec = codec_named("BF16")
    arrived = codec.decode(codec.encode(torch.from_numpy(values), lengths), lengths).numpy()
    wide = values.astype(np.float64)
    assert (np.abs(wide - arrived) <= np.maximum(np.abs(wide) * 2.0**-8, 2.0**-134)).all()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("place", [0, 4096, 4999])
def test_values_that_are_not_finite_are_refused_and_leave_the_residual_as_it_was(codec, bad, place):
    lengths = np.array([4096, 904])
    feedback = ErrorFeedback(codec, lengths, torch.device("cpu"))
    feedback.encode(of(torch.randn(5000)))
    before = feedback.residual.clone()
    values = torch.randn(5000)
    values[place] = bad
    with pytest.raises(NonFiniteError):
        codec.encode(values, lengths)
    with pytest.raises(NonFiniteError):
        feedback.encode(of(values))
    assert torch.equal(feedback.residual, before)


@every_codec
def test_values_of_1e38_are_sent_and_leave_finite_residuals_however_often(codec):
    lengths = np.array([4096, 1])
    feedback = ErrorFeedback(codec, lengths, torch.device("cpu"))
    values = torch.full((4097,), 1e38)
    values[::3] = 1.1e34
    values[1::3] = -(2.0**127)
    for _ in range(20):
        decoded = codec.decode(feedback.encode(of(values)), lengths)
        assert torch.isfinite(decoded).all()
        assert torch.isfinite(feedback.residual).all()


ERRORS = {
    "None": (0, 0),
    "BF16": (2.0**-8, 2.0**-134),
    "Int8": (2.0**-23, 127 * 2.0**-126),
    "TopK": (2.0**-8, 2.0**-100),
}
"""Of a cell of equal values: relative to the value, and what may be lost of a small one."""


@every_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 1.5e-36, 1e-30, 1.0, -1e38])
@pytest.mark.parametrize("elements", [1, 255, 257, 4096])
def test_zeros_subnormals_and_single_elements_survive(codec, value, elements):
    lengths = np.array([elements])
    values = torch.full((elements,), value)
    arrived = codec.decode(codec.encode(values, lengths), lengths)
    assert arrived.shape == (elements,)
    if codec.spec.name == "TopK" and elements == 4096:
        assert not arrived[codec.spec.keep :].any()
        arrived, values = arrived[: codec.spec.keep], values[: codec.spec.keep]
    relative, absolute = ERRORS[codec.spec.name]
    assert (arrived - values).abs().max() <= max(abs(values[0]) * relative, absolute)


@every_codec
def test_no_cells_are_no_bytes(codec):
    none = np.empty(0, dtype=np.int64)
    data = codec.encode(torch.empty(0), none)
    assert data.shape == (0,)
    assert codec.decode(data, none).shape == (0,)
    assert ErrorFeedback(codec, none, torch.device("cpu")).encode(of(torch.empty(0))).shape == (0,)


@every_lossy_codec
@settings(max_examples=20)
@given(st.data())
def test_error_feedback_sends_what_numpy_says_and_keeps_the_rest(codec, data):
    lengths = np.array([4096, 20])
    feedback = ErrorFeedback(codec, lengths, torch.device("cpu"))
    residual = np.zeros(4116, dtype=np.float32)
    for _ in range(3):
        generator = np.random.default_rng(data.draw(st.integers(0, 99)))
        values = generator.standard_normal(4116).astype(np.float32)
        values[data.draw(st.integers(0, 4115))] = data.draw(st.floats(-1e3, 1e3, width=32))
        wanted = values + residual * np.float32(0.95 if codec.spec.name == "TopK" else 1)
        cells = [encoded(codec.spec, cell) for cell in cells_of(wanted, lengths)]
        assert feedback.encode(of(torch.from_numpy(values))).numpy().tobytes() == b"".join(cells)
        arrived = [decoded(codec.spec, cell, n) for cell, n in zip(cells, [4096, 20], strict=True)]
        residual = wanted - np.concatenate(arrived)
        assert feedback.residual.numpy().tobytes() == residual.tobytes()


@given(st.lists(st.sampled_from([1, 7, 4096]), max_size=12), st.integers(1, 9000))
def test_stretches_cover_every_cell_once_and_none_is_longer_than_it_may_be(cells, most):
    lengths = np.array(cells, dtype=np.int64)
    sizes_of_cells = [sizes.cell_bytes(CodecSpec("Int8"), cell) for cell in cells]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscloud_trainer.compress.codec.STRETCH_ELEMENTS", most)
        found = stretches(CodecSpec("Int8"), lengths)
    assert [cell for stretch in found for cell in stretch.lengths.tolist()] == cells
    for stretch in found:
        first, stop = stretch.cells.start, stretch.cells.stop
        assert stretch.values == slice(sum(cells[:first]), sum(cells[:stop]))
        assert stretch.data == slice(sum(sizes_of_cells[:first]), sum(sizes_of_cells[:stop]))
        assert stretch.elements < most + 4096


@every_codec
def test_encoding_stretch_by_stretch_gives_the_bytes_and_residuals_of_encoding_at_once(codec, monkeypatch):
    lengths = np.array([4096, 4096, 7, 4096, 300])
    together = ErrorFeedback(codec, lengths, torch.device("cpu"))
    monkeypatch.setattr("crosscloud_trainer.compress.codec.STRETCH_ELEMENTS", 4000)
    assert len(stretches(codec.spec, lengths)) == 3
    apart = ErrorFeedback(codec, lengths, torch.device("cpu"))
    for _ in range(3):
        values = torch.randn(int(lengths.sum()))
        data = apart.encode(of(values))
        assert torch.equal(data, together.encode(of(values)))
        assert torch.equal(apart.residual, together.residual)


@pytest.mark.parametrize(("codec", "error_feedback"), [("None", True), ("Int8", False)])
def test_no_residual_is_kept_where_none_is_of_use(codec, error_feedback):
    feedback = ErrorFeedback(codec_named(codec), np.array([9]), torch.device("cpu"), enabled=error_feedback)
    feedback.encode(of(torch.randn(9)))
    assert feedback.residual.shape == (0,)


@st.composite
def selections(draw):
    index = Index.of(draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 13_000), min_size=1)))
    chosen = draw(st.lists(st.booleans(), min_size=index.cells, max_size=index.cells))
    return index, np.flatnonzero(np.array(chosen, dtype=bool))


@every_codec
@settings(max_examples=20)
@given(selection=selections())
def test_cells_taken_apart_and_merged_are_the_same_bytes(codec, selection):
    index, ids = selection
    data = codec.encode(torch.randn(index.elements), index.cell_lengths)
    everything = EncodedCells(codec, np.arange(index.cells), index.cell_lengths, data)
    part, rest = everything.select(ids), everything.select(np.setdiff1d(everything.ids, ids))
    again = EncodedCells.received(codec, index, ids, bytes(part.buffer()))
    assert EncodedCells.merged([rest, again]).buffer() == everything.buffer()
    starts = np.cumsum(everything.sizes) - everything.sizes
    expected = [data[starts[i] : starts[i] + everything.sizes[i]].numpy().tobytes() for i in ids]
    assert bytes(part.buffer()) == b"".join(expected)


def test_cells_that_are_not_there_or_come_twice_are_refused():
    codec, index = codec_named("None"), Index.of({"a": 5000})
    cells = EncodedCells(codec, np.array([0]), np.array([4096]), codec.encode(torch.ones(4096), np.array([4096])))
    with pytest.raises(ValueError, match="not in the batch"):
        cells.select(np.array([1]))
    with pytest.raises(ValueError, match="in common"):
        EncodedCells.merged([cells, cells])
    with pytest.raises(PayloadError, match="16384 bytes; 1 cells in None have 3616"):
        EncodedCells.received(codec, index, np.array([1]), cells.buffer())


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 2e36])
def test_received_scales_that_are_not_finite_or_negative_are_refused(value):
    codec, index = codec_named("Int8"), Index.of({"a": 4096 + 300})
    data = codec.encode(torch.ones(index.elements), index.cell_lengths).numpy()
    data[-308:-304] = np.frombuffer(np.float32(value).tobytes(), dtype=np.uint8)
    with pytest.raises(PayloadError, match="not finite"):
        EncodedCells.received(codec, index, np.arange(2), data.tobytes())


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_received_fp32_values_that_are_not_finite_are_refused(value):
    with pytest.raises(PayloadError, match="not finite"):
        EncodedCells.received(
            codec_named("None"), Index.of({"a": 2}), np.array([0]), np.array([1, value], dtype="<f4").tobytes()
        )


@every_codec
@settings(max_examples=20)
@given(st.sampled_from([1, 3, 255, 4096]), st.data())
def test_garbage_is_decoded_or_refused_but_never_to_anything_not_finite(codec, elements, data):
    index = Index.of({"a": elements})
    size = sizes.cell_bytes(codec.spec, elements)
    few = data.draw(st.binary(max_size=40))
    garbage = data.draw(st.sampled_from([few, (few * size)[:size], few.ljust(size, b"\0")[:size]]))
    try:
        cells = EncodedCells.received(codec, index, np.array([0]), garbage)
    except PayloadError:
        return
    assert torch.isfinite(cells.decode()).all()
    assert cells.decode().abs().max() <= 2.0**127


@every_codec
@settings(max_examples=20)
@given(st.data())
def test_bytes_that_were_changed_on_the_way_are_decoded_or_refused(codec, data):
    values, lengths = data.draw(batches())
    encoded_values = codec.encode(torch.from_numpy(values), lengths)
    for place in data.draw(st.lists(st.integers(0, len(encoded_values) - 1), max_size=4)):
        encoded_values[place] = data.draw(st.integers(0, 255))
    if not codec.fault(encoded_values, lengths):
        assert torch.isfinite(codec.decode(encoded_values, lengths)).all()
