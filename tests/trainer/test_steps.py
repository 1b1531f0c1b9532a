"""What steps and rounds count for, and at which rate a run goes on whose steps were other ones before."""

from __future__ import annotations

import math
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_core.local_exchange import ThreadGroup

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.engine import Engine, StepReport
from crosscloud_trainer.exchange import RoundReport
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.schedule import warmup_cosine
from crosscloud_trainer.steps import learned_tokens, note_round, residual_norm

DILOCO, ALL_REDUCE = (SimpleNamespace(rewrites_weights=rewrites) for rewrites in (True, False))
FINE, ALL_SKIPPED = {"weights": {0: 8, 1: 8}, "applied": True}, {"weights": {0: 8, 1: 8}, "applied": False}
OWN_REFUSED, OTHERS_REFUSED = ({"weights": {0: 8 * one, 1: 8 - 8 * one}, "applied": True} for one in (0, 1))


@pytest.mark.parametrize(("applied", "skipped_before", "learned"), [(True, 0, 64), (False, 1, 0), (True, 3, 64)])
def test_a_skipped_step_weighs_nothing_and_those_after_it_weigh_as_ever(
    applied: bool, skipped_before: int, learned: int
) -> None:
    report = StepReport(applied, skipped_before, gradient_norm=1.0, learning_rate=1e-3)
    assert learned_tokens(report, 64) == learned


def rounds(algorithm: Any, *kinds: dict[str, Any]) -> Journal:
    """What replica 0's journal knows after these rounds."""
    journal = Journal(total_steps=100, dense_bytes_per_step=1)
    for number, kind in enumerate(kinds, start=1):
        done = RoundReport(number, digest=number, payload_bytes=0, refused=not kind["weights"][0], **kind)
        note_round(journal, algorithm, 0, done, seconds=1.0)
    return journal


def test_rounds_without_the_replicas_own_update_are_counted_and_no_others() -> None:
    assert rounds(DILOCO, FINE, OWN_REFUSED, OTHERS_REFUSED, ALL_SKIPPED, FINE).progress.skipped_rounds == 2
    assert rounds(ALL_REDUCE, OWN_REFUSED, ALL_SKIPPED).progress.skipped_rounds == 0, "these are skipped steps"


def test_ten_skipped_rounds_in_a_row_end_the_job_and_one_between_them_does_not() -> None:
    nine = [OWN_REFUSED, ALL_SKIPPED, OWN_REFUSED] * 3
    assert rounds(DILOCO, *nine, OTHERS_REFUSED, *nine).progress.skipped_rounds == 18
    with pytest.raises(Failure, match="not finite for 10 rounds in a row, the last one 11; lower the") as caught:
        rounds(DILOCO, FINE, *nine, OWN_REFUSED)
    assert caught.value.code == ExitCode.NON_FINITE


def test_the_norm_of_what_is_lost_is_that_of_all_ranks_also_where_one_holds_nothing() -> None:
    residuals = [torch.randn(5), torch.empty(0), 1e3 * torch.randn(7)]
    found: list[float] = []
    groups = ThreadGroup.of(3)
    ranks = [
        Thread(
            target=lambda rank=rank: found.append(
                residual_norm(SimpleNamespace(residual=residuals[rank]), groups[rank])
            )
        )
        for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    expected = np.linalg.norm(np.concatenate([part.double().numpy() for part in residuals]))
    assert found == pytest.approx([float(expected)] * 3)


@pytest.mark.parametrize(("done", "scale"), [(8, 8 / 12), (2, 2.0), (4, 1.0), (5, 8 / 7)])
def test_the_first_rates_after_resuming_are_those_of_the_tokens_seen(done: int, scale: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, 6, 32, 0.1))
    trained: Any = Engine.__new__(Engine)
    trained._engine, trained._optimizer = SimpleNamespace(lr_scheduler=schedule), SimpleNamespace(inner=optimizer)
    before = 3e-3 * warmup_cosine(done, 6, 32, 0.1)
    trained.resume(3, {"position": done, "rates": [before]}, scale)
    assert trained.skipped == 3
    for step in range(30):
        position = done * scale + step
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (position - 6) / (32 - 6)))) / 2
        expected = 3e-3 * (min(1, (position + 1) / 6) if position < 6 else cosine)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        schedule.step()
