"""What the engine relies on of DeepSpeed 0.19 inside: where a rank has its fp32 weights and gradients, by ZeRO stage.

These names are no public interface of DeepSpeed: the version is pinned, and `insides_of` refuses one that names them
otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from crosscloud_trainer.layout import Index, Interval, contiguous_shard, dealt_shard, split_shard
from crosscloud_trainer.shard_optimizer import ShardOptimizer


class InsidesError(Exception):
    """DeepSpeed isn't the version that is known here."""


class Insides(Protocol):
    """What the engine needs to know of one rank. Collective methods are called by all ranks of the stage."""

    def intervals(self, index: Index, rank: int) -> tuple[Interval, ...]:
        """The rank's part of the model."""
        ...

    def bind(self, index: Index, intervals: tuple[Interval, ...]) -> list[torch.Tensor]:
        """Gives the user's optimizer what it works on; returns the live fp32 weights of each interval."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The live fp32 gradients of each interval, while the optimizer steps."""
        ...

    def all_gradients(self) -> list[torch.Tensor]:
        """All fp32 gradients that the user's optimizer sees on this rank, to be scaled."""
        ...

    def gradient_norm(self) -> float:
        """Of the step that is under way or the last one, over all ranks, before clipping."""
        ...

    def states(self) -> list[dict[str, torch.Tensor]]:
        """What the user's optimizer keeps of each interval: flat tensors, and counts as 0-d ones."""
        ...

    def places(self) -> list[tuple[Interval, torch.Tensor]]:
        """What the user's optimizer works on, in its order, as intervals of the model."""
        ...

    def share_gradients(self) -> None:
        """After `gradients` were rewritten: brings them to whoever works on them. Collective."""
        ...

    def share_states(self, names: Sequence[str]) -> None:
        """After what `states` has under these names was rewritten: brings it to whoever works on it. Collective."""
        ...

    def refresh(self) -> None:
        """After the fp32 weights were rewritten: brings them to the working weights of all ranks. Collective."""
        ...


class _Flat:
    """ZeRO 1 to 3: the rank has one flat fp32 shard with a flat gradient."""

    NAMES: tuple[str, ...]
    """What DeepSpeed's optimizer must have; the first one holds the shard."""

    def __init__(self, zero: Any, optimizer: ShardOptimizer, names: Mapping[int, str]) -> None:
        self._zero, self._optimizer, self._names = zero, optimizer, names
        self._intervals: tuple[Interval, ...] = ()

    def flat(self) -> torch.Tensor:
        flat: torch.Tensor = getattr(self._zero, self.NAMES[0])[0]
        return flat

    def bind(self, index: Index, intervals: tuple[Interval, ...]) -> list[torch.Tensor]:
        self._intervals = intervals
        parts = self._cut(self.flat().data)
        names = [index.parameters[interval.parameter].name for interval in intervals]
        self._optimizer.bind(list(zip(names, parts, strict=True)), self.gradients)
        return parts

    def gradients(self) -> list[torch.Tensor]:
        gradient = self.flat().grad
        assert gradient is not None
        return self._cut(gradient)

    def all_gradients(self) -> list[torch.Tensor]:
        gradient = self.flat().grad
        assert gradient is not None
        return [gradient]

    def gradient_norm(self) -> float:
        return float(self._zero._global_grad_norm)

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [state for _, state in self._optimizer.states()]

    def places(self) -> list[tuple[Interval, torch.Tensor]]:
        return list(zip(self._intervals, self._cut(self.flat().data), strict=True))

    def share_gradients(self) -> None:
        """Each rank works on its own."""

    def share_states(self, names: Sequence[str]) -> None:
        """Each rank works on its own."""

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[i.offset : i.offset + i.elements] for i in self._intervals]


class _Partitioned(_Flat):
    """ZeRO 1 and 2: the parameters end to end, cut in equal contiguous pieces."""

    NAMES = (
        "single_partition_of_fp32_groups",
        "partition_size",
        "bit16_groups",
        "_global_grad_norm",
        "update_lp_params",
    )

    def intervals(self, index: Index, rank: int) -> tuple[Interval, ...]:
        order = [self._names[id(p)] for p in self._zero.bit16_groups[0]]
        return contiguous_shard(index, order, int(self._zero.partition_size[0]), rank)

    def refresh(self) -> None:
        self._zero.update_lp_params()


class _Split(_Flat):
    """ZeRO 3: each parameter cut in as many pieces as there are ranks."""

    NAMES = (
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "persistent_parameters",
        "_global_grad_norm",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
    )

    def intervals(self, index: Index, rank: int) -> tuple[Interval, ...]:
        order = [self._names[id(p)] for p in self._zero.fp16_groups[0]]
        return split_shard(index, order, dist.get_world_size(), rank)

    def refresh(self) -> None:
        # Parameters that are whole at the moment would keep their old values, and the small ones always are.
        self._zero._partition_all_parameters()
        self._zero._reassign_or_swap_out_partitioned_parameters(0)
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


class _Whole:
    """ZeRO 0: every rank has all fp32 weights and steps on them; of the outer state each keeps a part all the same.

    `zero` is DeepSpeed's optimizer with fp32 copies of bf16 weights, or ours in fp32.
    """

    NAMES: tuple[str, ...] = ()

    def __init__(self, zero: Any, optimizer: ShardOptimizer, _names: Mapping[int, str]) -> None:
        self._zero, self._optimizer = zero, optimizer
        self._index = Index(())
        self._intervals: tuple[Interval, ...] = ()

    def intervals(self, index: Index, rank: int) -> tuple[Interval, ...]:
        return dealt_shard(index, self._optimizer.names, dist.get_world_size(), rank)

    def bind(self, index: Index, intervals: tuple[Interval, ...]) -> list[torch.Tensor]:
        self._index, self._intervals = index, intervals
        self._optimizer.bind_whole()
        return self._cut({name: p.data.view(-1) for name, p in self._parameters().items()})

    def gradients(self) -> list[torch.Tensor]:
        return self._cut({name: gradient.view(-1) for name, gradient in self._by_name().items()})

    def all_gradients(self) -> list[torch.Tensor]:
        return list(self._by_name().values())

    def gradient_norm(self) -> float:
        known = getattr(self._zero, "_global_grad_norm", None)
        if known is not None:
            return float(known)
        norms = [torch.linalg.vector_norm(gradient) for gradient in self.all_gradients()]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def states(self) -> list[dict[str, torch.Tensor]]:
        known = dict(self._optimizer.states())
        found = []
        for interval in self._intervals:
            whole = known[self._index.parameters[interval.parameter].name]
            found.append({k: v.view(-1)[interval.start : interval.stop] if v.dim() else v for k, v in whole.items()})
        return found

    def places(self) -> list[tuple[Interval, torch.Tensor]]:
        numbers = self._index.numbers
        found = [(numbers[name], p.data) for name, p in self._parameters().items()]
        return [(Interval(number, 0, values.numel(), 0), values) for number, values in found]

    def share_gradients(self) -> None:
        self._share({name: gradient.view(-1) for name, gradient in self._by_name().items()})

    def share_states(self, names: Sequence[str]) -> None:
        known = dict(self._optimizer.states())
        for key in names:
            self._share({name: known[name][key].view(-1) for name in self._optimizer.names})

    def refresh(self) -> None:
        self._share({name: p.data.view(-1) for name, p in self._parameters().items()})
        for working, exact in zip(*map(_flattened, self._copies()), strict=True):
            working.data.copy_(exact.data)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(zip(self._optimizer.names, self._optimizer.param_groups[0]["params"], strict=True))

    def _by_name(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._parameters().items():
            if parameter.grad is None:  # a parameter that this step's loss doesn't depend on
                parameter.grad = torch.zeros_like(parameter)
            found[name] = parameter.grad
        return found

    def _copies(self) -> tuple[Any, Any]:
        return getattr(self._zero, "fp16_groups", []), getattr(self._zero, "fp32_groups", [])

    def _cut(self, flats: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [flats[self._index.parameters[i.parameter].name][i.start : i.stop] for i in self._intervals]

    def _share(self, flats: Mapping[str, torch.Tensor]) -> None:
        """Every rank's part of each flat parameter to all other ranks."""
        pending = []
        for rank in range(dist.get_world_size()):
            for part in dealt_shard(self._index, self._optimizer.names, dist.get_world_size(), rank):
                values = flats[self._index.parameters[part.parameter].name][part.start : part.stop]
                pending.append(dist.broadcast(values, src=rank, async_op=True))
        for work in pending:
            assert work is not None
            work.wait()


def insides_of(zero: Any, optimizer: ShardOptimizer, names: Mapping[int, str], stage: int) -> Insides:
    """The insides of DeepSpeed's optimizer `zero`; InsidesError if it names them otherwise.

    `names` are canonical ones by id of the module's parameters.
    """
    kinds: dict[int, type[_Whole | _Partitioned | _Split]] = {0: _Whole, 1: _Partitioned, 2: _Partitioned, 3: _Split}
    kind = kinds[stage]
    missing = [name for name in kind.NAMES if not hasattr(zero, name)]
    if missing:
        raise InsidesError(f"this DeepSpeed has no {', '.join(missing)} in {type(zero).__name__}; use 0.19.8")
    return kind(zero, optimizer, names)


def _flattened(groups: Any) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group]
