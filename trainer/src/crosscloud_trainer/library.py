"""Two lines for a script that drives DeepSpeed itself:

    sync = join()
    optimizer = sync.wrap(optimizer)      # before deepspeed.initialize(model=..., optimizer=optimizer, config=...)

Outside a job both do nothing. In a job every step of the script's engine is followed by what the manifest's `sync` asks
for. The engine is looked into at its first step, when DeepSpeed has laid everything out; there the replicas meet.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from crosscloud_trainer import adopting, engine
from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.contract import Activity, ExitCode
from crosscloud_trainer.departure import Departure, Store
from crosscloud_trainer.environment import (
    STATUS_FILE,
    begin_training,
    die_with_parent,
    end_training,
    leave_message,
)
from crosscloud_trainer.exchange import RoundReport
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.group import TorchGroup
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.meeting import Place, Watch, count_traffic, meet_replicas
from crosscloud_trainer.reporting import Status, StatusFile
from crosscloud_trainer.result import store_folder
from crosscloud_trainer.shard_optimizer import ShardOptimizer
from crosscloud_trainer.sizes import wan_bytes
from crosscloud_trainer.steps import TRAFFIC_STEPS, build_algorithm, learned_tokens, note_round, residual_norm
from crosscloud_trainer.storage import Storage
from crosscloud_trainer.train import explained, serve_metrics

log = logging.getLogger("crosscloud_trainer")

LOG_STEPS = 50
_END_SECONDS = 600.0  # how much later than others a rank may come to the end of a script that doesn't call `finish`


class Alone:
    """Outside a job: what a script asks of `join()`, answered for a job of one replica; nothing is changed."""

    joined = False
    replica, replicas = 0, 1
    storage_uri: str | None = None

    @property
    def rank(self) -> int:
        """This process among all of the job, for the data that it is to take."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def ranks(self) -> int:
        """Processes of the whole job."""
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def steps(self, total: int) -> None: ...

    def tokens(self, count: int) -> None: ...

    def finish(self) -> None: ...

    def store(self, folder: Path | str) -> None: ...


class Joined:
    """In a job. `wrap` is called once; all ranks of the replica call the same methods in the same order."""

    joined = True

    def __init__(self, place: Place, environ: Mapping[str, str]) -> None:
        run = place.attempt.run
        sizes = {plan.index: plan.stages[0].ranks for plan in run.replicas}
        self.replica, self.replicas = place.replicas.index(place.pod.replica), len(place.replicas)
        self.rank = place.rank + sum(sizes[index] for index in place.replicas[: self.replica])
        self.ranks = sum(sizes.values())
        self.storage_uri: str | None = run.storage_uri
        self._place = place
        self._status = _status_file(place, environ)
        self._optimizer: ShardOptimizer | None = None
        self._run: _Run | None = None
        self._planned = 0
        self._told = 0
        self._losses: list[torch.Tensor] = []
        self._finished = False
        self._environ = environ
        self._departure: Departure | None = None

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What `deepspeed.initialize` is to be given in place of `optimizer`, which has not stepped yet."""
        if self._optimizer is not None:
            message = "sync.wrap was called twice: one engine of a script can be trained in a job"
            raise Failure(ExitCode.INVALID_INPUT, message)
        self._optimizer = ShardOptimizer(optimizer)
        adopting.watch(self._optimizer, self)
        return self._optimizer

    def steps(self, total: int) -> None:
        """Says, before the first step, how many the script will take: for progress, nothing else."""
        self._planned = total

    def tokens(self, count: int) -> None:
        """Says, before the step, that this rank learns from `count` tokens (or samples) in it: the weight of the
        replica's update, and the job's speed. Without it every step of a rank counts 1.
        """
        self._told += count

    def forward(self) -> None:
        self._departs().calls += 1

    def backward(self, loss: torch.Tensor) -> None:
        self._departs().calls += 1
        self._losses.append(loss.detach())

    def step(self, deepspeed_engine: Any, plain: Callable[[], object]) -> None:
        self._departs().calls += 1
        if self._run is None:
            assert self._optimizer is not None
            adopted = adopting.adopt(deepspeed_engine, self._optimizer)
            self._run = _Run(self._place, adopted, self._status, self._planned, deepspeed_engine.device)
        if not deepspeed_engine.is_gradient_accumulation_boundary():
            plain()
            return
        tokens, self._told = self._told or 1, 0
        losses, self._losses = self._losses, []
        try:
            self._run.step(plain, tokens, losses)
        except Exception:
            if self._status is not None:
                self._status.close()  # it may have to tell of digests that differ
            raise

    def finish(self) -> None:
        """The end of training, before the script saves its model: the last window's round, so that all replicas have
        the same weights.

        Without this call it happens at the end of the script, if its process group still exists by then.
        """
        if self._finished:
            return
        self._finished = True
        if self._run is None:
            raise Failure(ExitCode.INVALID_INPUT, "the script has ended without a step of the engine it wrapped")
        self._departs().together(self._run.steps)
        self._run.finish()
        if self._status is not None:
            self._status.close()
        end_training(self._environ)

    def store(self, folder: Path | str) -> None:
        """After `finish`: stores the files below the local `folder` as the job's result. Rank 0 of the first replica
        does it; on all others nothing happens, and they may leave the call out.

        Raises Failure(INVALID_INPUT) before `finish`, when the weights aren't yet those of all replicas, and where
        `folder` holds no files.
        """
        if not self._finished:
            message = "sync.store was called before sync.finish(): save the model and store it after the last round"
            raise Failure(ExitCode.INVALID_INPUT, message)
        if self._place.first and self.replica == 0 and self._status is not None:
            self._status.update(detail="storing the result")
            self._status.update(result_uri=store_folder(Storage(str(self.storage_uri)), Path(folder)), detail=None)

    def at_exit(self) -> None:
        """The end of a script that hasn't called `finish`, or of one rank alone."""
        if self._finished:
            return
        met = dist.is_initialized()
        if met:
            self._departs().together(self._run.steps if self._run is not None else 0, _END_SECONDS)
        if self._run is None:
            if met:
                end_training(self._environ)
            return
        if not met:
            if self._run.open_steps:
                message = (
                    f"the last {self._run.open_steps} steps were not exchanged: the script destroyed its process group "
                    "before; call sync.finish() after the last step"
                )
                raise Failure(ExitCode.INVALID_INPUT, message)
            self._run.settle()
            end_training(self._environ)
            return
        self.finish()

    def _departs(self) -> Departure:
        if self._departure is None:
            self._departure = Departure(_store(), dist.get_rank(), dist.get_world_size())
        return self._departure


class _Run:
    """The rounds of one script, from its engine's first step."""

    def __init__(
        self, place: Place, trained: engine.Engine, status: StatusFile | None, steps: int, device: torch.device
    ) -> None:
        """`steps` as the script says, 0 where it doesn't. `device` is the rank's, also where no weights lie on it."""
        self._place, self._trained, self._status = place, trained, status
        run = place.attempt.run
        planned, found = place.attempt.plan.zero_stage, trained.zero_stage
        if planned != found:
            message = f"replica.zeroStage: found {planned}; must be {found}, as in the script's DeepSpeed configuration"
            raise Failure(ExitCode.INVALID_INPUT, message)
        self._say("meeting the other replicas")
        self._device = device
        self._group = TorchGroup(self._device)
        sizes = [parameter.elements for parameter in trained.index.parameters]
        self._journal = Journal(steps, wan_bytes("None", sizes, len(run.replicas)))
        deadline = time.monotonic() + place.pod.start_deadline
        self._meeting = meet_replicas(place, trained, {"script": _digest_of(sys.argv[0])}, deadline)
        self._algorithm = build_algorithm(place, trained, self._meeting, self._device)
        if isinstance(self._algorithm, AllReduce) and not self._algorithm.alone:
            trained.clip_after_exchange()
        if status is not None:
            status.watch(Watch(self._meeting, self._journal).live)
            status.update(activity=Activity.TRAINING, detail=None)
        if place.first and place.pod.metrics_port:
            serve_metrics(place, self._journal)
        self.open_steps = 0
        self._mark = time.monotonic()

    @property
    def steps(self) -> int:
        """Taken so far."""
        return self._journal.progress.step

    def step(self, plain: Callable[[], object], tokens: int, losses: list[torch.Tensor]) -> None:
        loss, tokens_of_all = self._mean(losses, tokens)
        if isinstance(self._algorithm, AllReduce):
            self._algorithm.tokens = tokens_of_all
        report = self._trained.around(plain)
        assert report is not None, "this is called at the end of an accumulation only"
        now = time.monotonic()
        self._journal.step(loss, tokens_of_all, report.skipped, now - self._mark, report.exchange_seconds)
        self.open_steps += 1
        self._after_round(self._algorithm.on_step(learned_tokens(report, tokens)), now)
        self._mark = time.monotonic()
        progress = self._journal.progress
        if self._place.first and progress.step % LOG_STEPS == 0:
            log.info("step %d: loss %.4f, %.0f tokens/s", progress.step, loss, progress.tokens_per_second)

    def _after_round(self, done: RoundReport | None, started: float) -> None:
        if done is None:
            return
        self.open_steps = 0
        if self._algorithm.rewrites_weights:
            self._trained.refresh()
        note_round(self._journal, self._algorithm, self._place.pod.replica, done, time.monotonic() - started)
        if self._place.first and self._algorithm.rewrites_weights:
            log.info("round %d: digest %016x", done.round, done.digest)
        if self._algorithm.rewrites_weights or done.round % TRAFFIC_STEPS == 0:
            count_traffic(self._meeting, self._journal, self._group, self._place)
            self._journal.residual_norm = residual_norm(self._algorithm, self._group)

    def finish(self) -> None:
        self._after_round(self._algorithm.finish(), time.monotonic())
        count_traffic(self._meeting, self._journal, self._group, self._place)
        self.settle()
        dist.barrier()

    def settle(self) -> None:
        if self._status is not None:
            self._status.update(activity=Activity.FINISHING, detail="waiting until all replicas have the last round")
        self._meeting.settle()
        self._journal.settled(self._meeting.exchange.settled_round)
        if self._status is not None:
            self._status.update(detail=None)
        self._meeting.close()

    def _mean(self, losses: list[torch.Tensor], tokens: int) -> tuple[float, int]:
        """Mean loss of the step over the replica's ranks, NaN if the script told none, and the tokens of all of them.
        Collective."""
        total = float(torch.stack([loss.double() for loss in losses]).sum()) if losses else 0.0
        sums = self._group.sums(torch.tensor([total, len(losses), tokens], dtype=torch.float64, device=self._device))
        total, count, told = sums.tolist()
        return total / count if count else float("nan"), round(told)

    def _say(self, detail: str) -> None:
        if self._status is not None:
            self._status.update(detail=detail)


@functools.cache
def join() -> Alone | Joined:
    """See `crosscloud_trainer.join`. Raises Failure where the job's documents can't be used."""
    environ = os.environ
    if "CROSSCLOUD_REPLICA" not in environ:
        if environ.get("RANK", "0") == "0":
            sys.stderr.write("crosscloud: not in a job; join() and wrap() change nothing\n")
        return Alone()
    die_with_parent(environ, signal.SIGKILL)
    begin_training(environ)
    sys.excepthook = functools.partial(_end, environ)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    if not torch.cuda.is_available():
        engine.compile_nothing()
    joined = Joined(Place.read(environ), environ)
    atexit.register(_at_exit, joined, environ)
    os.register_at_fork(after_in_child=_forget)
    return joined


def _forget() -> None:
    """In a child that the script forks, whose end isn't that of the rank."""
    atexit.unregister(_at_exit)
    sys.excepthook = sys.__excepthook__


def _at_exit(joined: Joined, environ: Mapping[str, str]) -> None:
    try:
        joined.at_exit()
    except Exception as fault:  # noqa: BLE001 - the edge: after the script's last line nobody else can handle it
        _end(environ, type(fault), fault, fault.__traceback__)


def _end(environ: Mapping[str, str], _: type[BaseException], fault: BaseException, __: TracebackType | None) -> None:
    """An exception that nobody caught becomes a message for the launcher and an exit code. Nothing else may hold up the
    end: the other ranks wait in collectives that this one won't join.
    """
    failure = explained(fault) if isinstance(fault, Exception) else Failure(128 + signal.SIGINT, "interrupted")
    leave_message(environ, str(failure))
    sys.stderr.write(f"error: {failure}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.code)


def _status_file(place: Place, environ: Mapping[str, str]) -> StatusFile | None:
    if not place.first or STATUS_FILE not in environ:
        return None
    status = Status(home=place.attempt.run.home.number, detail="the script prepares its training")
    return StatusFile(Path(environ[STATUS_FILE]), status, lambda now: now)


def _store() -> Store:
    """That by which the ranks of the script have met, by a connection of its own, since a thread uses it too."""
    met: Any = dist.distributed_c10d._get_default_store()  # torch's stubs don't know of `clone`
    store: Store = met.clone()
    return store


def _digest_of(path: str) -> str:
    """So that replicas which run unlike scripts say so when they meet."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return "not a file"
