"""DeepSpeed, and everything that is known of its insides: no other module imports it.

DeepSpeed is shown one parameter group that has all trained parameters. It calls the optimizer once per step
with one flat fp32 shard and its reduced gradient. Inside, the user's own optimizer works on views of that
shard, one for each interval of a parameter, in the user's own groups; so decay and no-decay groups, schedules
and state stay the user's. (With several groups DeepSpeed would copy the first to the working weights before
it shows the next, and a norm over all of them could not be taken first.)
"""

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import deepspeed

from crosscloud_trainer.layout import Index, Interval, ReplicaLayout, contiguous_shard, split_shard
from crosscloud_trainer.shard import Shard

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class EngineError(Exception):
    """The engine can't be built, or its training can't go on; the message says why and what to do."""


class TooManySkippedStepsError(EngineError):
    """Gradients were not finite for so many steps in a row that training doesn't get anywhere."""


@dataclass(frozen=True)
class EngineSettings:
    zero_stage: Literal[1, 2, 3]
    precision: Literal["fp32", "bf16"]
    micro_batch_size: int
    """Sequences per rank and micro-batch."""
    accumulation_steps: int = 1
    """Micro-batches per inner step."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all ranks of the replica; None to leave gradients as they are."""
    max_skipped_steps: int = 10
    """Skipped steps in a row that end the training."""


@dataclass(frozen=True)
class StepReport:
    """An inner step, alike on all ranks of the replica."""

    applied: bool
    """False where a gradient wasn't finite and DeepSpeed skipped the step."""
    skipped: int
    """Steps skipped since the start."""
    gradient_norm: float
    """Over all ranks, before clipping; infinite if the step was skipped."""
    learning_rate: float
    """Of the user's first group, in this step."""


def init_distributed(timeout: timedelta = timedelta(minutes=30)) -> torch.device:
    """Joins the process group that torchrun's environment describes (NCCL with CUDA, else gloo); returns this
    rank's device.
    """
    # DeepSpeed would compile a shared-memory op in every process that finds a compiler; gloo serves as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if cuda else "gloo", timeout=timeout, verbose=False)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


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


class ShardOptimizer(torch.optim.Optimizer):
    """Shows DeepSpeed one group; inside, the user's optimizer works on views of the shard in the user's
    groups.
    """

    def __init__(self, inner: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self.inner = inner
        self._names = [[names[id(p)] for p in group["params"]] for group in inner.param_groups]
        self._views: list[tuple[torch.nn.Parameter, slice]] = []  # in order of the shard's intervals
        self._flat: torch.Tensor | None = None
        self.before_step: Callable[[torch.Tensor], None] | None = None
        parameters = [p for group in inner.param_groups for p in group["params"]]
        super().__init__(parameters, {"lr": inner.param_groups[0]["lr"]})
        self._shown_rate = inner.param_groups[0]["lr"]

    def bind(self, shard: Shard, flat: torch.Tensor) -> None:
        """Replaces the parameters in the user's groups by views of the shard. Once, after DeepSpeed has made
        it.
        """
        by_name: dict[str, list[torch.nn.Parameter]] = {}
        for interval in shard.intervals:
            place = slice(interval.offset, interval.offset + interval.elements)
            view = torch.nn.Parameter(flat.data[place])
            self._views.append((view, place))
            by_name.setdefault(shard.index.parameters[interval.parameter].name, []).append(view)
        for group, names in zip(self.inner.param_groups, self._names, strict=True):
            group["params"] = [view for name in names for view in by_name.get(name, [])]
        self._flat = flat

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Called by DeepSpeed, once per inner step that it doesn't skip."""
        if closure is not None:
            raise EngineError("a closure can't be used: DeepSpeed has computed the gradients before")
        if self._flat is None:
            raise EngineError("the optimizer has no shard yet; DeepSpeed stepped before the engine was built")
        gradient = self._flat.grad
        assert gradient is not None
        self._pass_rate()
        if self.before_step is not None:
            self.before_step(gradient)
        for view, place in self._views:
            view.grad = gradient[place]
        self.inner.step()
        for view, _ in self._views:
            view.grad = None

    def states(self) -> list[dict[str, torch.Tensor]]:
        """The tensors that the user's optimizer keeps of each view, in order of the shard's intervals."""
        kept = self.inner.state
        return [
            {name: value for name, value in kept.get(view, {}).items() if isinstance(value, torch.Tensor)}
            for view, _ in self._views
        ]

    def _pass_rate(self) -> None:
        """A learning rate that someone set on our group goes to all of the user's groups; theirs are shown in
        ours.
        """
        group = self.param_groups[0]
        if group["lr"] != self._shown_rate:
            for inner in self.inner.param_groups:
                inner["lr"] = group["lr"]
        group["lr"] = self._shown_rate = self.inner.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self._shown_rate = self.inner.param_groups[0]["lr"]
        self.param_groups[0]["lr"] = self._shown_rate


class Engine:
    """One rank's engine. Use as the DeepSpeed engine: call it, `backward`, `step`, for each micro-batch."""

    def __init__(
        self, engine: Any, optimizer: ShardOptimizer, settings: EngineSettings, index: Index, names: dict[int, str]
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._settings = settings
        self._insides = _insides_of(engine.optimizer, settings.zero_stage)
        self.index = index
        self.rank = dist.get_rank()
        self.layout = self._agree_on_layout(names)
        flat = self._insides.flat()
        self.shard = Shard(index, self.layout.shards[self.rank], flat.data)
        optimizer.bind(self.shard, flat)
        optimizer.before_step = self._clip
        self._skipped = 0
        self._skipped_in_a_row = 0

    def _agree_on_layout(self, names: dict[int, str]) -> ReplicaLayout:
        shards: list[tuple[Interval, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(shards, self._insides.intervals(self.index, names, self.rank))
        return ReplicaLayout(self.index, tuple(shards))

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._engine.module
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self._engine.train(mode)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> StepReport | None:
        """Ends a micro-batch; returns what the inner step did, or None if more micro-batches belong to it.

        Raises TooManySkippedStepsError, on all ranks alike.
        """
        boundary = self._engine.is_gradient_accumulation_boundary()
        rate = float(self._optimizer.inner.param_groups[0]["lr"])
        self._engine.step()
        if not boundary:
            return None
        applied = bool(self._engine.was_step_applied())
        self._skipped_in_a_row = 0 if applied else self._skipped_in_a_row + 1
        self._skipped += not applied
        if self._skipped_in_a_row >= self._settings.max_skipped_steps:
            raise TooManySkippedStepsError(
                f"gradients were not finite for {self._skipped_in_a_row} steps in a row; lower the learning rate, "
                "clip gradients, or look for bad data"
            )
        norm = self._insides.gradient_norm() if applied else float("inf")
        return StepReport(applied, self._skipped, norm, rate)

    def refresh(self) -> None:
        """Copies the fp32 shards, after a round rewrote them, to the working weights of all ranks.
        Collective.
        """
        self._insides.refresh()

    def optimizer_tensors(self) -> list[tuple[Interval, dict[str, torch.Tensor]]]:
        """State of the user's optimizer on this rank by interval of its shard; counts are 0-d tensors."""
        return list(zip(self.shard.intervals, self._optimizer.states(), strict=True))

    def _clip(self, gradient: torch.Tensor) -> None:
        limit = self._settings.clip_norm
        if limit is None:
            return
        norm = self._insides.gradient_norm()
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))


def build(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: EngineSettings,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Engine:
    """The engine of this rank. Collective.

    `optimizer` works on parameters of `model`, in groups of the user's choice, and has not stepped yet; only
    those parameters are trained. `scheduler`, on that optimizer, is stepped after each inner step that is
    applied.
    """
    names = parameter_names(model)
    _check_optimizer(optimizer, names)
    trained = {names[id(p)]: p.numel() for group in optimizer.param_groups for p in group["params"]}
    wrapped = ShardOptimizer(optimizer, names)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=wrapped, lr_scheduler=scheduler, config=_deepspeed_config(settings)
    )
    return Engine(engine, wrapped, settings, Index.of(trained), names)


def _check_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
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
        "gradient_accumulation_steps": settings.accumulation_steps,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.precision == "bf16"},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }


class _Partitioned:
    """ZeRO 1 and 2 of DeepSpeed 0.19: the group's parameters end to end, cut in equal contiguous pieces."""

    NAMES = (
        "single_partition_of_fp32_groups",
        "partition_size",
        "bit16_groups",
        "_global_grad_norm",
        "update_lp_params",
    )

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def flat(self) -> torch.Tensor:
        flat: torch.Tensor = self._zero.single_partition_of_fp32_groups[0]
        return flat

    def intervals(self, index: Index, names: dict[int, str], rank: int) -> tuple[Interval, ...]:
        order = [names[id(p)] for p in self._zero.bit16_groups[0]]
        return contiguous_shard(index, order, int(self._zero.partition_size[0]), rank)

    def gradient_norm(self) -> float:
        """Of the step that is under way or the last one, over all ranks."""
        return float(self._zero._global_grad_norm)

    def refresh(self) -> None:
        self._zero.update_lp_params()


class _Split:
    """ZeRO 3 of DeepSpeed 0.19: each parameter cut in as many pieces as there are ranks."""

    NAMES = (
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "persistent_parameters",
        "_global_grad_norm",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
    )

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def flat(self) -> torch.Tensor:
        flat: torch.Tensor = self._zero.fp32_partitioned_groups_flat[0]
        return flat

    def intervals(self, index: Index, names: dict[int, str], rank: int) -> tuple[Interval, ...]:
        order = [names[id(p)] for p in self._zero.fp16_groups[0]]
        return split_shard(index, order, dist.get_world_size(), rank)

    def gradient_norm(self) -> float:
        return float(self._zero._global_grad_norm)

    def refresh(self) -> None:
        # Parameters that are whole at the moment would keep their old values, and the small ones always are.
        self._zero._partition_all_parameters()
        self._zero._reassign_or_swap_out_partitioned_parameters(0)
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def _insides_of(zero: Any, stage: int) -> _Partitioned | _Split:
    """The part of DeepSpeed's optimizer that we rely on; EngineError if this version names it otherwise."""
    insides = _Split if stage == 3 else _Partitioned
    missing = [name for name in insides.NAMES if not hasattr(zero, name)]
    if missing:
        raise EngineError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)} in {type(zero).__name__}; use 0.19.8"
        )
    return insides(zero)
