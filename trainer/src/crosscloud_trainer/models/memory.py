"""Whether a model fits into the memory that is there: told before anything is allocated, not by the kernel's killer.

What is counted is the least that training takes: activations and buffers come on top. So a model that is refused can't
be trained here, and one that passes may still be too large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crosscloud_trainer.compress import codec_of
from crosscloud_trainer.contract import Algorithm, Precision, Problem, RunDocument
from crosscloud_trainer.data.tokens import BYTES, Vocabulary
from crosscloud_trainer.environment import Memory
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.models.presets import field_of, parameter_count
from crosscloud_trainer.sizes import FP32_BYTES, bytes_text, payload_bytes

_WORKING_BYTES = {Precision.FP32: FP32_BYTES, Precision.BF16: 2}


@dataclass(frozen=True)
class Need:
    """Bytes that one rank holds at least, by what they are."""

    weights: int
    gradients: int
    optimizer: int
    outer: int
    """The outer state and the residual."""
    exchange: int
    """In main memory, on a GPU's host too: the residual of the cells that this rank owns, and a round's payloads."""

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.outer

    @property
    def total(self) -> int:
        return self.on_device + self.exchange

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        parts |= {"outer state": self.outer, "exchange": self.exchange}
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())


def needed(parameters: int, run: RunDocument, replica: int) -> Need:
    """What a rank of this replica holds of a model with so many parameters (ZeRO, arXiv:1910.02054, section 5).

    Working weights are whole on each rank, and gradients below ZeRO 2. In shards there are fp32 weights and the two
    moments of Adam, under `DiLoCo` outer weights and outer momentum, and where something is exchanged the residual.

    In the part of a round that takes most there are the rank's own payload, what was sent and the result that it owns
    (kept to be sent again), results that came in, and all results together. The rest of a round is small.
    """
    plan = run.replica(replica)
    ranks = plan.stages[0].ranks
    working = _WORKING_BYTES[run.training.precision] * parameters
    shard = FP32_BYTES * (-(-parameters // ranks))
    replicas, codec = len(run.replicas), codec_of(run.sync.codec_spec)
    residual = shard if replicas > 1 and run.sync.error_feedback and not codec.lossless else 0
    payload = payload_bytes(codec.spec, [-(-parameters // ranks)]) if replicas > 1 else 0
    return Need(
        weights=working,
        gradients=working if plan.zero_stage < 2 else working // ranks,
        optimizer=3 * shard,
        outer=residual + (2 * shard if run.sync.algorithm is Algorithm.DILOCO else 0),
        exchange=residual // replicas + 3 * payload + (replicas - 1) * payload // replicas,
    )


def check_memory(
    run: RunDocument, replica: int, device: torch.device, host: Memory | None, vocabulary: Vocabulary = BYTES
) -> None:
    """Raises Failure(INVALID_INPUT) where the ranks of a pod of this replica don't fit into its memory.

    `host` is what all ranks of the pod have together, None where nobody knows.
    """
    model = run.training.model
    parameters = parameter_count(model, run.training.sequence_length, vocabulary)
    need, ranks = needed(parameters, run, replica), run.replica(replica).stages[0].gpus_per_node
    checks = []
    if device.type == "cuda":
        gpu = Memory(torch.cuda.get_device_properties(device).total_memory, "of the GPU")
        checks.append((1, need.on_device, f"({need}; the last one not here)", gpu))
        if host is not None:
            checks.append((ranks, FP32_BYTES * parameters, "for the weights while they are drawn", host))
            checks.append((ranks, need.exchange, "for what is exchanged", host))
    elif host is not None:
        checks.append((ranks, need.total, f"({need})", host))
    problems = []
    for count, each, what, there in checks:
        if count * each > there.size:
            found = model.preset.value if model.preset else model.config
            total = f"{bytes_text(each)} {what}" if count == 1 else f"{count} x {bytes_text(each)} {what}"
            allowed = (
                f"the {parameters:,} parameters need {count * each:,} bytes or more, {total}; there are "
                f"{bytes_text(there.size)} {there.where}; take a smaller model, more memory, or more nodes"
            )
            problems.append(Problem(field_of(model), found, allowed))
    if problems:
        raise invalid(problems)
