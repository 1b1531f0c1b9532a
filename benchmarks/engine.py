"""What our engine costs in an inner step, against DeepSpeed without it: `make bench-engine`.

Both sides train the same model from the same seed on the same data, in the same processes, each set up as its users
set it up: DeepSpeed clips by itself and steps on AdamW with two groups, ours goes through the engine and `DiLoCo` in a
view of one replica. They take turns of a few steps, as A B B A A B B A, so that whatever slows the machine down slows
both. A pair is a turn of each; what is told is the median over all pairs, with a 95 % interval by bootstrap. The losses
of both sides must be equal to the last bit, but for clipping: DeepSpeed rounds a norm for each of the two groups.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

RESAMPLES = 4000
CLOCKS = "cpu counts what rank 0 computes, not what it waits for: for a machine that has other work too."


@dataclass(frozen=True)
class Size:
    """What is trained, on what, and for how long."""

    layers: int
    width: int
    vocabulary: int
    sequence: int
    batch: int
    zero: int
    precision: str
    clip: float
    fused: bool
    """Whether AdamW is torch's fused one, on both sides."""
    ranks: int
    threads: int
    pairs: int
    turn: int
    window: int
    clock: str


class Side(Protocol):
    def step(self, tokens: Any) -> tuple[Any, float]:
        """One inner step; returns the loss, and the seconds of it that belong to a round."""
        ...


# one rank


def work(size: Size) -> None:
    """The measuring on one rank. Rank 0 prints the losses, then the turns of each pair, as JSON lines."""
    import torch
    import torch.distributed as dist

    from crosscloud_trainer import engine

    device = engine.init_distributed()
    sides: dict[str, Side] = {"plain": _plain(size), "ours": _ours(size, device)}
    batches, now = _batches(size, dist.get_rank(), device), _clock(size, device)
    known: dict[str, list[str]] = {name: [] for name in sides}

    def turn(name: str, data: list[torch.Tensor]) -> tuple[float, float]:
        dist.barrier()
        in_rounds, losses = 0.0, []
        started = now()
        for tokens in data:
            loss, seconds = sides[name].step(tokens)
            losses.append(loss.detach())
            in_rounds += seconds
        seconds = now() - started - in_rounds
        known[name] += [float(loss).hex() for loss in losses]
        return seconds, in_rounds

    for pair in range(-2, size.pairs):  # two to warm up
        order = list(sides) if pair % 2 == 0 else list(sides)[::-1]
        data = [next(batches) for _ in range(size.turn)]
        turns = {name: turn(name, data) for name in order}
        if dist.get_rank() == 0 and pair >= 0:
            print(json.dumps(turns), flush=True)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in _model(size).parameters())
        print(json.dumps({"parameters": parameters, "losses": known}), flush=True)
    engine.close()


def _plain(size: Size) -> Side:
    """DeepSpeed as its users call it."""
    import deepspeed

    model = _model(size)
    optimizer, schedule = _optimizer(model, size)
    config = {
        "train_micro_batch_size_per_gpu": size.batch,
        "zero_optimization": {"stage": size.zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": size.precision == "bf16"},
        "gradient_clipping": size.clip,
        "steps_per_print": None,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if size.zero == 0 and size.precision == "bf16":
        _undo_first_step(engine.optimizer, optimizer)

    class Plain:
        def step(self, tokens: Any) -> tuple[Any, float]:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            return loss, 0.0

    return Plain()


def _undo_first_step(wrapper: Any, optimizer: Any) -> None:
    """DeepSpeed's step with zero gradients while the engine is built, which ours leaves out (docs/decisions.md)."""
    for working, exact in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for parameter, copy in zip(working, exact, strict=True):
            copy.data.copy_(parameter.data)
    optimizer.state.clear()


def _ours(size: Size, device: Any) -> Side:
    """Our engine, and DiLoCo as in a job of one replica."""
    from crosscloud_trainer.compress import codec_named
    from crosscloud_trainer.contract import OuterOptimizer
    from crosscloud_trainer.diloco import DiLoCo
    from crosscloud_trainer.engine import EngineSettings, build
    from crosscloud_trainer.group import TorchGroup
    from crosscloud_trainer.link import Authority
    from crosscloud_trainer.membership.solo import SoloExchange

    model = _model(size)
    optimizer, schedule = _optimizer(model, size)
    settings = EngineSettings(size.zero, size.precision, size.batch, clip_norm=size.clip or None)  # type: ignore[arg-type]
    engine = build(model, optimizer, settings, schedule)
    algorithm = DiLoCo(
        engine.layout,
        engine.shard,
        TorchGroup(device),
        TorchGroup(device),
        SoloExchange(0, Authority(0, 0, 0)),
        codec_named("None"),
        inner_steps=size.window,
        settings=OuterOptimizer(),
    )

    now = _clock(size, device)

    class Ours:
        def step(self, tokens: Any) -> tuple[Any, float]:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            started = now()
            if algorithm.on_step(tokens.numel()) is None:
                return loss, 0.0
            engine.refresh()
            return loss, now() - started

    return Ours()


def _model(size: Size) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, size.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=8 * size.width // 3,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=size.sequence,
        )
    )


def _optimizer(model: Any, size: Size) -> tuple[Any, Any]:
    """AdamW with decay on matrices only, and a warm-up."""
    import torch

    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=size.fused)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def _batches(size: Size, rank: int, device: Any) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(0, size.vocabulary, (size.batch, 1), generator=generator)
        strides = torch.randint(1, 4, (size.batch, 1), generator=generator)
        yield ((starts + strides * torch.arange(size.sequence)) % size.vocabulary).to(device)


def _clock(size: Size, device: Any) -> Callable[[], float]:
    import torch

    read = time.process_time if size.clock == "cpu" else time.perf_counter

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return read()

    return now


# what is made of it


@dataclass(frozen=True)
class Result:
    """Times of a step are medians over the turns; intervals are 95 % ones of the medians over the pairs."""

    size: Size
    parameters: int
    plain_ms: float
    ours_ms: float
    overhead: float
    overhead_interval: tuple[float, float]
    microseconds: float
    """Of a step, ours less plain."""
    microseconds_interval: tuple[float, float]
    round_ms: float | None
    """Of one round in a view of one replica; None if none fell into the turns that were measured."""
    losses: int
    losses_equal: bool
    largest_difference: float
    """Of two losses of a step, relative."""

    @property
    def overhead_with_rounds(self) -> float | None:
        return None if self.round_ms is None else self.overhead + self.round_ms / self.size.window / self.plain_ms


def result_of(size: Size, pairs: list[dict[str, list[float]]], last: dict[str, Any]) -> Result:
    plain = [pair["plain"][0] / size.turn for pair in pairs]
    ours = [pair["ours"][0] / size.turn for pair in pairs]
    ratios = [b / a - 1 for a, b in zip(plain, ours, strict=True)]
    extra = [1e6 * (b - a) for a, b in zip(plain, ours, strict=True)]
    rounds = [pair["ours"][1] for pair in pairs if pair["ours"][1]]
    losses = [[float.fromhex(loss) for loss in last["losses"][side]] for side in ("plain", "ours")]
    return Result(
        size=size,
        parameters=last["parameters"],
        plain_ms=1e3 * statistics.median(plain),
        ours_ms=1e3 * statistics.median(ours),
        overhead=statistics.median(ratios),
        overhead_interval=interval(ratios),
        microseconds=statistics.median(extra),
        microseconds_interval=interval(extra),
        round_ms=1e3 * statistics.median(rounds) if rounds else None,
        losses=len(losses[0]),
        losses_equal=losses[0] == losses[1],
        largest_difference=max(abs(b / a - 1) for a, b in zip(*losses, strict=True)),
    )


def interval(values: list[float]) -> tuple[float, float]:
    """In which 95 % of the medians of resampled values lie."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def measure(size: Size, told: Callable[[int], None]) -> Result:
    """Starts the ranks; `told` hears how many pairs are done."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(size.threads),
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size.ranks}"]
    process = subprocess.Popen(
        [*command, __file__, "--rank", json.dumps(asdict(size))], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pairs: list[dict[str, list[float]]] = []
    last: dict[str, Any] = {}
    try:
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            if "losses" in found:
                last = found
            else:
                pairs.append(found)
                told(len(pairs))
        if process.wait() or not last:
            raise click.ClickException(f"the ranks ended with exit code {process.returncode}; what they said is above")
    finally:
        process.kill()
        process.wait()
    return result_of(size, pairs, last)


def show(result: Result, console: Console) -> None:
    size = result.size
    clipping = f"clipping at {size.clip:g}" if size.clip else "no clipping"
    what = [
        f"{size.layers} layers, width {size.width}, {result.parameters:,} parameters",
        f"{size.batch} x {size.sequence} tokens per rank",
        f"ZeRO {size.zero}, {size.precision}, {'fused ' if size.fused else ''}AdamW, {clipping}",
        f"{size.ranks} rank(s) of {size.threads} thread(s)",
        f"{size.clock} time, {size.pairs} pairs of {size.turn} step(s)",
    ]
    equal = "equal to the last bit" if result.losses_equal else f"at most {result.largest_difference:.1e} apart"
    rows = {
        "plain DeepSpeed, a step": f"{result.plain_ms:.2f} ms",
        "ours, a step": f"{result.ours_ms:.2f} ms",
        "ours less plain": f"{result.microseconds:+.0f} us ({_span(result.microseconds_interval, 1, '.0f')})",
        "overhead": f"{result.overhead:+.2%} ({_span(result.overhead_interval, 100, '.2f')})",
    }
    if result.overhead_with_rounds is not None:
        rows[f"with a round in {size.window} steps"] = (
            f"{result.overhead_with_rounds:+.2%} ({result.round_ms:.1f} ms each)"
        )
    rows["losses"] = f"{result.losses} of each, {equal}"
    width = max(map(len, rows))
    console.print("; ".join(what), highlight=False, soft_wrap=True)
    for name, text in rows.items():
        console.print(f"  {name:<{width}}  {text}", highlight=False, soft_wrap=True)


def _span(bounds: tuple[float, float], scale: float, form: str) -> str:
    return f"95 %: {scale * bounds[0]:+{form}} to {scale * bounds[1]:+{form}}"


@click.command(help=__doc__)
@click.option("--layers", default=6, show_default=True)
@click.option("--width", default=256, show_default=True, help="A multiple of 64, or less than 64.")
@click.option("--vocabulary", default=2048, show_default=True)
@click.option("--sequence", default=64, show_default=True, help="Tokens of a sequence.")
@click.option("--batch", default=2, show_default=True, help="Sequences per rank and step.")
@click.option("--zero", type=click.IntRange(0, 3), default=2, show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True)
@click.option(
    "--clip", default=0.0, show_default=True, help="Norm to clip gradients at, as each side does it; 0: none."
)
@click.option("--fused/--no-fused", default=True, show_default=True, help="AdamW in one pass, on both sides.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each rank.")
@click.option("--pairs", type=click.IntRange(10), default=200, show_default=True)
@click.option("--turn", type=click.IntRange(1), default=1, show_default=True, help="Steps of one side in a row.")
@click.option("--window", type=click.IntRange(1), default=50, show_default=True, help="Steps between two rounds.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True, help=CLOCKS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("--rank", hidden=True)
def main(as_json: bool, rank: str | None, **options: Any) -> None:
    if rank is not None:
        work(Size(**json.loads(rank)))
        return
    size = Size(**options)
    if size.width > 64 and size.width % 64:
        raise click.BadParameter(f"found {size.width}; must be a multiple of 64, or less", param_hint="--width")
    told = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} pairs"))
    with Progress(*columns, TimeRemainingColumn(), console=told, disable=as_json, transient=True) as bar:
        task = bar.add_task("plain DeepSpeed and ours, in turns", total=size.pairs)
        result = measure(size, lambda done: bar.update(task, completed=done))
    if as_json:
        click.echo(json.dumps({**asdict(result), "overhead_with_rounds": result.overhead_with_rounds}))
    else:
        show(result, Console())
    if not result.losses_equal and not size.clip:
        raise click.ClickException("the losses differ")


if __name__ == "__main__":
    main()
