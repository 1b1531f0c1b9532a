"""What a step counts for."""

from __future__ import annotations

import pytest

from crosscloud_trainer.engine import StepReport
from crosscloud_trainer.steps import learned_tokens


@pytest.mark.parametrize(("applied", "skipped_before", "learned"), [(True, 0, 64), (False, 1, 0), (True, 3, 64)])
def test_a_skipped_step_weighs_nothing_and_those_after_it_weigh_as_ever(
    applied: bool, skipped_before: int, learned: int
) -> None:
    report = StepReport(applied, skipped_before, gradient_norm=1.0, learning_rate=1e-3)
    assert learned_tokens(report, 64) == learned
