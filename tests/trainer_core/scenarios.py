"""What a replica of real ranks does in a test: each is called on every rank, what it returns on rank 0 goes
to the test.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from trainer_core.local_exchange import StoreExchange, StoreLeaders, StoreNeighbours
from trainer_core.tiny_llama import STEPS, batches, loss_of, model, optimizer_and_schedule

from crosscloud_trainer.agreement import agree
from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.compress import codec_named
from crosscloud_trainer.contract import OuterOptimizer
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.engine import (
    Engine,
    EngineError,
    EngineSettings,
    TooManySkippedStepsError,
    Whole,
    build,
    parameter_names,
)
from crosscloud_trainer.group import TorchGroup
from crosscloud_trainer.layout import HolderMap, Index
from crosscloud_trainer.models.stages import Stage
from crosscloud_trainer.pipeline import Pipeline, Position, StageNorm, StageTotals
from crosscloud_trainer.shard import digest


def engine_of(stage: int, precision: Any = "fp32", frozen: bool = False, **settings: Any) -> Engine:
    llama = model(frozen)
    optimizer, schedule = optimizer_and_schedule(llama)
    return build(llama, optimizer, EngineSettings(stage, precision, 2, **settings), schedule)  # type: ignore[arg-type]


def store_of(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))


def alone(
    device: torch.device,
    stage: int,
    precision: str,
    clip_norm: float | None = None,
    accumulated: int = 1,
    frozen: bool = False,
) -> Any:
    """One replica that trains by itself, with windows of 7 steps."""
    engine = engine_of(stage, precision, frozen, clip_norm=clip_norm, accumulation_steps=accumulated)
    holders = {0: engine.layout.holders}
    exchange = StoreExchange(dist.HashStore(), engine.index, holders, 0, engine.rank, codec_named("None"))
    algorithm = DiLoCo(
        engine.layout,
        engine.shard,
        TorchGroup(device),
        TorchGroup(device),
        exchange,
        codec_named("None"),
        inner_steps=7,
        settings=OuterOptimizer(),
    )
    losses, digests = [], []
    for tokens in batches(engine.rank, STEPS):
        loss = engine(input_ids=tokens, labels=tokens).loss
        losses.append(loss_of(loss))
        engine.backward(loss)
        if engine.step() is None:
            continue
        report = algorithm.on_step(tokens.numel())
        if report is not None:
            engine.refresh()
            digests.append(report.digest)
    return {"losses": losses, "digests": digests}


def replica_of_a_job(
    device: torch.device, port: int, replica: int, stage: int, precision: str, codec: str, rounds: int
) -> Any:
    """One of two replicas that exchange by a store; the other one has other ranks and another ZeRO stage.

    One rank of one replica has a gradient that isn't finite in the very step that ends the second window.
    """
    spoilt_step = (4, 1, 1)
    store = dist.PrefixStore(codec, store_of(port))
    engine = engine_of(stage, precision)
    if engine.rank == 0:
        store.set(f"holders/{replica}", repr(engine.layout.holders.runs()))
    holders = {
        number: HolderMap.from_runs(engine.index.cells, _runs(store.get(f"holders/{number}"))) for number in (0, 1)
    }
    exchange = StoreExchange(store, engine.index, holders, replica, engine.rank, codec_named(codec))
    algorithm = DiLoCo(
        engine.layout,
        engine.shard,
        TorchGroup(device),
        TorchGroup(device),
        exchange,
        codec_named(codec),
        inner_steps=2,
        settings=OuterOptimizer(),
    )
    result: dict[str, list[Any]] = {"digests": [], "weights": [], "losses": [], "applied": []}
    for number, tokens in enumerate(batches(100 * replica + engine.rank, 2 * rounds), start=1):
        loss = engine(input_ids=tokens, labels=tokens).loss
        spoilt = (number, replica, engine.rank) == spoilt_step
        engine.backward(loss * float("nan") if spoilt else loss)
        step = engine.step()
        assert step is not None
        result["applied"].append(step.applied)
        report = algorithm.on_step(tokens.numel())
        if report is not None:
            engine.refresh()
            probe = next(iter(batches(7, 1)))
            with torch.no_grad():
                result["losses"].append(loss_of(engine(input_ids=probe, labels=probe).loss))
            result["digests"].append(report.digest)
            result["weights"].append({str(number): weight for number, weight in report.weights.items()})
    return result


def allreduce_replica(
    device: torch.device,
    port: int,
    name: str,
    replica: int,
    ranks: list[int],
    stage: int,
    steps: int,
    clip_norm: float,
    codec: str = "None",
    bad_step: int = 0,
    bad_replica: int = 0,
    bad_value: float = 0.0,
    drift_step: int = 0,
    resync_rounds: int = 500,
) -> Any:
    """One of the replicas of a job, with so many `ranks` each, that exchange every gradient by a store.

    In `bad_step` the gradient of the last rank of `bad_replica` is multiplied with `bad_value`. After `drift_step` the
    last replica's weights and optimizer state are off in their last bits.
    """
    store = dist.PrefixStore(name, store_of(port))
    engine = engine_of(stage, clip_norm=clip_norm)
    if engine.rank == 0:
        store.set(f"holders/{replica}", repr(engine.layout.holders.runs()))
    holders = {
        number: HolderMap.from_runs(engine.index.cells, _runs(store.get(f"holders/{number}")))
        for number in range(len(ranks))
    }
    exchange = StoreExchange(store, engine.index, holders, replica, engine.rank, codec_named(codec))
    algorithm = AllReduce(
        engine.layout,
        engine.shard,
        TorchGroup(device),
        TorchGroup(device),
        exchange,
        codec_named(codec),
        tokens=64 * ranks[replica],
        state=engine,
        resync_rounds=resync_rounds,
    )
    engine.exchange = algorithm
    told = ("losses", "digests", "applied", "rates", "finite", "states", "kept")
    result: dict[str, list[Any]] = {name: [] for name in told}
    worst = (bad_replica, ranks[bad_replica] - 1)
    for number, tokens in enumerate(batches(sum(ranks[:replica]) + engine.rank, steps), start=1):
        loss = engine(input_ids=tokens, labels=tokens).loss
        result["losses"].append(loss_of(loss))
        spoilt = number == bad_step and (replica, engine.rank) == worst
        engine.backward(loss * bad_value if spoilt else loss)
        step = engine.step()
        assert step is not None
        report = algorithm.on_step(0)
        assert report is not None
        result["applied"].append((step.applied, report.applied))
        result["rates"].append(step.learning_rate)
        if bad_step:
            result["finite"].append(_all_finite(device, algorithm.residual, *engine.state()))
        result["digests"].append(report.digest)
        if not drift_step:
            continue
        if number == drift_step and replica == len(ranks) - 1:
            engine.set_state([vector.nextafter(vector + 1) for vector in engine.state()])
        own = digest(engine.index, engine.shard.intervals, engine.state())
        result["states"].append(agree(TorchGroup(device), [], own)[1])
        result["kept"].append(_kept(engine))
    losses: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(losses, result["losses"])
    return {**result, "losses": losses}


def _all_finite(device: torch.device, *values: torch.Tensor) -> bool:
    """On all ranks of the replica."""
    return TorchGroup(device).total([int(not all(torch.isfinite(part).all() for part in values))]) == [0]


def _kept(engine: Any) -> list[str]:
    """All that each rank works on, weights and what its optimizer keeps of them, as one number of each rank."""
    places = [values for _, values in engine.optimizer_places()]
    states = [value for _, state in engine._optimizer.states() for value in state.values() if value.dim()]
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, float(sum(value.double().sum() for value in [*places, *states])).hex())
    return told


def pipeline_stage(
    device: torch.device,
    port: int,
    name: str,
    stage: int,
    stages: int,
    zero: int,
    steps: int,
    precision: Any = "fp32",
    bad_step: int = 0,
) -> Any:
    """One stage of a replica; of an uncut model, if there is only one. The first stage's last rank has a gradient that
    isn't finite in `bad_step`.
    """
    llama = model(layers=4, tied=False)
    names = parameter_names(llama)
    index = Index.of({names[id(p)]: p.numel() for p in llama.parameters()})
    store = dist.PrefixStore(name, store_of(port))
    rank = dist.get_rank()
    cut: torch.nn.Module = llama
    if stages > 1:
        cut = Stage(llama, stage, stages)
        names = {id(p): names[id(p)] for p in cut.parameters()}
    optimizer, schedule = optimizer_and_schedule(cut)
    micro_batches = 4
    settings = EngineSettings(zero, precision, 2, None if stages > 1 else micro_batches, clip_norm=0.5)  # type: ignore[arg-type]
    engine = build(cut, optimizer, settings, schedule, Whole(index, names) if stages > 1 else None)
    seen: dict[str, Any] = {"losses": [], "norms": [], "applied": []}
    data = list(batches(rank, steps * micro_batches))
    pipeline = Pipeline(engine, Position(stage, stages), StoreNeighbours(store, stage, rank), device)
    if stages > 1:
        group = TorchGroup(device)
        engine.exchange = StageNorm(StageTotals(group, StoreLeaders(store, stage, stages) if rank == 0 else None))
    for number in range(steps):
        share = data[number * micro_batches : (number + 1) * micro_batches]
        if number + 1 == bad_step and stage == 0 and rank == dist.get_world_size() - 1:
            handle = next(iter(cut.parameters())).register_hook(lambda gradient: gradient * float("inf"))
        if stages > 1:
            loss, report = pipeline.step([({"input_ids": tokens, "labels": tokens}, 1.0) for tokens in share])
        else:
            losses = []
            for tokens in share:
                result = engine(input_ids=tokens, labels=tokens).loss
                losses.append(float(result.detach()))
                engine.backward(result)
                step = engine.step()
            loss, report = sum(losses) / len(losses), step
        if number + 1 == bad_step and stage == 0 and rank == dist.get_world_size() - 1:
            handle.remove()
        assert report is not None
        seen["losses"].append(loss)
        seen["norms"].append(report.gradient_norm)
        seen["applied"].append(report.applied)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen["losses"])
    return {**seen, "losses": everyone}


def _runs(text: bytes) -> list[tuple[int, int, int]]:
    numbers = [int(part) for part in text.decode().replace("(", "").replace(")", "").strip("[]").split(",")]
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]


def skipped_steps(device: torch.device, stage: int, precision: str, bad_rank: int, bad_value: float) -> Any:
    """Gradients of one rank are spoilt in steps 3 and 4, and from step 6 on until the engine gives up."""
    engine = engine_of(stage, precision, max_skipped_steps=3)
    seen: dict[str, Any] = {"applied": [], "skipped": [], "finite": [], "error": ""}
    for number, tokens in enumerate(batches(engine.rank, STEPS), start=1):
        loss = engine(input_ids=tokens, labels=tokens).loss
        spoilt = engine.rank == bad_rank and (number in (3, 4) or number >= 6)
        engine.backward(loss * bad_value if spoilt else loss)
        try:
            step = engine.step()
        except TooManySkippedStepsError as error:
            seen["error"] = str(error)
            break
        assert step is not None
        seen["applied"].append(step.applied)
        seen["skipped"].append(step.skipped)
        seen["finite"].append(bool(torch.isfinite(engine.shard.read()).all()))
    return seen


def refreshed(device: torch.device, stage: int, precision: str) -> Any:
    """Largest difference between the weights that were written into the shards and the working weights of
    this rank.
    """
    engine = engine_of(stage, precision)
    tokens = next(iter(batches(engine.rank, 1)))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    firsts = engine.index.first_elements
    written = [firsts[i.parameter] + torch.arange(i.start, i.stop) for i in engine.shard.intervals]
    engine.shard.write((torch.cat(written) % 256).float())
    engine.refresh()
    worst = 0.0
    names = parameter_names(engine.module)
    for parameter in engine.module.parameters():
        values = _gathered(parameter).float().flatten()
        first = firsts[engine.index.numbers[names[id(parameter)]]]
        expected = ((first + torch.arange(values.numel())) % 256).float()
        worst = max(worst, float((values - expected).abs().max()))
    return worst


def _gathered(parameter: torch.nn.Parameter) -> torch.Tensor:
    import deepspeed

    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def refused_optimizers(device: torch.device) -> Any:
    """The message for each optimizer that an engine can't be built with."""
    messages = []
    llama = model()
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    frozen = torch.optim.SGD([next(llama.parameters()).requires_grad_(False)], lr=1)
    other = model()
    stepped = torch.optim.SGD(other.parameters(), lr=1, momentum=0.9)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    for owner, optimizer in ((llama, foreign), (llama, frozen), (other, stepped)):
        try:
            build(owner, optimizer, EngineSettings(1, "fp32", 1))
        except EngineError as error:
            messages.append(str(error))
    return messages
