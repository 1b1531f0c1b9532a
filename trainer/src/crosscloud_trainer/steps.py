"""The inner steps of a run, in order, with what belongs to each: exchange, evaluation, progress."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from crosscloud_trainer import engine
from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.compress import codec_of
from crosscloud_trainer.contract import Algorithm, ExitCode
from crosscloud_trainer.contract.report import perplexity
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.exchange import RoundReport
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.group import ReplicaTotals, TorchGroup
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.meeting import Meeting, Place, count_traffic
from crosscloud_trainer.pipeline import Pipeline, StageNorm
from crosscloud_trainer.saving import Saver
from crosscloud_trainer.stopping import Stop
from crosscloud_trainer.tasks.causal import CausalTask, MicroBatch

log = logging.getLogger("crosscloud_trainer")

LOG_SECONDS = 10.0
MOST_SKIPPED_ROUNDS = 10  # in a row, as for steps
TRAFFIC_STEPS = 10  # under AllReduce, whose rounds are too many to count bytes after each


@dataclass
class Steps:
    """All that a rank needs for its steps. Every method is called by all ranks of the replica."""

    place: Place
    task: CausalTask
    trained: engine.Engine
    algorithm: AllReduce | DiLoCo
    meeting: Meeting
    journal: Journal
    device: torch.device
    steps: int
    saver: Saver
    stop: Stop
    done: int = 0
    """Steps of an earlier attempt that are not done again."""

    def __post_init__(self) -> None:
        self._replica = self.meeting.totals(self.device)
        self._pipeline: Pipeline | None = None
        if self.meeting.stages is not None:
            self._pipeline = Pipeline(self.trained, self.place.position, self.meeting.stages, self.device)
        training = self.place.attempt.run.training
        self._tokens = training.batch_size // self.place.ranks * training.sequence_length  # of this rank, in a step
        self._shown = time.monotonic()
        self._leaves = False  # this replica was told to end; under AllReduce the round of the next step says so

    def run(self) -> None:
        """From the first step to the last. Raises Failure(TERMINATED) once a replica was told to end."""
        alone = len(self.meeting.exchange.view) == 1
        for number in range(self.done + 1, self.steps + 1):
            learned = self._learn(number)
            last = number == self.steps
            ended = self._exchange(learned, last=last or (alone and self._must_save(number)))
            if number % self.place.attempt.run.training.evaluate_every == 0 or number == self.steps:
                self._evaluate(number)
            self._say(number)
            if ended and not last:
                self._save(number)

    def _must_save(self, number: int) -> bool:
        """Whether a replica that is alone ends a round here, which it would not do by itself: for a last checkpoint, or
        under AllReduce, where it has no rounds but these.
        """
        return self._leaves or (not self.algorithm.rewrites_weights and self.saver.due(number))

    def _save(self, number: int) -> None:
        """After a round, in which all replicas have come to the same step."""
        exchange = self.meeting.exchange
        # Only what was said in the round counts: under AllReduce the others hear of a wish to end one step later.
        alone = len(exchange.view) == 1
        leaving = ((exchange.replica,) if self._leaves else ()) if alone else exchange.leaving
        if leaving:
            self.saver.last(number)
            who = "this replica was" if self._leaves else f"replica {', '.join(map(str, leaving))} was"
            message = f"{who} told to end: stopped after step {number}, with a checkpoint"
            raise Failure(ExitCode.TERMINATED, message)
        if self.saver.due(number):
            self.saver.take(number)

    def _learn(self, number: int) -> int:
        """One inner step; returns the tokens of this rank that the replica has learned from in it."""
        started, waited = time.monotonic(), self._waited()
        batches = list(self.task.micro_batches(number - 1, self.device))
        if self._pipeline is not None:
            own, report = self._pipeline.step([(batch.inputs, batch.weight) for batch in batches])
        else:
            own, report = self._pass(batches)
        mean, leaves, bubble = self._agree(own, self._waited() - waited)
        self._leaves = self.meeting.exchange.leaves = leaves
        seconds, tokens = time.monotonic() - started, self._tokens * self.place.ranks
        self.journal.step(mean, tokens, report.skipped, seconds, report.exchange_seconds, bubble)
        # The ranks of all stages go through the same tokens.
        return learned_tokens(report, self._tokens) if self.place.position.first else 0

    def _pass(self, batches: Sequence[MicroBatch]) -> tuple[float, engine.StepReport]:
        """An inner step of a model that isn't cut into stages: its mean loss, and what the step did."""
        losses, report = [], None
        for batch in batches:
            loss = self.trained(**batch.inputs).loss * batch.weight
            losses.append(loss.detach())
            self.trained.backward(loss)
            report = self.trained.step()
        assert report is not None, "the micro-batches of a step are as many as the engine accumulates"
        return float(torch.stack(losses).mean()), report

    def _waited(self) -> float:
        """Seconds in which this rank has waited for other stages."""
        return 0.0 if self.meeting.stages is None else self.meeting.stages.waited

    def _agree(self, loss: float, waited: float) -> tuple[float, bool, float]:
        """Mean loss over the ranks of the replica's last stage, whether any rank was told to end, and how long a rank
        has waited for other stages, in the mean over all. Collective.
        """
        known = loss if self.place.position.last else 0.0
        told = torch.tensor([known, float(self.stop.requested), waited], dtype=torch.float64, device=self.device)
        total, requests, bubble = self._replica.sums(told).tolist()
        return total / self.place.ranks, requests > 0, bubble / (self.place.ranks * self.place.stages)

    def _exchange(self, learned: int, *, last: bool) -> bool:
        """Whether a round has ended with this step."""
        started = time.monotonic()
        done = self.algorithm.on_step(learned, last=last)
        if done is None:
            return False
        if self.algorithm.rewrites_weights:
            self.trained.refresh()
        seconds = time.monotonic() - started
        if self.algorithm.rewrites_weights:
            self._tell(done, seconds)
        note_round(self.journal, self.algorithm, self.place.pod.replica, done, seconds)
        if self.algorithm.rewrites_weights or last or done.round % TRAFFIC_STEPS == 0:
            count_traffic(self.meeting, self.journal, self._replica, self.place)
            self.journal.residual_norm = residual_norm(self.algorithm, self._replica)
        return True

    def _tell(self, done: RoundReport, seconds: float) -> None:
        if self.place.first:
            word = "applied" if done.applied else "skipped by all"
            refused = ", own update refused" if done.refused else ""
            log.info("round %d %s: digest %016x, %.2f s%s", done.round, word, done.digest, seconds, refused)

    def _evaluate(self, number: int) -> None:
        """Validation loss over all ranks of the replica."""
        losses_of = self._losses if self._pipeline is None else self._pipeline.evaluate
        told = torch.tensor(self.task.evaluate(losses_of, self.device), dtype=torch.float64, device=self.device)
        total, count = self._replica.sums(told).tolist()
        loss = total / count if count else float("nan")
        self.journal.validation(number, loss)
        if self.place.first and math.isfinite(loss):
            log.info("validation after step %d: loss %.4f, perplexity %.4g", number, loss, perplexity(loss))

    def _losses(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
        """Of each batch, without training; dropout is off meanwhile."""
        self.trained.train(False)
        with torch.no_grad():
            losses = [float(self.trained.module(**batch).loss) for batch in batches]
        self.trained.train()
        return losses

    def _say(self, number: int) -> None:
        if self.place.first and (time.monotonic() - self._shown > LOG_SECONDS or number == self.steps):
            self._shown = time.monotonic()
            rate = self.journal.progress.tokens_per_second
            loss = self.journal.progress.loss or float("nan")
            log.info("step %d of %d: loss %.4f, %.0f tokens/s", number, self.steps, loss, rate)


def note_round(
    journal: Journal, algorithm: AllReduce | DiLoCo, replica: int, done: RoundReport, seconds: float
) -> None:
    """Counts a round of this replica. Raises Failure(NON_FINITE), on all its ranks alike, where too many of its windows
    in a row have come to nothing. Under AllReduce such a round is a skipped step, which the engine counts.
    """
    skipped = algorithm.rewrites_weights and not (done.applied and done.weights[replica])
    journal.round(done.round, f"{done.digest:016x}", seconds, skipped=skipped)
    if journal.skipped_rounds_in_a_row >= MOST_SKIPPED_ROUNDS:
        message = (
            f"updates were not finite for {MOST_SKIPPED_ROUNDS} rounds in a row, the last one {done.round}; lower the "
            "learning rate (of the outer optimizer too), or shorten the window"
        )
        raise Failure(ExitCode.NON_FINITE, message)


def residual_norm(algorithm: AllReduce | DiLoCo, replica: ReplicaTotals) -> float:
    """Norm of what encoding has lost so far, over all ranks of the replica. Collective."""
    own = torch.linalg.vector_norm(algorithm.residual, dtype=torch.float64).square()
    return float(replica.sums(own.reshape(1)).sqrt())


def learned_tokens(report: engine.StepReport, tokens: int) -> int:
    """What a step adds to the weight of the replica's update: nothing if it was skipped."""
    return tokens if report.applied else 0


def build_algorithm(place: Place, trained: engine.Engine, meeting: Meeting, device: torch.device) -> AllReduce | DiLoCo:
    """What the manifest's `sync` asks for."""
    run = place.attempt.run
    sync, training = run.sync, run.training
    group, replica, codec = TorchGroup(device), meeting.totals(device), codec_of(sync.codec_spec)
    if place.stages > 1:
        trained.exchange = StageNorm(replica)
    if sync.algorithm is Algorithm.DILOCO:
        return DiLoCo(
            trained.layout,
            trained.shard,
            group,
            replica,
            meeting.exchange,
            codec,
            inner_steps=sync.window,
            settings=sync.outer,
            error_feedback=sync.error_feedback,
        )
    algorithm = AllReduce(
        trained.layout,
        trained.shard,
        group,
        replica,
        meeting.exchange,
        codec,
        tokens=training.batch_size * training.sequence_length if run.script is None else place.ranks,
        error_feedback=sync.error_feedback,
        state=trained,
    )
    if not algorithm.alone:
        trained.exchange = algorithm
    return algorithm
