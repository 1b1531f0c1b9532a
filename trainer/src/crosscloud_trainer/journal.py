"""What has happened in a run so far, counted once: the status, the metrics and the log lines are made from it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from crosscloud_trainer.contract import Progress, StoredCheckpoint
from crosscloud_trainer.contract.report import ACTIVITIES, PeerBytes, timestamp
from crosscloud_trainer.link.traffic import KINDS

_RATE_STEPS = 50  # tokens per second are a mean over so many steps
LOSS_STEPS = 10  # and the training loss over so many: that of one step says more of its text than of the model


@dataclass(frozen=True)
class Wan:
    """Bytes that this replica exchanged with one other, all of its ranks together."""

    sent: Mapping[str, int] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """Counters of one replica. The training thread writes; the status and metrics threads read."""

    def __init__(self, total_steps: int, dense_bytes_per_step: float) -> None:
        """`dense_bytes_per_step` is what this replica would send at each step in fp32."""
        self._lock = threading.Lock()
        self._dense_per_step = dense_bytes_per_step
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=_RATE_STEPS)
        self._losses: deque[float] = deque(maxlen=LOSS_STEPS)
        self._progress = Progress(0, total_steps, 0, 0, saved_at=timestamp(time.time()))
        self._first_step = 0  # bytes are counted from there on
        self._applied: deque[tuple[int, str]] = deque()  # rounds and digests that the whole view may not have yet
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._waited = 0.0  # of an exchange that hasn't been counted yet
        self.refusals: Mapping[str, int] = {}
        self.residual_norm: float | None = None
        """What encoding has lost so far and later updates bring, over all ranks; None before the first round."""
        self.skipped_rounds_in_a_row = 0
        self.mismatches = 0
        """Rounds before which the replicas' outer states were found to differ."""

    @property
    def progress(self) -> Progress:
        with self._lock:
            spent = {f"{activity}_seconds": max(0.0, round(value, 2)) for activity, value in self.seconds.items()}
            lost = self.residual_norm if self.residual_norm is not None and math.isfinite(self.residual_norm) else None
            known = replace(self._progress, residual_norm=lost, digest_mismatches=self.mismatches)
            return replace(known, **spent)  # type: ignore[arg-type]  # named by activity

    def step(
        self,
        loss: float,
        tokens: int,
        skipped: int,
        seconds: float,
        exchange_seconds: float = 0.0,
        bubble_seconds: float = 0.0,
    ) -> None:
        """An inner step of the replica: mean loss over its ranks, tokens of all of them, skipped steps so far, and
        of its `seconds` those in which gradients were exchanged, and those in which a stage waited for another.
        """
        with self._lock:
            before = self._progress
            self._marks.append((time.monotonic(), before.tokens + tokens))
            (first, low), (last, high) = self._marks[0], self._marks[-1]
            if math.isfinite(loss):
                self._losses.append(loss)
            shown = sum(self._losses) / len(self._losses) if self._losses else None
            self._progress = replace(
                before,
                step=before.step + 1,
                tokens=before.tokens + tokens,
                tokens_per_second=(high - low) / max(last - first, 1e-9),
                loss=shown,
                first_loss=shown if before.first_loss is None else before.first_loss,
                skipped_steps=skipped,
            )
            self.seconds["compute"] += seconds - exchange_seconds - bubble_seconds
            self._exchanged(exchange_seconds)
            self.seconds["bubble"] += bubble_seconds

    def round(self, number: int, digest: str, seconds: float, *, skipped: bool = False) -> None:
        """A round that has ended; `skipped` where nothing of this replica's window is in its result. Progress has its
        number once it is settled.
        """
        with self._lock:
            self._applied.append((number, digest))
            self._exchanged(seconds)
            self.skipped_rounds_in_a_row = self.skipped_rounds_in_a_row + 1 if skipped else 0
            self._progress = replace(self._progress, skipped_rounds=self._progress.skipped_rounds + skipped)

    def settled(self, number: int) -> None:
        """The whole view has prepared this round: outsiders may hear of it."""
        with self._lock:
            while self._applied and self._applied[0][0] <= number:
                known, digest = self._applied.popleft()
                self._progress = replace(self._progress, round=known, digest=digest)

    def resume(self, before: Progress) -> None:
        """The run goes on from here: steps, tokens, round, digest, skipped steps, best evaluation of a checkpoint."""
        with self._lock:
            total, began = self._progress.total_steps, self._progress.saved_at
            self._progress = replace(before, total_steps=total, saved_step=before.step, saved_at=began)
            self._first_step = before.step
            self._marks = deque([(time.monotonic(), before.tokens)], maxlen=_RATE_STEPS)

    def checkpointed(self, stored: StoredCheckpoint) -> None:
        """A checkpoint that the whole view has written."""
        with self._lock:
            now = timestamp(time.time())
            self._progress = replace(self._progress, checkpoint=stored, saved_step=stored.step, saved_at=now)

    def traffic(self, wan: Mapping[int, Wan]) -> None:
        """Bytes by other replica, all ranks of this one together, and those in fp32 up to the same step: a ratio that
        is looked at within a window compares equal steps.
        """
        parts = tuple(
            PeerBytes(replica, kind, peer.sent.get(kind, 0), peer.received.get(kind, 0))
            for replica, peer in wan.items()
            for kind in KINDS
        )
        with self._lock:
            self._progress = replace(
                self._progress,
                dense_bytes=round((self._progress.step - self._first_step) * self._dense_per_step),
                wan_bytes_sent=sum(part.sent for part in parts),
                wan_bytes_received=sum(part.received for part in parts),
                wan=parts,
            )

    def validation(self, step: int, loss: float) -> None:
        """An evaluation after `step`; one that is not finite, or of nothing, is no news."""
        if not math.isfinite(loss):
            return
        with self._lock:
            before = self._progress
            best = before.best_validation_loss is None or loss < before.best_validation_loss
            self._progress = replace(
                before,
                validation_step=step,
                validation_loss=loss,
                best_step=step if best else before.best_step,
                best_validation_loss=loss if best else before.best_validation_loss,
            )

    def waited(self, seconds: float) -> None:
        """Time in which the present exchange waits for other replicas: waiting, not exchanging. It is told at once, and
        taken off the exchange when that has ended: a counter never falls.
        """
        with self._lock:
            self.seconds["waiting"] += seconds
            self._waited += seconds

    def _exchanged(self, seconds: float) -> None:
        waited = min(self._waited, seconds)
        self._waited -= waited
        self.seconds["exchange"] += seconds - waited


def wan_vector(traffic: Mapping[int, Wan], replicas: Sequence[int]) -> list[int]:
    """The numbers of `traffic` in a fixed order, so that the ranks of a replica can add theirs."""
    empty = Wan()
    flat = []
    for number in replicas:
        peer = traffic.get(number, empty)
        flat += [peer.sent.get(kind, 0) for kind in KINDS] + [peer.received.get(kind, 0) for kind in KINDS]
    return flat


def wan_of_vector(flat: Sequence[int], replicas: Sequence[int]) -> dict[int, Wan]:
    """The inverse of `wan_vector`."""
    width = 2 * len(KINDS)
    found = {}
    for place, number in enumerate(replicas):
        part = flat[place * width : (place + 1) * width]
        sent, received = part[: len(KINDS)], part[len(KINDS) :]
        found[number] = Wan(dict(zip(KINDS, sent, strict=True)), dict(zip(KINDS, received, strict=True)))
    return found
