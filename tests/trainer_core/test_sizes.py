import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_core.strategies import models

from crosscloud_trainer.compress import codec_of
from crosscloud_trainer.layout import Index
from crosscloud_trainer.sizes import (
    CODECS,
    CodecSpec,
    bytes_text,
    cell_bytes,
    payload_bytes,
    top_k_parts,
    wan_bytes,
)

INT8 = CodecSpec("Int8")


specs = st.builds(CodecSpec, st.sampled_from(CODECS), st.integers(1, 2048), st.sampled_from([2, 4, 8]))


@given(models, specs)
def test_codecs_make_exactly_the_bytes_that_the_formula_says(model, spec):
    index = Index.of(model)
    data = codec_of(spec).encode(torch.randn(index.elements), index.cell_lengths)
    assert data.numel() == payload_bytes(spec, model.values())


@given(st.integers(1, 4096), specs)
def test_a_cell_of_any_length_has_the_bytes_that_the_formula_says(elements, spec):
    data = codec_of(spec).encode(torch.randn(elements), np.array([elements]))
    assert data.numel() == cell_bytes(spec, elements)


@given(models)
def test_without_codec_an_update_is_dense_fp32_and_bf16_is_half_of_it(model):
    assert payload_bytes(CodecSpec("None"), model.values()) == 4 * sum(model.values())
    assert payload_bytes(CodecSpec("BF16"), model.values()) == 2 * sum(model.values())


def test_int8_is_a_quarter_of_dense_fp32_and_one_scale_of_4_bytes_for_256_values():
    assert payload_bytes(INT8, [4096 * 1000]) == 4096 * 1000 + 4 * 16 * 1000
    assert payload_bytes(INT8, [1]) == 5


def test_top_k_of_64_values_in_2_bits_is_195_times_smaller_than_dense_fp32():
    """Two levels, 64 + 63 bits of bitmap, 6 low bits and 2 bits of code for each value."""
    assert cell_bytes(CodecSpec("TopK"), 4096) == 4 + 16 + 48 + 16
    assert 4 * 4096 / cell_bytes(CodecSpec("TopK"), 4096) > 195


@given(st.integers(1, 2048))
def test_positions_take_at_most_two_bits_more_than_any_code_could_do(keep):
    entropy = (math.lgamma(4097) - math.lgamma(keep + 1) - math.lgamma(4097 - keep)) / math.log(2)
    parts = top_k_parts(CodecSpec("TopK", keep))
    assert entropy <= 8 * (parts.bitmap + parts.lows) < entropy + 2 * keep + 16


@given(st.integers(1, 4095), specs)
def test_a_cell_that_is_not_whole_goes_through_int8_under_top_k(elements, spec):
    assert cell_bytes(CodecSpec("TopK", spec.keep, spec.bits), elements) == cell_bytes(INT8, elements)


@pytest.mark.parametrize(("replicas", "times"), [(1, 0), (2, 1), (3, 4 / 3), (4, 1.5)])
def test_a_replica_sends_two_times_c_minus_1_over_c_payloads(replicas, times):
    assert wan_bytes(INT8, [10_000], replicas) == pytest.approx(times * payload_bytes(INT8, [10_000]))
    assert wan_bytes("Int8", [10_000], replicas) == wan_bytes(INT8, [10_000], replicas)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["Int4"], r"'Int4'.*None, BF16, Int8, TopK"),
        (["TopK", 0], "keep is 0; it must be 1 to 2048"),
        (["TopK", 2049], "keep is 2049"),
        (["TopK", 64, 3], "bits is 3; it must be 2, 4 or 8"),
    ],
)
def test_codecs_and_settings_that_do_not_exist_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CodecSpec(*settings)


def test_a_view_without_replicas_is_named():
    with pytest.raises(ValueError, match="replicas is 0"):
        wan_bytes("None", [1], 0)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_bytes_are_shown_in_powers_of_a_thousand(count, text):
    assert bytes_text(count) == text
