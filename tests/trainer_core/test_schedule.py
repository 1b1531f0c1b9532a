import math

import pytest

from crosscloud_trainer.schedule import ends_window, steps_for, warmup_cosine


@pytest.mark.parametrize(("tokens", "per_step", "steps"), [(100, 10, 10), (101, 10, 11), (1, 10, 1), (0, 10, 1)])
def test_a_run_has_the_fewest_steps_that_see_all_tokens(tokens, per_step, steps):
    assert steps_for(tokens, per_step) == steps


def test_a_window_ends_with_each_multiple_of_the_inner_steps():
    assert [step for step in range(1, 13) if ends_window(step, 4)] == [4, 8, 12]


def test_the_learning_rate_rises_in_a_line_and_falls_by_a_cosine_to_its_floor():
    factors = [warmup_cosine(step, 4, 14, 0.1) for step in range(16)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[9] == pytest.approx(0.55)
    assert factors[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)
    assert factors[14:] == [0.1, 0.1]


def test_a_run_without_warmup_starts_at_the_full_rate():
    assert warmup_cosine(0, 0, 1, 0.0) == 1.0
