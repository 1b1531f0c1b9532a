"""Checkpoints while training goes on: a copy in host memory, and a thread that stores it.

A second one never starts before the first has ended: one that falls due meanwhile is left out, by all replicas. One
that can't be stored is told and left out too; after a few in a row the attempt ends, since its result couldn't be
stored either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crosscloud_trainer import checkpoint, engine, state
from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.checkpoint import Abandoned, CheckpointId, Part, Scope
from crosscloud_trainer.claim import check_claim
from crosscloud_trainer.contract import ExitCode, StoredCheckpoint
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.meeting import Meeting, Place
from crosscloud_trainer.storage import Storage

log = logging.getLogger("crosscloud_trainer")

_FAILURES_LIMIT = 3  # in a row


@dataclass(frozen=True)
class _Snapshot:
    """What one rank stores: copies of its parts, what its list says, and what the manifest says of the whole job."""

    which: CheckpointId
    parts: Sequence[Part]
    content: Mapping[str, Any]
    told: Mapping[str, Any]


class Saver:
    """Takes the checkpoints of one rank. Methods are called by all ranks of the replica, in the training thread."""

    def __init__(
        self,
        place: Place,
        trained: engine.Engine,
        algorithm: AllReduce | DiLoCo,
        meeting: Meeting,
        journal: Journal,
        device: torch.device,
        tokens_per_step: int,
        first: int,
    ) -> None:
        """`first` is the step that the run went on from; `tokens_per_step` those of the whole job."""
        self._place, self._trained, self._algorithm = place, trained, algorithm
        self._meeting, self._journal = meeting, journal
        self._tokens_per_step = tokens_per_step
        self._group = meeting.totals(device)
        self._storage = Storage(place.attempt.run.storage_uri)
        self._taken = self._complete = first
        self._thread: threading.Thread | None = None
        self._newest: StoredCheckpoint | None = None
        self._fault: Failure | None = None
        self._failures = 0

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def stands(self) -> int | None:
        """After which step the newest complete checkpoint was taken; 0 for none, None where this rank isn't told."""
        return self._complete if self._place.first else None

    @property
    def leads(self) -> bool:
        """Whether this rank writes the manifest."""
        return self._place.first and self._lowest

    @property
    def _lowest(self) -> bool:
        return self._place.pod.replica == self._place.replicas[0]

    def due(self, step: int) -> bool:
        """Whether a round that has ended with `step` is one to take a checkpoint after."""
        every = self._place.attempt.run.checkpoint.every_steps
        return every is not None and step - self._taken >= every

    def take(self, step: int) -> None:
        """Begin a checkpoint of the state after `step`; returns before it is stored. Raises Failure once too many
        have failed, or where the state isn't finite.
        """
        self._taken = step
        which = self._which(step)
        busy = self._thread is not None and self._thread.is_alive()
        busy_ranks, failing = self._group.total([int(busy), int(self._failures >= _FAILURES_LIMIT)])
        if failing:
            raise self._fault or Failure(ExitCode.PEER_LOST, "another rank can't store its part of the checkpoints")
        if busy_ranks:
            if self._place.first:
                log.warning("checkpoint of step %d left out: the one before it is still being stored", step)
                threading.Thread(target=self._leave_out, args=(which,), name="checkpoint", daemon=True).start()
            return
        taken = self._snapshot(which)
        self._thread = threading.Thread(target=self._try, args=(taken,), name="checkpoint", daemon=True)
        self._thread.start()

    def last(self, step: int) -> StoredCheckpoint | None:
        """Take a checkpoint of the state after `step` and wait until it is stored; told by the rank that leads.

        Raises Failure where it can't be stored.
        """
        if self._thread is not None:
            self._thread.join()
        self._taken = step
        try:
            self._store(self._snapshot(self._which(step)))
        except Abandoned as fault:
            raise Failure(ExitCode.PEER_LOST, f"the last checkpoint was abandoned: {fault}") from fault
        return self._newest

    def _which(self, step: int) -> CheckpointId:
        run = self._place.attempt.run
        home = self._meeting.exchange.authority.home
        return CheckpointId(run.job.uid, run.digest(), run.attempt, home, step, self._algorithm.round)

    def _snapshot(self, which: CheckpointId) -> _Snapshot:
        """The present state of this rank, which goes on while this is stored. Raises Failure(NON_FINITE)."""
        scope = state.optimizer_scope(self._algorithm)
        parts = [
            *state.outer_parts(self._trained, self._algorithm),
            *state.residual_parts(self._trained, self._algorithm, self._meeting.reducer),
            *state.optimizer_parts(self._trained, scope),
        ]
        if self._group.total([int(not state.finite(parts))])[0]:
            message = f"weights or optimizer are not finite after step {which.step}: no checkpoint of them is written"
            raise Failure(ExitCode.NON_FINITE, message)
        progress = self._journal.progress
        content = {
            "sections": {part.section: part.scope.value for part in parts},
            "random": state.random_state(),
            "counts": state.optimizer_counts(self._trained),
            "schedule": self._trained.schedule(),
            "skipped": self._trained.skipped,
            "best": [progress.best_step, progress.best_validation_loss],
            "validationLoss": progress.validation_loss,
            "zeroStage": self._place.attempt.plan.zero_stage,
        }
        kept = [part for part in parts if part.scope is not Scope.MODEL or self._lowest]
        return _Snapshot(which, state.snapshot(kept), content, self._told(which))

    def _try(self, taken: _Snapshot) -> None:
        """In the thread: store, or tell why not."""
        which = taken.which
        try:
            self._store(taken)
        except Abandoned as fault:
            if self._place.first:
                log.warning("checkpoint of step %d was left out: %s", which.step, fault)
        except Exception as fault:  # noqa: BLE001 - a thread must not die in silence
            failure = fault if isinstance(fault, Failure) else Failure(1, f"{type(fault).__name__}: {fault}")
            self._fault = failure
            self._failures = _FAILURES_LIMIT if failure.code == ExitCode.FENCED else self._failures + 1
            log.warning("checkpoint of step %d is not stored, training goes on: %s", which.step, failure)
            self._discard(which)

    def _store(self, taken: _Snapshot) -> None:
        pod, place, run = self._place.pod, self._place, self._place.attempt.run
        which = taken.which
        if self.leads:
            check_claim(self._storage, run)
        index = self._trained.index
        chunks = checkpoint.write_chunks(self._storage, which, pod.replica, place.number, index, taken.parts)
        checkpoint.write_list(self._storage, which, pod.replica, place.number, {**taken.content, "chunks": chunks})
        if self.leads:
            ranks = {plan.index: place.numbering.ranks(plan.index) for plan in run.replicas}
            self._newest = checkpoint.write_manifest(self._storage, which, ranks, taken.told, log.info)
            self._journal.checkpointed(self._newest)
            log.info("checkpoint of step %d: %s", which.step, self._newest.uri)
        elif place.first:
            checkpoint.wait_for_manifest(self._storage, which)
        self._complete = which.step
        self._failures = 0

    def _told(self, which: CheckpointId) -> dict[str, Any]:
        """What the manifest says of the whole job."""
        return {
            "algorithm": self._place.attempt.run.sync.algorithm.value,
            "digest": f"{self._algorithm.digest:016x}",
            "tokens": which.step * self._tokens_per_step,
            "tokensPerStep": self._tokens_per_step,
            "parameters": [[item.name, item.elements] for item in self._trained.index.parameters],
        }

    def _leave_out(self, which: CheckpointId) -> None:
        try:
            if self.leads:
                checkpoint.give_up(self._storage, which, "the one before it was still being stored")
            else:
                why = "it was still storing the one before"
                checkpoint.abandon(self._storage, which, self._place.pod.replica, self._place.number, why)
        except Failure as failure:
            log.warning("checkpoint of step %d: %s", which.step, failure)

    def _discard(self, which: CheckpointId) -> None:
        """Make room where the disk is full, and tell the others not to wait."""
        pod, rank = self._place.pod, self._place.number
        try:
            checkpoint.discard(self._storage, which, pod.replica, rank)
            if self.leads:
                checkpoint.give_up(self._storage, which, f"replica {pod.replica} couldn't store its part")
            else:
                checkpoint.abandon(self._storage, which, pod.replica, rank, "it couldn't store its part")
        except Failure as failure:
            log.warning("checkpoint of step %d: %s", which.step, failure)
