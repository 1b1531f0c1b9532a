"""The part of a job's spec that says what goes over the WAN: between replicas, and between stages."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from crosscloud_trainer.contract.reading import Fault, dump, rule
from crosscloud_trainer.sizes import CodecSpec

INNER_STEPS = 20  # of a window, where the manifest doesn't say


class Algorithm(enum.Enum):
    DILOCO = "DiLoCo"
    ALL_REDUCE = "AllReduce"


class CodecName(enum.Enum):
    NONE = "None"
    BF16 = "BF16"
    INT8 = "Int8"
    TOP_K = "TopK"


class ActivationCodec(enum.Enum):
    NONE = "None"
    BF16 = "BF16"
    INT8 = "Int8"


class ValueBits(enum.Enum):
    TWO = 2
    FOUR = 4
    EIGHT = 8


@dataclass(frozen=True)
class OuterOptimizerSpec:
    """What a manifest says of the outer optimizer; `Sync.outer` tells what applies."""

    learning_rate: float | None = rule(None, exclusive_minimum=0, maximum=10)
    momentum: float | None = rule(None, minimum=0, maximum=0.9999)


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov momentum over the replicas' mean update (DiLoCo, arXiv:2311.08105, section 2)."""

    learning_rate: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class TopK:
    """Of each 4,096 elements the `keep` largest are sent, each value in `bits` bits."""

    keep: int = rule(64, minimum=1, maximum=2048)
    bits: ValueBits = rule(ValueBits.TWO)


@dataclass(frozen=True)
class Sync:
    """How replicas exchange updates over the WAN.

    `inner_steps`, the length of a window, and `outer_optimizer` are for `DiLoCo` only: `window` and `outer` tell what
    applies.
    """

    algorithm: Algorithm = rule(Algorithm.DILOCO)
    inner_steps: int | None = rule(None, minimum=1, maximum=100_000)
    codec: CodecName = rule(CodecName.INT8)
    top_k: TopK | None = rule(None)
    error_feedback: bool = rule(True)
    outer_optimizer: OuterOptimizerSpec | None = rule(None)

    @property
    def window(self) -> int:
        """Inner steps between two rounds."""
        return 1 if self.algorithm is Algorithm.ALL_REDUCE else self.inner_steps or INNER_STEPS

    @property
    def outer(self) -> OuterOptimizer:
        """As the manifest says; each value that it leaves out is the one that suits the codec: the residuals of TopK do
        the work of momentum.
        """
        suitable = OuterOptimizer(1.0, 0.0) if self.codec is CodecName.TOP_K else OuterOptimizer()
        given = {} if self.outer_optimizer is None else vars(self.outer_optimizer)
        return replace(suitable, **{name: value for name, value in given.items() if value is not None})

    @property
    def codec_spec(self) -> CodecSpec:
        """The codec with its settings."""
        settings = self.top_k or TopK()
        return CodecSpec(self.codec.value, settings.keep, settings.bits.value)

    def check(self) -> Iterator[Fault]:
        if self.algorithm is Algorithm.ALL_REDUCE:
            for name, value in (("innerSteps", self.inner_steps), ("outerOptimizer", self.outer_optimizer)):
                if value is not None:
                    yield name, dump(value), "is for algorithm DiLoCo only, and algorithm is AllReduce; leave it out"
        if self.top_k is not None and self.codec is not CodecName.TOP_K:
            yield "topK", dump(self.top_k), f"is for codec TopK only, and codec is {self.codec.value}; leave it out"


@dataclass(frozen=True)
class Activations:
    """How values, and their gradients on the way back, cross a boundary between two stages in different members."""

    codec: ActivationCodec = rule(ActivationCodec.NONE)

    @property
    def codec_spec(self) -> CodecSpec:
        """The codec with its settings."""
        return CodecSpec(self.codec.value)
