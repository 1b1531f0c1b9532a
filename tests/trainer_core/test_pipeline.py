"""A replica cut into stages, each with real DeepSpeed ranks of its own, beside the uncut model."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from trainer_core.launch import Replica, named

from crosscloud_trainer.engine import StepReport
from crosscloud_trainer.group import TorchGroup
from crosscloud_trainer.pipeline import Pipeline, Position

STEPS = 50
BAD_STEP = 3
ZERO = [0, 1, 2, 3]
STAGES = [1, 2, 4]
# A stage adds up its micro-batches in bf16 and reduces once, as ZeRO 1 and 3 do with those of an uncut model. ZeRO
# 0 and 2 reduce there after each one, and so round elsewhere: 6e-4. Bf16 beside fp32 is off by 4e-3.
BF16_ERROR = {0: 2**-9, 1: 1e-6, 2: 2**-9, 3: 1e-6}


@pytest.fixture(scope="module")
def results():
    """What every stage saw, by scenario: a list with one entry for each stage."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(minutes=10), wait_for_workers=False)
    scenarios = {named(zero, stages): (stages, {"zero": zero, "steps": STEPS}) for zero in ZERO for stages in STAGES}
    for zero in ZERO:
        scenarios[named("spoilt", zero)] = (2, {"zero": zero, "steps": 5, "bad_step": BAD_STEP})
        for stages in (1, 2):
            scenarios[named("bf16", zero, stages)] = (stages, {"zero": zero, "steps": 20, "precision": "bf16"})
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


@pytest.mark.parametrize("zero", ZERO)
def test_bf16_learns_through_stages_what_the_uncut_model_learns_in_bf16(zero, results):
    (uncut,), parts = results[named("bf16", zero, 1)], results[named("bf16", zero, 2)]
    for mine, theirs in zip(parts[-1]["losses"], uncut["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=BF16_ERROR[zero])
        assert mine[-1] < 0.95 * mine[0]


class OnAnotherDevice:
    """An engine on a device that computes no values; it takes none from another one."""

    def __init__(self):
        self.weight = torch.ones(3, device="meta", requires_grad=True)

    def __call__(self, given, labels):
        assert (given.device.type, labels) == ("meta", None)
        return given * self.weight

    def backward(self, loss):
        assert loss.device.type == "meta"
        loss.backward()

    def step(self):
        return StepReport(True, 0, 1.0, 0.1)


class Post:
    """Neighbours whose values come from their mail, in main memory; tells the device of what goes out."""

    def __init__(self):
        self.sent = []

    def send_activation(self, micro_batch, values):
        self.sent.append(("activation", micro_batch, values.device.type))

    def send_gradient(self, micro_batch, values):
        self.sent.append(("gradient", micro_batch, values.device.type))

    def receive_activation(self, _micro_batch):
        return torch.ones(2, 3)

    receive_gradient = receive_activation


def test_a_stage_computes_on_its_own_device_with_what_comes_to_main_memory():
    engine, post = OnAnotherDevice(), Post()
    batches = [({"input_ids": torch.ones(2), "labels": torch.ones(2)}, 1.0)] * 2
    Pipeline(engine, Position(1, 3), post, torch.device("meta")).step(batches)
    kinds = ("activation", "activation", "gradient", "gradient")
    assert post.sent == [(kind, number, "meta") for kind, number in zip(kinds, (0, 1, 0, 1), strict=True)]
    assert engine.weight.grad.device.type == "meta"


class Placed:
    """Values that only say where they lie, as no second kind of device is here."""

    def __init__(self, device):
        self.device = torch.device(device)

    def to(self, device):
        return Placed(device)


def test_sums_are_made_on_the_device_of_the_group_and_come_back_to_that_of_their_values(monkeypatch):
    told = []
    monkeypatch.setattr(dist, "get_rank", lambda _group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _group: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: told.append((values.device.type, group)))
    group = TorchGroup(torch.device("cuda"))
    assert [group.sums(Placed(device)).device.type for device in ("cpu", "cuda")] == ["cpu", "cuda"]
    assert told == [("cuda", None)] * 2
