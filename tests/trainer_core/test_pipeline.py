"""A replica cut into stages, each with real DeepSpeed ranks of its own, beside the uncut model."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from trainer_core.launch import Replica, named

STEPS = 50
BAD_STEP = 3
ZERO = [0, 1, 2, 3]
STAGES = [1, 2, 4]


@pytest.fixture(scope="module")
def results():
    """What every stage saw, by scenario: a list with one entry for each stage."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(minutes=10), wait_for_workers=False)
    scenarios = {named(zero, stages): (stages, {"zero": zero, "steps": STEPS}) for zero in ZERO for stages in STAGES}
    scenarios["bf16"] = (2, {"zero": 1, "steps": 20, "precision": "bf16"})
    for zero in ZERO:
        scenarios[named("spoilt", zero)] = (2, {"zero": zero, "steps": 5, "bad_step": BAD_STEP})
    plans = [[] for _ in range(max(STAGES))]
    for name, (stages, more) in scenarios.items():
        for stage in range(stages):
            arguments = {"port": store.port, "name": name, "stage": stage, "stages": stages, **more}
            plans[stage].append([name, "pipeline_stage", arguments])
    found = Replica.results([Replica("our_engine.py", 2, plan) for plan in plans])
    return {name: [found[stage][name] for stage in range(stages)] for name, (stages, _) in scenarios.items()}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_have_the_losses_of_the_uncut_model(stages, zero, results):
    (uncut,) = results[named(zero, 1)]
    parts = results[named(zero, stages)]
    for mine, theirs in zip(parts[-1]["losses"], uncut["losses"], strict=True):
        assert len(mine) == STEPS
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert parts[-1]["losses"][0][-1] < 0.9 * parts[-1]["losses"][0][0]


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_norm_for_clipping_is_that_of_the_whole_model_and_the_same_number_on_all_stages(stages, zero, results):
    (uncut,) = results[named(zero, 1)]
    parts = results[named(zero, stages)]
    assert all(part["norms"] == parts[0]["norms"] for part in parts)
    assert parts[0]["norms"] == pytest.approx(uncut["norms"], rel=1e-4)
    assert max(uncut["norms"]) > 0.5


@pytest.mark.parametrize("zero", ZERO)
def test_a_gradient_that_is_not_finite_on_one_stage_has_all_stages_skip_the_step(zero, results):
    expected = [number != BAD_STEP for number in range(1, 6)]
    assert [part["applied"] for part in results[named("spoilt", zero)]] == [expected, expected]


def test_bf16_learns_through_stages_too(results):
    losses = results["bf16"][-1]["losses"][0]
    assert losses[-1] < 0.95 * losses[0]
