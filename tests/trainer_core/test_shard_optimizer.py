"""The optimizer that DeepSpeed is shown, without DeepSpeed: a flat shard and its gradient are all that it
needs.
"""

import copy
import types

import pytest
import torch

from crosscloud_trainer.engine import parameter_names
from crosscloud_trainer.insides import InsidesError, insides_of
from crosscloud_trainer.layout import Index, contiguous_shard
from crosscloud_trainer.shard import Shard
from crosscloud_trainer.shard_optimizer import ShardOptimizer, ShardOptimizerError


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))


def groups(model):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-2},
    ]


class Whole:
    """The optimizer over the shard of the only rank, with 3 elements of padding."""

    def __init__(self):
        self.model = net()
        names = parameter_names(self.model)
        self.inner = torch.optim.AdamW(groups(self.model))
        self.optimizer = ShardOptimizer(self.inner, names)
        shown = self.optimizer.param_groups[0]["params"]
        order = [names[id(p)] for p in shown]
        values = torch.cat([p.detach().flatten() for p in shown] + [torch.full((3,), torch.nan)])
        index = Index.of({names[id(p)]: p.numel() for p in shown})
        self.flat = torch.nn.Parameter(values)
        intervals = contiguous_shard(index, order, len(values), 0)
        self.shard = Shard.of_flat(index, intervals, self.flat.data)
        parts = [
            (index.parameters[i.parameter].name, part) for i, part in zip(intervals, self.shard.parts, strict=True)
        ]
        self.optimizer.bind(parts, lambda: [self.flat.grad[i.offset : i.offset + i.elements] for i in intervals])

    def step(self, seed):
        torch.manual_seed(seed)
        self.flat.grad = torch.randn(self.flat.shape)
        self.optimizer.step()

    def values(self):
        return self.shard.read().clone()


def test_deepspeed_is_shown_one_group_with_all_parameters():
    whole = Whole()
    assert len(whole.optimizer.param_groups) == 1
    assert len(whole.optimizer.param_groups[0]["params"]) == 6


def test_steps_are_those_of_the_users_optimizer_on_the_users_groups():
    whole, model = Whole(), net()
    plain = torch.optim.AdamW(groups(model))
    for seed in range(4):
        whole.step(seed)
        gradients = whole.flat.grad
        position = 0
        for group in plain.param_groups:
            for parameter in group["params"]:
                stop = position + parameter.numel()
                parameter.grad = gradients[position:stop].view_as(parameter).clone()
                position = stop
        plain.step()
    expected = torch.cat([p.detach().flatten() for group in plain.param_groups for p in group["params"]])
    assert torch.equal(whole.values(), expected)
    assert bool(whole.flat.data[-3:].isnan().all())


def test_the_state_of_the_users_optimizer_survives_saving_and_loading():
    whole, again = Whole(), Whole()
    for seed in range(3):
        whole.step(seed)
    whole.inner.param_groups[1]["lr"] = 0.5
    again.flat.data.copy_(whole.flat.data)
    again.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    for optimizer in (whole, again):
        optimizer.step(9)
    assert torch.equal(again.values(), whole.values())
    assert again.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_learning_rate_set_on_the_shown_group_reaches_all_of_the_users_groups():
    whole = Whole()
    whole.step(0)
    assert [group["lr"] for group in whole.inner.param_groups] == [1e-2, 3e-2]
    whole.optimizer.param_groups[0]["lr"] = 0.0
    before = whole.values()
    whole.step(1)
    assert torch.equal(whole.values(), before)


def test_a_schedule_on_the_users_optimizer_is_shown_to_deepspeed():
    whole = Whole()
    schedule = torch.optim.lr_scheduler.LambdaLR(whole.inner, lambda step: 1 / (1 + step))
    rates = []
    for seed in range(3):
        whole.step(seed)
        rates.append(whole.optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 3])


def test_a_tied_parameter_has_the_name_that_comes_first_in_byte_order():
    model = net()
    model[2].weight = torch.nn.Parameter(torch.zeros(3, 5))
    model.add_module("Z", torch.nn.Module())
    model.Z.weight = model[2].weight
    names = parameter_names(model)
    assert names[id(model[2].weight)] == "2.weight"
    assert len(names) == 6


@pytest.mark.parametrize(("stage", "name"), [(1, "single_partition_of_fp32_groups"), (3, "fp16_groups")])
def test_another_version_of_deepspeed_is_refused_by_the_names_that_it_lacks(stage, name):
    model = net()
    optimizer = ShardOptimizer(torch.optim.SGD(model.parameters()), parameter_names(model))
    with pytest.raises(InsidesError, match=rf"has no .*{name}.* in SimpleNamespace; use 0\.19\.8"):
        insides_of(types.SimpleNamespace(_global_grad_norm=0), optimizer, {}, stage)


def test_a_step_before_the_engine_is_built_and_a_closure_are_errors():
    model = net()
    optimizer = ShardOptimizer(torch.optim.AdamW(groups(model)), parameter_names(model))
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(9))]
    with pytest.raises(ShardOptimizerError, match="no shard yet"):
        optimizer.step()
    with pytest.raises(ShardOptimizerError, match="closure"):
        optimizer.step(lambda: 0.0)
