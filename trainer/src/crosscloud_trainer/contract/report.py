"""What a replica tells the operator: one record, written by its rank 0 into its report (a ConfigMap, or a file).

A record carries attempt, home and incarnation; the operator ignores older numbers. `round` and `digest` are those of
the last round that the whole view has prepared, and success is told once that is the last of all; steps, tokens,
losses and bytes are counted as they come.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from crosscloud_trainer.contract.checkpoint import StoredCheckpoint
from crosscloud_trainer.contract.reading import Fault, rule

REPORT_VERSION = "report.crosscloud.dev/v1"
REPORT_KEY = "report.json"  # the key in the ConfigMap
ACTIVITIES = ("compute", "exchange", "waiting", "bubble")  # by which a replica's time is told apart
_MOST_NATS = 700.0  # a double holds e to that power
# RFC 3339 in UTC
_TIME = (
    r"^[1-9][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
    r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?Z$"
)


class Activity(enum.Enum):
    """What the replica does now."""

    STARTING = "Starting"
    TRAINING = "Training"
    WAITING = "Waiting"  # a round waits for the replicas in `waiting_for`, or a step for stages of its own
    FINISHING = "Finishing"  # last checkpoint and result
    ENDED = "Ended"


class Outcome(enum.Enum):
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


def perplexity(loss: float) -> float:
    """Of a mean loss per token, in nats: between how many tokens the model wavers, as it were."""
    return math.exp(min(loss, _MOST_NATS))


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(time: str) -> float:
    """The inverse of `timestamp`."""
    return datetime.fromisoformat(time).timestamp()


@dataclass(frozen=True)
class PeerBytes:
    """Bytes of one kind that a replica has exchanged with another one in other members."""

    replica: int = rule(minimum=0)
    kind: str = rule(max_length=20)
    sent: int = rule(minimum=0)
    received: int = rule(minimum=0)


@dataclass(frozen=True)
class Progress:
    """Counters of the replica.

    `loss` is the mean training loss of the last steps, `first_loss` that of the first one. Bytes are those sent and
    received over the link; `digest` is that of the outer state. `checkpoint` is the newest one of this attempt that the
    whole view has written; `saved_step` and `saved_at` are of that one, or of what this attempt began from.
    """

    step: int = rule(minimum=0)
    total_steps: int = rule(minimum=0)
    round: int = rule(minimum=0)
    tokens: int = rule(minimum=0)
    tokens_per_second: float = rule(0.0, minimum=0)
    loss: float | None = rule(None)
    first_loss: float | None = rule(None)
    validation_step: int | None = rule(None, minimum=1)
    validation_loss: float | None = rule(None)
    best_step: int | None = rule(None, minimum=1)  # the one with the lowest validation loss so far
    best_validation_loss: float | None = rule(None)
    wan_bytes_sent: int = rule(0, minimum=0)
    wan_bytes_received: int = rule(0, minimum=0)
    wan: tuple[PeerBytes, ...] = rule(())  # the same two by peer and kind
    dense_bytes: int = rule(0, minimum=0)  # what an exchange in fp32 at every step would have sent so far
    skipped_steps: int = rule(0, minimum=0)
    skipped_rounds: int = rule(0, minimum=0)  # of this attempt, without this replica's update
    compute_seconds: float = rule(0.0, minimum=0)
    exchange_seconds: float = rule(0.0, minimum=0)
    waiting_seconds: float = rule(0.0, minimum=0)  # of rounds that waited for others: no part of exchange_seconds
    bubble_seconds: float = rule(0.0, minimum=0)  # of stages that waited for each other, in the mean over all ranks
    residual_norm: float | None = rule(None, minimum=0)  # of what encoding has lost and later updates bring
    digest: str | None = rule(None)
    digest_mismatches: int = rule(0, minimum=0)  # rounds before which the replicas' outer states were found to differ
    saved_step: int = rule(0, minimum=0)
    saved_at: str | None = rule(None, pattern=_TIME)
    waiting_for: tuple[int, ...] = rule(())
    waiting_for_stages: tuple[int, ...] = rule(())  # of this replica, which its first stage has no connection to
    waiting_since: str | None = rule(None, pattern=_TIME)
    checkpoint: StoredCheckpoint | None = rule(None)

    @property
    def awaited(self) -> str:
        """Whom it waits for, in words; empty where it waits for nobody."""
        replicas, stages = (", ".join(map(str, found)) for found in (self.waiting_for, self.waiting_for_stages))
        return " and ".join([f"replica {replicas}"] * bool(replicas) + [f"its own stage {stages}"] * bool(stages))

    @property
    def perplexity(self) -> float | None:
        """That of the last evaluation."""
        return None if self.validation_loss is None else perplexity(self.validation_loss)

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent so far, by activity."""
        return {activity: float(getattr(self, f"{activity}_seconds")) for activity in ACTIVITIES}

    @property
    def unsaved_steps(self) -> int:
        """Inner steps that a failure now would cost."""
        return self.step - self.saved_step


@dataclass(frozen=True)
class Completion:
    outcome: Outcome = rule()
    exit_code: int = rule(minimum=0, maximum=255)
    message: str = rule(max_length=4096)
    result_uri: str | None = rule(None)
    checkpoint_uri: str | None = rule(None)
    checkpoint_digest: str | None = rule(None)


@dataclass(frozen=True)
class Report:
    api_version: str = rule()
    attempt: int = rule(minimum=1)
    home: int = rule(minimum=1)
    term: int = rule(minimum=0)
    view: int = rule(minimum=0)
    replica: int = rule(minimum=0)
    incarnation: int = rule(minimum=1)
    sequence: int = rule(minimum=1)
    time: str = rule(pattern=_TIME)
    activity: Activity = rule()
    progress: Progress = rule()
    detail: str | None = rule(None, max_length=100)  # what Starting or Finishing is about now, in words
    completion: Completion | None = rule(None)

    def check(self) -> Iterator[Fault]:
        try:
            datetime.fromisoformat(self.time)
        except ValueError as fault:
            yield "time", self.time, f"must be a time ({fault})"

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """What orders the words of one replica: a record with a lower one is ignored."""
        return (self.attempt, self.home, self.incarnation, self.sequence)
