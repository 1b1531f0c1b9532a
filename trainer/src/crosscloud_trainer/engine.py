"""DeepSpeed, built and driven: beside adopting.py no other module imports it.

An inner step is: forward and backward of each micro-batch, then `step`. In it DeepSpeed reduces the gradients inside
the replica and calls our optimizer (shard_optimizer.py), which asks `Engine._before_step`: there the gradients are
exchanged between replicas, where the algorithm does that, and clipped; then the user's optimizer steps.
"""

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import deepspeed

from crosscloud_trainer.insides import insides_of
from crosscloud_trainer.layout import Index, Interval, ReplicaLayout
from crosscloud_trainer.shard import Shard
from crosscloud_trainer.shard_optimizer import ShardOptimizer

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class EngineError(Exception):
    """The engine can't be built, or its training can't go on; the message says why and what to do."""


class TooManySkippedStepsError(EngineError):
    """Gradients were not finite for so many steps in a row that training doesn't get anywhere."""


@dataclass(frozen=True)
class EngineSettings:
    zero_stage: Literal[0, 1, 2, 3]
    precision: Literal["fp32", "bf16"]
    micro_batch_size: int
    """Sequences per rank and micro-batch."""
    accumulation_steps: int | None = 1
    """Micro-batches per inner step; None where the caller says by `step` that one ends (a stage of a pipeline)."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all ranks of the replica; None to leave gradients as they are."""
    max_skipped_steps: int = 10
    """Skipped steps in a row that end the training."""


@dataclass(frozen=True)
class StepReport:
    """An inner step, alike on all ranks of the replica."""

    applied: bool
    """False where a gradient wasn't finite and the step was skipped."""
    skipped: int
    """Steps skipped since the start."""
    gradient_norm: float
    """Over all ranks, after an exchange, before clipping; infinite if the step was skipped."""
    learning_rate: float
    """Of the user's first group, in this step."""
    exchange_seconds: float = 0.0
    """Of this step, spent on exchanging its gradient with other replicas."""


def init_distributed(timeout: timedelta = timedelta(minutes=30)) -> torch.device:
    """Joins the process group that torchrun's environment describes (NCCL with CUDA, else gloo); returns this
    rank's device.
    """
    compile_nothing()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if cuda else "gloo", timeout=timeout, verbose=False)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def compile_nothing() -> None:
    """DeepSpeed would compile a shared-memory op in every process that finds a compiler; gloo serves as well."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def close() -> None:
    """Leaves the process group together with the other ranks; without the barrier the last ones may abort."""
    dist.barrier()
    dist.destroy_process_group()


def parameter_names(model: torch.nn.Module) -> dict[int, str]:
    """Canonical name by id of each parameter object: of a tied one, the name that comes first in byte order."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = names.get(id(parameter))
        names[id(parameter)] = name if known is None else min(known, name, key=lambda text: text.encode())
    return names


@dataclass(frozen=True)
class Whole:
    """The full model, as a stage of it knows it: all trained parameters, and the full-model names of the stage's own by
    id.
    """

    index: Index
    names: Mapping[int, str]


class GradientExchange(Protocol):
    """What an algorithm does with the gradients of every inner step. Collective in the replica."""

    def reduce(self, gradient: Shard) -> float | None:
        """Replaces the replica's gradient by that of all replicas and returns its norm over the whole model; None
        if all replicas skip this step.
        """
        ...

    def skip(self) -> None:
        """Tells the others that this replica's gradient wasn't finite: all skip this step."""
        ...


class Engine:
    """One rank's engine. Use as the DeepSpeed engine: call it, `backward`, `step`, for each micro-batch."""

    def __init__(
        self, engine: Any, optimizer: ShardOptimizer, settings: EngineSettings, index: Index, names: Mapping[int, str]
    ) -> None:
        self._partial = len(optimizer.names) < len(index.parameters)
        self._engine = engine
        self._optimizer = optimizer
        self._settings = settings
        self._insides = insides_of(engine.optimizer, optimizer, names, settings.zero_stage)
        self.index = index
        self.rank = dist.get_rank()
        intervals = self._insides.intervals(index, self.rank)
        self.layout = self._agree_on_layout(intervals)
        self.shard = Shard(index, intervals, self._insides.bind(index, intervals))
        self.exchange: GradientExchange | None = None
        """Set by an algorithm that exchanges gradients before each step."""
        optimizer.before_step = self._before_step
        self._asked = False
        self._norm = 0.0
        self._exchange_seconds = 0.0
        self._skipped = 0
        self._skipped_in_a_row = 0

    def _agree_on_layout(self, intervals: tuple[Interval, ...]) -> ReplicaLayout:
        shards: list[tuple[Interval, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(shards, intervals)
        own = frozenset(interval.parameter for shard in shards for interval in shard)
        empty = {number for number, parameter in enumerate(self.index.parameters) if not parameter.elements}
        return ReplicaLayout(self.index, tuple(shards), own | empty if self._partial else None)

    @property
    def zero_stage(self) -> int:
        return self._settings.zero_stage

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._engine.module
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self._engine.train(mode)

    def backward(self, loss: torch.Tensor) -> None:
        if self._settings.accumulation_steps is None and hasattr(self._engine.optimizer, "clear_backward_seen_flag"):
            # DeepSpeed clears it in each forward pass; in a pipeline backward passes follow each other.
            self._engine.optimizer.clear_backward_seen_flag()
        self._engine.backward(loss)

    def step(self) -> StepReport | None:
        """Ends a micro-batch; returns what the inner step did, or None if more micro-batches belong to it.

        Raises TooManySkippedStepsError, on all ranks alike.
        """
        return self.around(self._engine.step)

    def around(self, plain: Callable[[], object]) -> StepReport | None:
        """`step` where `plain` is DeepSpeed's own."""
        boundary = self._settings.accumulation_steps is None or self._engine.is_gradient_accumulation_boundary()
        rate = float(self._optimizer.inner.param_groups[0]["lr"])
        self._asked, self._exchange_seconds = False, 0.0
        plain()
        if not boundary:
            return None
        applied = bool(self._engine.was_step_applied())
        if self.exchange is not None and not self._asked:
            self._tell_skip(
                self.exchange
            )  # DeepSpeed skipped the step by itself; the others wait for this replica's word
        self._skipped_in_a_row = 0 if applied else self._skipped_in_a_row + 1
        self._skipped += not applied
        if self._skipped_in_a_row >= self._settings.max_skipped_steps:
            raise TooManySkippedStepsError(
                f"gradients were not finite for {self._skipped_in_a_row} steps in a row; lower the learning rate, "
                "clip gradients, or look for bad data"
            )
        norm = self._norm if applied else float("inf")
        return StepReport(applied, self._skipped, norm, rate, self._exchange_seconds)

    def clip_after_exchange(self) -> None:
        """Takes clipping over from DeepSpeed, which would clip before the exchange, each replica by another norm."""
        limit = float(self._engine.gradient_clipping())
        if not limit:
            return
        self._engine._config.gradient_clipping = 0.0
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = 0.0
        self._settings = replace(self._settings, clip_norm=limit)

    def refresh(self) -> None:
        """Copies the fp32 shards, after a round rewrote them, to the working weights of all ranks.
        Collective.
        """
        self._insides.refresh()

    def optimizer_tensors(self) -> list[tuple[Interval, dict[str, torch.Tensor]]]:
        """State of the user's optimizer on this rank by interval of its shard; counts are 0-d tensors."""
        return list(zip(self.shard.intervals, self._insides.states(), strict=True))

    def optimizer_places(self) -> list[tuple[Interval, torch.Tensor]]:
        """What the user's optimizer works on here, and so keeps state for, by interval of the model."""
        return self._insides.places()

    def state(self) -> list[torch.Tensor]:
        """Weights, then what the optimizer keeps of each element, by name: compact fp32 by the shard's intervals.
        Collective.
        """
        kept = self._insides.states()
        return [self.shard.read(), *(_compact(name, self.shard.intervals, kept) for name in self._kept_names(kept))]

    def set_state(self, vectors: Sequence[torch.Tensor]) -> None:
        """The inverse of `state`; the working weights of all ranks follow. Collective."""
        kept = self._insides.states()
        names = self._kept_names(kept)
        self.shard.write(vectors[0])
        for name, vector in zip(names, vectors[1:], strict=True):
            position = 0
            for interval, values in zip(self.shard.intervals, kept, strict=True):
                if name in values:
                    values[name].view(-1).copy_(vector[position : position + interval.elements])
                position += interval.elements
        self._insides.share_states(names)
        self._insides.refresh()

    def _kept_names(self, kept: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
        """Of tensors that the optimizer keeps; a rank without a part of the model has none itself. Collective."""
        own = {name for values in kept for name, value in values.items() if value.dim()}
        told: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(told, own)
        return sorted(set().union(*told))

    def load_optimizer(self, states: list[dict[str, torch.Tensor]]) -> None:
        """Sets the state of the user's optimizer, one for each of `optimizer_places`: flat tensors, counts as 0-d
        ones.
        """
        self._optimizer.load(states)

    @property
    def skipped(self) -> int:
        """Steps skipped since the start."""
        return self._skipped

    def schedule(self) -> dict[str, Any]:
        """Where the schedule stands (applied steps) and the rates of the user's groups."""
        rates = [float(group["lr"]) for group in self._optimizer.inner.param_groups]
        scheduler = self._engine.lr_scheduler
        return {"position": None if scheduler is None else scheduler.last_epoch, "rates": rates}

    def resume(self, skipped: int, schedule: dict[str, Any], scale: float) -> None:
        """Goes on where `skipped` and `schedule` say. `scale` is how many of the present steps one of those was: the
        schedule follows tokens, not steps.
        """
        self._skipped = skipped
        groups, scheduler = self._optimizer.inner.param_groups, self._engine.lr_scheduler
        for group, rate in zip(groups, schedule["rates"], strict=True):
            group["lr"] = rate
        if scheduler is None or schedule["position"] is None:
            return
        scheduler.last_epoch = schedule["position"] if scale == 1 else schedule["position"] * scale
        scheduler._step_count = int(scheduler.last_epoch) + 1
        if scale != 1:
            for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                group["lr"] = base * factor(scheduler.last_epoch)

    def _before_step(self) -> bool:
        """Exchanges and clips the gradients; False to leave the weights as they are."""
        self._asked = True
        self._norm = self._insides.gradient_norm()
        if not math.isfinite(self._norm):
            # Only ZeRO 0 in fp32 comes here: DeepSpeed doesn't look at its gradients.
            if self.exchange is not None:
                self._tell_skip(self.exchange)
            return self._skip()
        if self.exchange is not None:
            started = time.monotonic()
            norm = self.exchange.reduce(Shard(self.index, self.shard.intervals, self._insides.gradients()))
            self._exchange_seconds += time.monotonic() - started
            if norm is None:
                return self._skip()
            self._norm = norm
            self._insides.share_gradients()
        limit = self._settings.clip_norm
        if limit is not None:
            factor = limit / (self._norm + 1e-6)
            if factor < 1:
                for gradient in self._insides.all_gradients():
                    gradient.mul_(factor)
        return True

    def _tell_skip(self, exchange: GradientExchange) -> None:
        started = time.monotonic()
        exchange.skip()
        self._exchange_seconds += time.monotonic() - started

    def _skip(self) -> bool:
        """Has DeepSpeed count this step as skipped: it leaves the learning rate's schedule where it is."""
        self._engine.optimizer.overflow = True
        return False


def build(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: EngineSettings,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    whole: Whole | None = None,
) -> Engine:
    """The engine of this rank. Collective.

    `optimizer` works on parameters of `model`, in groups of the user's choice, and has not stepped yet; only
    those parameters are trained. `scheduler`, on that optimizer, is stepped after each inner step that is
    applied. `whole` tells of the full model where `model` is a stage of it.
    """
    names = whole.names if whole else parameter_names(model)
    check_optimizer(optimizer, names)
    trained = {names[id(p)]: p.numel() for group in optimizer.param_groups for p in group["params"]}
    wrapped = ShardOptimizer(optimizer, names)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=wrapped, lr_scheduler=scheduler, config=_deepspeed_config(settings)
    )
    return Engine(engine, wrapped, settings, whole.index if whole else Index.of(trained), names)


def check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raises EngineError unless `optimizer` is a new one, on trained parameters of the model with these names by id."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise EngineError("the optimizer has no parameters; give it those of the model that are to be trained")
    if any(id(p) not in names for p in parameters):
        raise EngineError("the optimizer has parameters that are not the model's")
    if any(not p.requires_grad for p in parameters):
        raise EngineError("the optimizer has frozen parameters; leave them out, or set requires_grad")
    if optimizer.state:
        raise EngineError("the optimizer has stepped before; build the engine with a new one")


def _deepspeed_config(settings: EngineSettings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.zero_stage == 3:
        # One sub-group: DeepSpeed calls the optimizer once for each.
        zero["sub_group_size"] = 1 << 60
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.accumulation_steps or 1,
        "managed_gradient_accumulation": settings.accumulation_steps is not None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.precision == "bf16"},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }


def _compact(name: str, intervals: Sequence[Interval], kept: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """What the optimizer keeps under this name, end to end; zeros where it keeps nothing yet."""
    parts = [
        values[name].reshape(-1).float() if name in values else torch.zeros(interval.elements)
        for interval, values in zip(intervals, kept, strict=True)
    ]
    return torch.cat(parts) if parts else torch.empty(0)
