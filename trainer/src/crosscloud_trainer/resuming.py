"""Going on from a checkpoint: at the same layout to the bit, at another one by reading each vector by its elements.

All replicas must choose the same checkpoint, and what is damaged shows only to those who read it. So each replica tries
the newest, says in the storage whether it could read all of its part, and waits for the others' words; if one could
not, all try the one before it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from crosscloud_trainer import engine, state
from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.checkpoint import Checkpoint, Damaged, Part, Scope, Span
from crosscloud_trainer.contract import ExitCode, Progress, StoredCheckpoint
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.failures import Failure, invalid
from crosscloud_trainer.meeting import Meeting, Place
from crosscloud_trainer.storage import Storage

log = logging.getLogger("crosscloud_trainer")

_POLL_SECONDS = 0.2
_WAIT_SECONDS = 1800.0  # for other replicas, which read as much as this one


class Resumer:
    """Restores one rank. Methods are called by all ranks of the replica."""

    def __init__(
        self,
        place: Place,
        trained: engine.Engine,
        algorithm: AllReduce | DiLoCo,
        meeting: Meeting,
        tokens_per_step: int,
    ) -> None:
        """`tokens_per_step`: of the whole job, as it runs now."""
        self._place, self._trained, self._algorithm, self._meeting = place, trained, algorithm, meeting
        self._tokens_per_step = tokens_per_step
        self._replica = place.pod.replica
        self._stages = [(plan.index, stage.index) for plan in place.attempt.run.replicas for stage in plan.stages]
        self._progress = Progress(step=0, total_steps=0, round=0, tokens=0)
        self._tell: Callable[[], None] = lambda: None  # of what was restored, once all replicas have done so

    def resume(self) -> Progress:
        """Restore the newest checkpoint that all replicas can read; returns what this replica had done by then.

        Raises Failure where none of them can be used, and INVALID_INPUT for one of another model or algorithm.
        """
        candidates = self._place.attempt.run.resume_from
        faults = []
        for number, stored in enumerate(candidates):
            fault = self._agreed(number, stored, self._try(stored))
            if fault is None:
                self._tell()
                return self._progress
            faults.append(f"step {stored.step}: {fault}")
            if self._place.first:
                log.warning("checkpoint %s can't be used: %s", stored.uri, fault)
        message = (
            f"none of the job's checkpoints can be used, and it doesn't begin again by itself: {'; '.join(faults)}"
        )
        raise Failure(ExitCode.STORAGE_REFUSED, message)

    def _try(self, stored: StoredCheckpoint) -> str | None:
        """Why this rank can't read its part; None once it is restored."""
        try:
            found = Checkpoint(stored)
            self._check(found)
            self._restore(found)
        except Damaged as fault:
            return str(fault)
        return None

    def _agreed(self, number: int, stored: StoredCheckpoint, own: str | None) -> str | None:
        """The first fault that any rank of any replica has found."""
        told: list[str | None] = [None] * self._place.ranks
        dist.all_gather_object(told, own)
        fault = next((text for text in told if text is not None), None)
        if len(self._stages) == 1:
            return fault
        answer: list[str | None] = [None]
        if self._place.rank == 0:
            answer = [self._of_others(number, stored, fault)]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _of_others(self, number: int, stored: StoredCheckpoint, own: str | None) -> str | None:
        run = self._place.attempt.run
        storage = Storage(run.storage_uri)
        folder = f"attempt-{run.attempt}/home-{run.home.number}/resume-{number}"
        said = {"run": run.digest(), "checkpoint": stored.digest}
        mine = (self._replica, self._place.pod.stage)
        storage.write(f"{folder}/{_name(mine)}", json.dumps({**said, "fault": own}).encode())
        faults = {mine: own}
        deadline = time.monotonic() + _WAIT_SECONDS
        while missing := [stage for stage in self._stages if stage not in faults]:
            for stage in missing:
                found = _words(storage.read(f"{folder}/{_name(stage)}"))
                if found.items() >= said.items():
                    faults[stage] = found["fault"]
            if set(missing) <= set(faults):
                continue
            if time.monotonic() > deadline:
                silent = sorted({replica for replica, _ in missing})
                raise Failure(ExitCode.PEER_LOST, f"replicas {silent} said nothing of the checkpoint to resume from")
            time.sleep(_POLL_SECONDS)
        return next((text for _, text in sorted(faults.items()) if text is not None), None)

    def _check(self, found: Checkpoint) -> None:
        """Raises Failure(INVALID_INPUT) for a checkpoint of something else, with every difference by its name."""
        run = self._place.attempt.run
        problems = []
        before, now = found.manifest["algorithm"], run.sync.algorithm.value
        if before != now:
            problems.append(f"spec.sync.algorithm: the checkpoint has {before}, the job {now}")
        old: dict[str, int] = dict(found.manifest["parameters"])
        new = {item.name: item.elements for item in self._trained.index.parameters}
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                sizes = [f"{part[name]:,} elements" if name in part else "no such parameter" for part in (old, new)]
                problems.append(f"parameter {name}: the checkpoint has {sizes[0]}, the job {sizes[1]}")
        if problems:
            more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
            raise invalid([f"{found.uri} is of another algorithm or model:", *problems[:8], *more])

    def _restore(self, found: Checkpoint) -> None:
        source = self._replica if self._replica in found.replicas else found.replicas[0]
        parts = state.outer_parts(self._trained, self._algorithm)
        residuals = state.residual_parts(self._trained, self._algorithm, self._meeting.reducer)
        known = [part for part in residuals if self._has(found, part)]
        optimizer = self._optimizer_parts(found, source)
        wants = [(part.section, source, part.span, part.values) for part in (*parts, *known, *optimizer)]
        found.read(wants)
        self._trained.load_optimizer(self._states(found, source, optimizer))
        manifest = found.manifest
        lead = found.ranks_of(source)[0]
        scale = manifest["tokensPerStep"] / self._tokens_per_step
        step = manifest["step"] if scale == 1 else manifest["tokens"] // self._tokens_per_step
        self._algorithm.resume(manifest["round"], step, int(manifest["digest"], 16))
        if f"{self._algorithm.digest:016x}" != manifest["digest"]:
            raise Damaged(f"its outer state has digest {self._algorithm.digest:016x}, not {manifest['digest']}")
        self._trained.refresh()
        self._trained.resume(lead["skipped"], lead["schedule"], scale)
        self._restore_random(found, source)
        self._tell = lambda: self._tell_of(found, residuals, known)
        tokens = step * self._tokens_per_step // len(self._place.replicas)
        self._progress = Progress(
            step=step,
            total_steps=0,
            round=manifest["round"],
            tokens=tokens,
            digest=manifest["digest"],
            skipped_steps=lead["skipped"],
            best_step=lead["best"][0],
            best_validation_loss=lead["best"][1],
        )

    def _has(self, found: Checkpoint, part: Part) -> bool:
        """Whether the checkpoint has this residual; one of a replica that is new begins at zero."""
        known = found.scopes.get(part.section)
        return known is not None and (known is not Scope.REPLICA or self._replica in found.replicas)

    def _optimizer_parts(self, found: Checkpoint, source: int) -> list[Part]:
        """Room for what the optimizer keeps on this rank."""
        parts = []
        for section in found.sections(state.OPTIMIZER, source):
            for interval, values in self._trained.optimizer_places():
                span = Span(interval.parameter, interval.start, interval.stop)
                room = torch.zeros_like(values).view(-1)
                parts.append(Part(state.OPTIMIZER + section, Scope.REPLICA, span, room))
        return parts

    def _states(self, found: Checkpoint, source: int, parts: list[Part]) -> list[dict[str, torch.Tensor]]:
        counts: dict[str, dict[str, float]] = {}
        for rank in found.ranks_of(source):
            for key, values in rank["counts"].items():
                counts.setdefault(key, {}).update(values)
        places = self._trained.optimizer_places()
        states: list[dict[str, torch.Tensor]] = [{} for _ in places]
        for number, part in enumerate(parts):
            states[number % len(places)][part.section.removeprefix(state.OPTIMIZER)] = part.values
        for held, (interval, _) in zip(states, places, strict=True):
            for key, values in counts.items():
                if str(interval.parameter) in values:
                    held[key] = torch.tensor(values[str(interval.parameter)])
        return states

    def _restore_random(self, found: Checkpoint, source: int) -> None:
        """Only where this very rank was: other ranks begin with the numbers of their own seed."""
        ranks = found.ranks_of(source)
        if source == self._replica and len(ranks) == self._place.numbering.ranks(self._replica):
            state.set_random_state(ranks[self._place.number]["random"])

    def _tell_of(self, found: Checkpoint, residuals: list[Part], known: list[Part]) -> None:
        if not self._place.first:
            return
        log.info("resumed from %s: step %d, round %d", found.uri, found.manifest["step"], found.manifest["round"])
        if len(known) < len(residuals):
            log.warning("residuals that the checkpoint doesn't have begin at zero")
        gone = [replica for replica in found.replicas if replica not in self._place.replicas]
        if gone and state.RESIDUAL in found.scopes and self._replica == self._place.replicas[0]:
            log.warning("residuals of replicas %s are dropped: they are no longer in the job", gone)


def _name(stage: tuple[int, int]) -> str:
    return f"replica-{stage[0]}-stage-{stage[1]}.json"


def _words(text: bytes | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:  # it is being written
        return {}
    return found if isinstance(found, dict) else {}
