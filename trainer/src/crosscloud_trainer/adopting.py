"""DeepSpeed engines that a script builds and drives itself: how they are followed, and taken for ours."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from crosscloud_trainer.engine import Engine, EngineError, EngineSettings, check_optimizer, parameter_names
from crosscloud_trainer.layout import Index
from crosscloud_trainer.shard_optimizer import ShardOptimizer


class Watcher(Protocol):
    """What is told of the DeepSpeed engine that a script built and drives itself."""

    def backward(self, loss: torch.Tensor) -> None:
        """The script's loss of a micro-batch."""
        ...

    def step(self, engine: Any, plain: Callable[[], object]) -> None:
        """Instead of DeepSpeed's step; `plain` is that step. Once for each micro-batch."""
        ...

    def forward(self) -> None:
        """Before a forward pass in which the ranks gather the weights (ZeRO 3)."""
        ...


_watchers: weakref.WeakKeyDictionary[ShardOptimizer, Watcher] = weakref.WeakKeyDictionary()


def watch(optimizer: ShardOptimizer, watcher: Watcher) -> None:
    """Has `watcher` told of the DeepSpeed engine that will be built with `optimizer`; others stay as they are."""
    _watchers[optimizer] = watcher
    _wrap_engine()


@functools.cache
def _wrap_engine() -> None:
    """One wrapper, once in a process. ZeRO takes our optimizer without being told that it may: inside, it is the
    user's, which steps on whatever DeepSpeed gives it."""
    # Here and not above: engine.py, which says what DeepSpeed runs on, must be imported before it.
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero import utils

    utils.ZERO_SUPPORTED_OPTIMIZERS.append(ShardOptimizer)
    plain_step, plain_backward, plain_forward = DeepSpeedEngine.step, DeepSpeedEngine.backward, DeepSpeedEngine.forward

    def watcher_of(engine: Any) -> Watcher | None:
        given = engine.client_optimizer
        return _watchers.get(given) if isinstance(given, ShardOptimizer) else None

    @functools.wraps(plain_step)
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        watcher = watcher_of(self)
        if watcher is None:
            plain_step(self, *args, **kwargs)
        else:
            watcher.step(self, lambda: plain_step(self, *args, **kwargs))

    @functools.wraps(plain_backward)
    def backward(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watcher = watcher_of(self)
        if watcher is not None:
            unscaled = kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True)
            watcher.backward(loss if unscaled else loss * self.gradient_accumulation_steps())
        return plain_backward(self, loss, *args, **kwargs)

    @functools.wraps(plain_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = watcher_of(self)
        if watcher is not None and self.zero_optimization_stage() == 3:
            watcher.forward()
        return plain_forward(self, *args, **kwargs)

    DeepSpeedEngine.step, DeepSpeedEngine.backward, DeepSpeedEngine.forward = step, backward, forward


def adopt(engine: Any, optimizer: ShardOptimizer, *, max_skipped_steps: int = 10) -> Engine:
    """The engine around a DeepSpeed engine that a script built with `optimizer`. Collective, before its first step.

    Raises EngineError for a configuration that can't be trained this way.
    """
    stage = int(engine.zero_optimization_stage())
    _check_adopted(engine, stage)
    names = parameter_names(engine.module)
    check_optimizer(optimizer.inner, names)
    optimizer.name(names)
    trained = {names[id(p)]: _elements(p) for group in optimizer.users_groups for p in group}
    settings = EngineSettings(
        zero_stage=stage,  # type: ignore[arg-type]  # DeepSpeed has no others
        precision="bf16" if engine.bfloat16_enabled() else "fp32",
        micro_batch_size=int(engine.train_micro_batch_size_per_gpu()),
        accumulation_steps=int(engine.gradient_accumulation_steps()),
        max_skipped_steps=max_skipped_steps,
    )
    return Engine(engine, optimizer, settings, Index.of(trained), names)


def _check_adopted(engine: Any, stage: int) -> None:
    faults = []
    if engine.fp16_enabled():
        faults.append("fp16.enabled: found true; loss scaling is each replica's own: use bf16 or fp32")
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    if any(offload is not None and offload.device != "none" for offload in offloads):
        faults.append("zero_optimization.offload_optimizer, offload_param: must be left out")
    if engine.pipeline_parallelism:
        faults.append("the model is a PipelineModule: only plain modules can be wrapped")
    if stage == 3 and len(engine.optimizer.fp32_partitioned_groups_flat) > 1:
        found = engine.zero_sub_group_size()
        faults.append(f"zero_optimization.sub_group_size: found {found:g}; must be above a rank's part of the model")
    if faults:
        raise EngineError("DeepSpeed's configuration can't be used in a job: " + "; ".join(faults))


def _elements(parameter: torch.nn.Parameter) -> int:
    """Of the whole parameter, also where ZeRO 3 has left a rank none of it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
