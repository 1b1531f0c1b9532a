import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_core.strategies import models

from crosscloud_trainer.compress import codec_named
from crosscloud_trainer.layout import Index
from crosscloud_trainer.sizes import CODECS, bytes_text, cell_bytes, payload_bytes, wan_bytes


@given(models, st.sampled_from(CODECS))
def test_codecs_make_exactly_the_bytes_that_the_formula_says(model, codec):
    index = Index.of(model)
    data = codec_named(codec).encode(torch.randn(index.elements), index.cell_lengths)
    assert data.numel() == payload_bytes(codec, model.values())


@given(st.integers(1, 4096), st.sampled_from(CODECS))
def test_a_cell_of_any_length_has_the_bytes_that_the_formula_says(elements, codec):
    data = codec_named(codec).encode(torch.randn(elements), np.array([elements]))
    assert data.numel() == cell_bytes(codec, elements)


@given(models)
def test_without_codec_an_update_is_dense_fp32(model):
    assert payload_bytes("None", model.values()) == 4 * sum(model.values())


def test_int8_is_a_quarter_of_dense_fp32_and_one_scale_of_4_bytes_for_256_values():
    assert payload_bytes("Int8", [4096 * 1000]) == 4096 * 1000 + 4 * 16 * 1000
    assert payload_bytes("Int8", [1]) == 5


@pytest.mark.parametrize(("replicas", "times"), [(1, 0), (2, 1), (3, 4 / 3), (4, 1.5)])
def test_a_replica_sends_two_times_c_minus_1_over_c_payloads(replicas, times):
    assert wan_bytes("Int8", [10_000], replicas) == pytest.approx(times * payload_bytes("Int8", [10_000]))


def test_unknown_codecs_and_counts_are_named():
    with pytest.raises(ValueError, match=r"'Int4'.*None, Int8"):
        payload_bytes("Int4", [1])
    with pytest.raises(ValueError, match=r"'Int4'.*None, Int8"):
        codec_named("Int4")
    with pytest.raises(ValueError, match="replicas is 0"):
        wan_bytes("None", [1], 0)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_bytes_are_shown_in_powers_of_a_thousand(count, text):
    assert bytes_text(count) == text
