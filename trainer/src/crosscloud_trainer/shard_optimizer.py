"""The optimizer that DeepSpeed is shown: one group outside, the user's own optimizer and groups inside.

DeepSpeed calls it once per step with one flat fp32 shard and its reduced gradient (ZeRO 0: with all parameters). With
several groups DeepSpeed would copy the first to the working weights before it shows the next, and a norm over all of
them could not be taken first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class ShardOptimizerError(Exception):
    """The optimizer was used in a way that it can't be; the message says why."""


class ShardOptimizer(torch.optim.Optimizer):
    """Shows DeepSpeed one group; inside, the user's optimizer works on views of the shard in the user's
    groups.
    """

    def __init__(self, inner: torch.optim.Optimizer, names: Mapping[int, str] | None = None) -> None:
        """`names` are canonical ones by id of the model's parameters; where they aren't known yet, `name` tells them
        before `bind`.
        """
        self.inner = inner
        self.users_groups = [list(group["params"]) for group in inner.param_groups]
        """The parameters of the model, in the user's groups."""
        self._groups: list[list[str]] = []
        self._shapes = [p.shape for group in inner.param_groups for p in group["params"]]
        self._views: list[tuple[str, torch.nn.Parameter]] = []
        self._gradients: Callable[[], Sequence[torch.Tensor]] | None = None
        self._bound = False
        self.overflow = False
        """Read by DeepSpeed under ZeRO 0 in fp32, where it steps on this object itself."""
        self.before_step: Callable[[], bool] | None = None
        """Called before the user's optimizer steps; it doesn't where this returns False."""
        parameters = [p for group in inner.param_groups for p in group["params"]]
        super().__init__(parameters, {"lr": inner.param_groups[0]["lr"]})
        self._shown_rate = inner.param_groups[0]["lr"]
        # of the groups' rates to the first one's: what is set on the shown group keeps them
        self._ratios = [group["lr"] / self._shown_rate if self._shown_rate else 1.0 for group in inner.param_groups]
        if names is not None:
            self.name(names)

    def name(self, names: Mapping[int, str]) -> None:
        """Tells the canonical names by id of the model's parameters."""
        self._groups = [[names[id(p)] for p in group] for group in self.users_groups]

    @property
    def names(self) -> list[str]:
        """Of the parameters in the order in which DeepSpeed is shown them."""
        return [name for names in self._groups for name in names]

    def bind(self, parts: Sequence[tuple[str, torch.Tensor]], gradients: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Replaces the parameters in the user's groups by views of this rank's parts of them. Once, after DeepSpeed
        has made its shard. `gradients` gives the parts' gradients while DeepSpeed steps.
        """
        self._views = [(name, torch.nn.Parameter(part)) for name, part in parts]
        self._gradients = gradients
        by_name: dict[str, list[torch.nn.Parameter]] = {}
        for name, view in self._views:
            by_name.setdefault(name, []).append(view)
        for group, names in zip(self.inner.param_groups, self._groups, strict=True):
            group["params"] = [view for name in names for view in by_name.get(name, [])]
        self._bound = True

    def bind_whole(self) -> None:
        """The same under ZeRO 0: the user's groups get the very parameters that DeepSpeed steps on."""
        shown = iter(self.param_groups[0]["params"])
        for group in self.inner.param_groups:
            group["params"] = [next(shown) for _ in group["params"]]
        self._views = list(zip(self.names, self.param_groups[0]["params"], strict=True))
        self._gradients = None
        self._bound = True

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Called by DeepSpeed, once per inner step that it doesn't skip."""
        if closure is not None:
            raise ShardOptimizerError("a closure can't be used: DeepSpeed has computed the gradients before")
        if not self._bound:
            self._check_unbound()
            return
        self.overflow = False
        self._pass_rate()
        if self.before_step is not None and not self.before_step():
            return
        if self._gradients is None:
            self.inner.step()
            return
        for (_, view), gradient in zip(self._views, self._gradients(), strict=True):
            view.grad = gradient
        self.inner.step()
        for _, view in self._views:
            view.grad = None

    def _check_unbound(self) -> None:
        """DeepSpeed under ZeRO 0 in bf16 steps once with zero gradients while the engine is built, for the optimizer to
        make its state. That would decay the weights and count a step, and under other ZeRO stages it doesn't happen:
        replicas would start unlike. So that step does nothing.
        """
        if [p.shape for p in self.param_groups[0]["params"]] != self._shapes:
            raise ShardOptimizerError("the optimizer has no shard yet; DeepSpeed stepped before the engine was built")

    def states(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """Name and the tensors that the user's optimizer keeps, of each view (ZeRO 0: each parameter)."""
        kept = self.inner.state
        return [
            (name, {key: value for key, value in kept.get(view, {}).items() if isinstance(value, torch.Tensor)})
            for name, view in self._views
        ]

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replaces what the user's optimizer keeps of each view, in the order of `states`; tensors of a view's size
        take its shape, counts (0-d) stay as they are.
        """
        for (_, view), state in zip(self._views, states, strict=True):
            self.inner.state[view] = {k: v.view(view.shape) if v.dim() else v.clone() for k, v in state.items()}

    def _pass_rate(self) -> None:
        """A learning rate that someone set on our group goes to all of the user's groups, in the proportion that they
        had at first; theirs are shown in ours.
        """
        group = self.param_groups[0]
        if group["lr"] != self._shown_rate:
            for inner, ratio in zip(self.inner.param_groups, self._ratios, strict=True):
                inner["lr"] = group["lr"] if ratio == 1.0 else group["lr"] * ratio
        group["lr"] = self._shown_rate = self.inner.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self._shown_rate = self.inner.param_groups[0]["lr"]
        self.param_groups[0]["lr"] = self._shown_rate
