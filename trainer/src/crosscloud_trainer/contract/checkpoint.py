"""Checkpoints as trainer and operator speak of them: how often, and which ones are there."""

from __future__ import annotations

from dataclasses import dataclass

from crosscloud_trainer.contract.reading import rule

ACKNOWLEDGED_KEY = "checkpoints.json"  # of the anchor
MAX_KEPT = 16


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are taken beside the last one, and how many stay.

    One is due at the first round that ends `every_steps` inner steps or more after the one before it; None takes the
    last one only. `keep` is the number of complete checkpoints that stay in the storage.
    """

    every_steps: int | None = rule(None, minimum=1, maximum=1_000_000)
    keep: int = rule(2, minimum=1, maximum=MAX_KEPT)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint: address and SHA-256 of its manifest, and the inner step after which it was taken."""

    uri: str = rule(max_length=2048)
    digest: str = rule(pattern=r"^[0-9a-f]{64}$")
    step: int = rule(minimum=0)


@dataclass(frozen=True)
class Acknowledged:
    """What the operator has saved in the job's status, newest first: all that is older may be deleted."""

    checkpoints: tuple[StoredCheckpoint, ...] = rule((), max_items=MAX_KEPT)
