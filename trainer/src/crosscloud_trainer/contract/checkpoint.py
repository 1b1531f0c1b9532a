"""Checkpoints as trainer and operator speak of them: how often, and which ones are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosscloud_trainer.contract.reading import rule

ACKNOWLEDGED_KEY = "checkpoints.json"  # of the anchor
MAX_KEPT = 16
MAX_REMEMBERED = MAX_KEPT + 1  # with the best one


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are taken beside the last one, and how many stay.

    One is due at the first round that ends `every_steps` inner steps or more after the one before it; None takes the
    last one only. `keep` is the number of complete checkpoints that stay in the storage, with the best one beside them.
    """

    every_steps: int | None = rule(None, minimum=1, maximum=1_000_000)
    keep: int = rule(2, minimum=1, maximum=MAX_KEPT)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint: address and SHA-256 of its manifest, and the inner step after which it was taken.

    `validation_loss` is the mean over the replicas of what each measured last before it, as text with four decimals,
    since a job's status has no floats; None where one hadn't measured yet.
    """

    uri: str = rule(max_length=2048)
    digest: str = rule(pattern=r"^[0-9a-f]{64}$")
    step: int = rule(minimum=0)
    validation_loss: str | None = rule(None, pattern=r"^[0-9]+\.[0-9]{4}$")


@dataclass(frozen=True)
class Acknowledged:
    """What the operator has saved in the job's status, newest first: all that is older may be deleted."""

    checkpoints: tuple[StoredCheckpoint, ...] = rule((), max_items=MAX_REMEMBERED)


def remembered(
    newest: StoredCheckpoint, before: tuple[StoredCheckpoint, ...], keep: int
) -> tuple[StoredCheckpoint, ...]:
    """Which checkpoints stay once there is a new one, newest first: the last `keep`, and the best of all."""
    known = (newest, *before)
    best = best_of(known)
    return (*known[:keep], *(item for item in known[keep:] if item is best))


def best_of(checkpoints: Sequence[StoredCheckpoint]) -> StoredCheckpoint | None:
    """The one with the lowest validation loss, the newest of equal ones; None where none has any."""
    measured = [(float(item.validation_loss), item) for item in checkpoints if item.validation_loss is not None]
    return min(measured, key=lambda pair: pair[0])[1] if measured else None
