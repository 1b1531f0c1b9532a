"""The outer optimizer: SGD with Nesterov momentum on pseudo-gradients, as in DiLoCo (Douillard et al. 2023).

Its state must be the same to the bit in all replicas, whatever their layout and hardware. So it is made of
elementwise operations that are each rounded once: no fused multiply-add (torch's own SGD may use one), no
compilation, no sums.
"""

from dataclasses import dataclass

import torch

from crosscloud_trainer.contract import OuterOptimizer


@dataclass(frozen=True)
class OuterState:
    """One rank's part of the outer state: compact flat fp32 tensors of equal length."""

    weights: torch.Tensor
    momentum: torch.Tensor

    @staticmethod
    def at(weights: torch.Tensor) -> "OuterState":
        """The state before the first round: the weights given, which are its own from now on, and no momentum."""
        return OuterState(weights, torch.zeros_like(weights))

    def part(self, start: int, elements: int) -> "OuterState":
        """The state of some elements from `start` on, in the same memory."""
        return OuterState(self.weights[start : start + elements], self.momentum[start : start + elements])

    def become(self, other: "OuterState") -> None:
        """Overwrites the state by another one of equal length."""
        self.weights.copy_(other.weights)
        self.momentum.copy_(other.momentum)

    def stepped(self, gradient: torch.Tensor, settings: OuterOptimizer) -> "OuterState":
        """The state after a round whose agreed pseudo-gradient (outer weights minus new ones) is `gradient`.

        momentum' = mu momentum + gradient; weights' = weights - lr (gradient + mu momentum'): torch's form of
        Nesterov.
        """
        momentum = self.momentum.mul(settings.momentum).add_(gradient)
        direction = momentum.mul(settings.momentum).add_(gradient)
        weights = self.weights.sub(direction.mul_(settings.learning_rate))
        return OuterState(weights, momentum)

    def finite(self) -> bool:
        return bool(torch.isfinite(self.weights).all()) and bool(torch.isfinite(self.momentum).all())
