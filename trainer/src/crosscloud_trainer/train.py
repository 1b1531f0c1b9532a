"""One rank's training, from joining its replica to the stored result. Read it from top to bottom.

Every rank of every replica runs this; what only one does is in `if` blocks that say so. It ends with an ExitCode, and
where it fails leaves one message for its launcher.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from crosscloud_trainer import checkpoint, engine, metrics, result
from crosscloud_trainer.claim import release
from crosscloud_trainer.contract import (
    Activity,
    ExitCode,
    Packing,
    Precision,
    Schedule,
    StoredCheckpoint,
    Training,
    dump_json,
)
from crosscloud_trainer.data.corpus import Corpus, open_corpus
from crosscloud_trainer.environment import (
    DATA_FOLDER,
    DEADLINE,
    INITIAL_FOLDER,
    STATUS_FILE,
    Memory,
    begin_training,
    die_with_parent,
    end_training,
    leave_message,
)
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.layout import Index
from crosscloud_trainer.link import LinkError
from crosscloud_trainer.meeting import (
    Place,
    Watch,
    agree_on_data,
    count_traffic,
    first_line,
    meet_ranks,
    meet_replicas,
)
from crosscloud_trainer.models import initial
from crosscloud_trainer.models.apart import check_apart
from crosscloud_trainer.models.memory import check_memory
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.models.stages import Stage, hidden_size
from crosscloud_trainer.reporting import Status, StatusFile
from crosscloud_trainer.resuming import Resumer
from crosscloud_trainer.retention import Retention
from crosscloud_trainer.saving import Saver
from crosscloud_trainer.schedule import steps_for, warmup_cosine
from crosscloud_trainer.sizes import FP32_BYTES, wan_bytes
from crosscloud_trainer.steps import Steps, build_algorithm
from crosscloud_trainer.stopping import Stop
from crosscloud_trainer.tasks.causal import CausalTask

log = logging.getLogger("crosscloud_trainer")

BETAS = (0.9, 0.95)  # of AdamW, as language models are trained
COSINE_FLOOR = 0.1  # of the learning rate, at the end of the schedule


def train(place: Place, environ: Mapping[str, str], stop: Stop) -> None:
    """The run of this rank."""
    run, pod = place.attempt.run, place.pod
    training = run.training
    status = _status_file(place, environ)
    deadline = float(environ[DEADLINE])

    say(status, "meeting the ranks of this replica")
    device = meet_ranks(place, environ, deadline)
    corpus = open_corpus(Path(environ[DATA_FOLDER]), training.sequence_length)
    agree_on_data(place, corpus.summary)
    split = corpus.split(training, run.members, run.position(pod.replica))
    task = CausalTask(corpus, split, training.data.packing, place.rank, place.ranks, place.micro_batch)
    tokens_per_step = len(run.replicas) * training.batch_size * training.sequence_length
    steps = steps_for(training.tokens, tokens_per_step)

    say(status, "building the model")
    given = Path(environ[DATA_FOLDER]) / INITIAL_FOLDER
    training = replace(training, model=initial.described(training.model, given))
    check_memory(replace(run, training=training), pod.replica, device, Memory.read(environ), corpus.vocabulary)
    model = first_model(training, corpus, given)
    torch.manual_seed(seed_of(training.seed, pod.replica, place.number))  # of dropout: no two ranks drop alike
    trained = build_engine(*stage_of(model, place), place, steps)
    journal = Journal(steps, dense_bytes(place, trained.index, model))

    say(status, "meeting the other replicas")
    alike = {**corpus.agreement(training), "model": hashlib.sha256(dump_json(training.model).encode()).hexdigest()}
    with meet_replicas(place, trained, alike, deadline, hidden_size(model)) as meeting:
        algorithm = build_algorithm(place, trained, meeting, device)
        done = 0
        if run.resume_from:
            say(status, "reading the checkpoint")
            resumed = Resumer(place, trained, algorithm, meeting, tokens_per_step).resume()
            journal.resume(resumed)
            done = resumed.step
        saver = Saver(place, trained, algorithm, meeting, journal, device, tokens_per_step, done)
        retention = Retention(saver.storage, pod.acknowledged) if saver.leads and pod.acknowledged else None
        stop.gently(meeting, pod.rank_grace, lambda: saver.stands)
        if status is not None:
            status.watch(Watch(meeting, journal).live)
            status.update(activity=Activity.TRAINING, detail=None)
        if place.first and pod.metrics_port:
            serve_metrics(place, journal)
        log.info("training: %d steps of %d tokens", steps, tokens_per_step)
        if place.first and place.micro_batches < place.stages:
            said = "%d micro-batches in a step for %d stages, which stand still by turns: raise training.batchSize"
            log.warning(said, place.micro_batches, place.stages)
        try:
            Steps(place, task, trained, algorithm, meeting, journal, device, steps, saver, stop, done).run()
        except Exception:
            if status is not None:
                status.close()  # it may have a last checkpoint to tell of, or digests that differ
            raise
        if status is not None:
            status.update(activity=Activity.FINISHING, detail="waiting until all replicas have the last round")
        meeting.settle()
        journal.settled(meeting.exchange.settled_round)
        count_traffic(meeting, journal, meeting.totals(device), place)

        say(status, "writing checkpoint and result")
        newest = saver.last(steps)
        stored = store(place, saver, newest, training, corpus)
        if status is not None:
            status.update(**stored)
        if newest is not None and retention is not None:
            say(status, "deleting older checkpoints")
            retention.finish(newest, run.checkpoint.keep, lambda: stop.requested)
    if status is not None:
        status.close()
    dist.barrier()
    engine.close()


def first_model(training: Training, corpus: Corpus, given: Path) -> PreTrainedModel:
    """The model before the first step; its weights are drawn, or those in the folder `given`."""
    model = build_model(training.model, training.sequence_length, training.seed, corpus.vocabulary)
    if training.data.packing is Packing.DOCUMENTS:
        check_apart(model)
    if training.model.init_from is not None:
        initial.load(model, training.model, given)
    return model


def stage_of(model: PreTrainedModel, place: Place) -> tuple[torch.nn.Module, engine.Whole | None]:
    """This rank's part of the model: all of it, or its stage with what it needs to know of the whole."""
    if place.stages == 1:
        return model, None
    names = engine.parameter_names(model)
    index = Index.of({names[id(p)]: p.numel() for p in model.parameters() if p.requires_grad})
    return Stage(model, place.pod.stage, place.stages), engine.Whole(index, names)


def dense_bytes(place: Place, index: Index, model: PreTrainedModel) -> float:
    """What this replica would send over the WAN at each step in fp32: its part of an all-reduce, and what passes
    between stages in different members, there and back.
    """
    run = place.attempt.run
    sizes = [parameter.elements for parameter in index.parameters]
    values = run.training.batch_size * run.training.sequence_length * hidden_size(model)
    boundaries = 2 * FP32_BYTES * values * place.attempt.plan.boundaries
    return wan_bytes("None", sizes, len(run.replicas)) + boundaries


def build_engine(model: torch.nn.Module, whole: engine.Whole | None, place: Place, steps: int) -> engine.Engine:
    """DeepSpeed around the model, AdamW with decay on matrices only, and the schedule."""
    training = place.attempt.run.training
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=training.learning_rate, betas=BETAS)
    floor = COSINE_FLOOR if training.schedule is Schedule.COSINE else 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, training.warmup_steps, steps, floor)
    )
    settings = engine.EngineSettings(
        zero_stage=place.attempt.plan.zero_stage,  # type: ignore[arg-type]  # 0 to 3, by the contract
        precision="bf16" if training.precision is Precision.BF16 else "fp32",
        micro_batch_size=place.micro_batch,
        accumulation_steps=None if whole else place.micro_batches,
        clip_norm=training.gradient_clipping or None,
    )
    return engine.build(model, optimizer, settings, schedule, whole)


def store(
    place: Place, saver: Saver, newest: StoredCheckpoint | None, training: Training, corpus: Corpus
) -> dict[str, Any]:
    """Write the result, on the rank that has `newest`: from the weights in it; returns what the status says of both."""
    if newest is None:
        return {}
    run = place.attempt.run
    found = checkpoint.Checkpoint(newest)
    model = build_model(training.model, training.sequence_length, training.seed, corpus.vocabulary)
    result.fill(model, found)
    provenance = {"job": run.job.name, "uid": run.job.uid, "checkpoint": newest.uri, "sha256": newest.digest}
    address = result.write_result(saver.storage, model, provenance, corpus.tokenizer_folder)
    release(saver.storage, run)
    log.info("stored: checkpoint %s, result %s", newest.uri, address)
    return {"result_uri": address, "checkpoint_uri": newest.uri, "checkpoint_digest": newest.digest}


def serve_metrics(place: Place, journal: Journal) -> None:
    try:
        metrics.serve(journal, place.attempt.run, place.pod.replica, place.pod.metrics_port)
    except OSError as fault:
        message = (
            f"CROSSCLOUD_METRICS_PORT: port {place.pod.metrics_port} can't be served ({fault.strerror}); 0 serves none"
        )
        raise Failure(ExitCode.INVALID_INPUT, message) from fault


def _status_file(place: Place, environ: Mapping[str, str]) -> StatusFile | None:
    if not place.first or STATUS_FILE not in environ:
        return None
    return StatusFile(Path(environ[STATUS_FILE]), Status(home=place.attempt.run.home.number), lambda status: status)


def say(status: StatusFile | None, detail: str) -> None:
    """Tell what this rank does now, where it is the one that speaks."""
    if status is not None:
        status.update(detail=detail)


def seed_of(*parts: int) -> int:
    """A seed that is another one wherever a part differs."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def explained(fault: Exception) -> Failure:
    """The exit code and message of a fault: the one table of how a rank can end."""
    if isinstance(fault, Failure):
        return fault
    if isinstance(fault, LinkError):
        return Failure(fault.exit_code, str(fault))
    if isinstance(fault, checkpoint.Damaged):
        return Failure(ExitCode.STORAGE_REFUSED, f"the checkpoint that was just stored can't be read: {fault}")
    if isinstance(fault, engine.TooManySkippedStepsError):
        return Failure(ExitCode.NON_FINITE, str(fault))
    if isinstance(fault, engine.EngineError):
        return Failure(ExitCode.INVALID_INPUT, str(fault))
    if isinstance(fault, dist.DistError) or (isinstance(fault, RuntimeError) and "gloo" in str(fault).lower()):
        return Failure(ExitCode.PEER_LOST, f"another rank of this replica has gone: {first_line(fault)}")
    traceback.print_exception(fault)
    return Failure(1, f"unexpected {type(fault).__name__}: {first_line(fault)} (traceback in the log)")


def main() -> None:
    environ = os.environ
    die_with_parent(environ, signal.SIGKILL)
    stop = Stop(environ)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)  # thousands, from DeepSpeed's use of torch
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    code = 0
    begin_training(environ)
    try:
        train(Place.read(environ), environ, stop)
        end_training(environ)
    except Exception as fault:  # noqa: BLE001 - the edge: every end becomes an exit code and a message
        failure = explained(fault)
        code = failure.code
        leave_message(environ, str(failure))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of gloo and of a broken link must not hold up or change an end that is decided


if __name__ == "__main__":
    main()
