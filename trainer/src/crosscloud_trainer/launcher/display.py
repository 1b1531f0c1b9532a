"""What a person or a program sees of a local run: a live display, plain lines without a terminal, or JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crosscloud_trainer.contract import Activity, dump
from crosscloud_trainer.contract.report import perplexity
from crosscloud_trainer.journal import LOSS_STEPS
from crosscloud_trainer.launcher.state import Losses, RunState, Summary
from crosscloud_trainer.sizes import bytes_text

_BLOCKS = "▁▂▃▄▅▆▇█"
_LINE_SECONDS = 5.0
_FRAMES_PER_SECOND = 8
_COLOURS = {"compute": "green", "exchange": "blue", "waiting": "yellow", "bubble": "magenta"}


class Display(Protocol):
    """Told what happens, in this order: attempt, progress (often), stopping where it is interrupted, then failure or
    finish.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def attempt(self, state: RunState) -> None: ...
    def progress(self, state: RunState) -> None: ...
    def stopping(self, message: str) -> None: ...
    def failure(self, state: RunState, message: str, *, last: bool) -> None: ...
    def finish(self, summary: Summary) -> None: ...


def chosen_display(as_json: bool) -> Display:
    """JSON if asked for, the live one on a terminal, plain lines otherwise."""
    if as_json:
        return JsonLines()
    console = Console(highlight=False)
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainLines()


class JsonLines:
    """One event a line on stdout, for programs."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def attempt(self, state: RunState) -> None:
        self._seen.clear()
        self._emit("attempt", name=state.manifest.name, attempt=state.attempt, logs=str(state.logs.resolve()))

    def progress(self, state: RunState) -> None:
        for replica, report in state.reports.items():
            if self._seen.get(replica) != report.rank:
                self._seen[replica] = report.rank
                self._emit("report", **dump(report))

    def stopping(self, message: str) -> None:
        self._emit("stopping", message=message)

    def failure(self, state: RunState, message: str, *, last: bool) -> None:
        self._emit("failure", attempt=state.attempt, message=message, last=last)

    def finish(self, summary: Summary) -> None:
        self._emit("finish", **asdict(summary), ratio=summary.ratio)

    def _emit(self, event: str, **fields: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


class PlainLines:
    """A line now and then, for logs and pipes."""

    def __init__(self) -> None:
        self._last_time = 0.0
        self._last_line = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def attempt(self, state: RunState) -> None:
        self._write(
            f"{state.manifest.name}: attempt {state.attempt}, {len(state.replicas)} replica(s); logs in {state.logs}"
        )

    def progress(self, state: RunState) -> None:
        if time.monotonic() - self._last_time < _LINE_SECONDS:
            return
        self._last_time = time.monotonic()
        line = status_line(state)
        if line != self._last_line:
            self._last_line = line
            self._write(line)

    def stopping(self, message: str) -> None:
        self._write(message)

    def failure(self, state: RunState, message: str, *, last: bool) -> None:
        self._write(
            f"error: attempt {state.attempt} ended: {message}" + ("" if last else "\nstarting the next attempt")
        )

    def finish(self, summary: Summary) -> None:
        for line in summary_lines(summary):
            self._write(line)

    def _write(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class LiveDisplay:
    """A bar for each replica, the loss curve, and what crossed the WAN beside what dense fp32 would have cost."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def attempt(self, state: RunState) -> None:
        self.progress(state)

    def progress(self, state: RunState) -> None:
        self._live.update(render(state, self._console.width))

    def stopping(self, message: str) -> None:
        self._console.print(Text(message, style="yellow"), soft_wrap=True)

    def failure(self, state: RunState, message: str, *, last: bool) -> None:
        if last:
            self._live.stop()  # what is printed now stands below the last picture
        self._console.print(Text(f"error: attempt {state.attempt} ended: {message}", style="red"), soft_wrap=True)
        if not last:
            self._console.print("starting the next attempt")

    def finish(self, summary: Summary) -> None:
        self._live.stop()
        for line in summary_lines(summary):
            self._console.print(Text(line), soft_wrap=True)  # a command of two lines can't be pasted


def render(state: RunState, width: int) -> Panel:
    """The live display as a value."""
    table = Table.grid(padding=(0, 1))
    for replica in state.replicas:
        table.add_row(*_replica_row(state, replica, width))
    parts: list[Any] = [table, Text()]
    if len(state.curve) > 1:
        line = sparkline([loss for _, loss in state.curve], max(10, min(60, width - 54)))
        parts.append(Text.assemble(("loss   ", "bold"), (line, "cyan"), f"  {loss_words(state.losses())}"))
    shares = state.shares()
    if shares is not None:
        parts.append(_shares_line(shares, max(10, min(40, width - 64))))
    parts.append(Text.assemble(("WAN    ", "bold"), wan_words(state)))
    agreement = agreement_words(state)
    if agreement:
        parts.append(Text.assemble(("state  ", "bold"), (agreement, "red" if "DIFFERENT" in agreement else "green")))
    title = f"[bold]{state.manifest.name}[/bold], attempt {state.attempt}"
    left = state.seconds_left()
    clock = duration(state.seconds) + (f", about {duration(left)} left" if left else "")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=clock, subtitle_align="right", width=width)


def _replica_row(state: RunState, replica: int, width: int) -> list[Any]:
    progress = state.progress(replica)
    done, total = (progress.step, progress.total_steps) if progress else (0, 0)
    ranks = state.manifest.spec.gpus_of(replica)
    room = max(10, min(40, width - 86))
    bar = ProgressBar(total=total or None, completed=done, width=room, pulse=not total and bool(done))
    waiting = state.activity(replica) is Activity.WAITING
    return [
        f"replica {replica}",
        f"{ranks} rank{'s' if ranks > 1 else ''}",
        bar if total or done else Text("·" * room, style="dim"),
        f"{done}/{total or '?'}",
        f"loss {progress.loss:.3f}" if progress and progress.loss is not None else "",
        f"{progress.tokens_per_second:,.0f} tokens/s" if progress and progress.tokens_per_second else "",
        Text(activity_words(state, replica), style="yellow" if waiting else "dim"),
    ]


def _shares_line(shares: Mapping[str, float], width: int) -> Text:
    """Where the time goes, as one bar of three colours."""
    line = Text.assemble(("time   ", "bold"))
    for name, share in shares.items():
        line.append("█" * round(share * width), style=_COLOURS[name])
    words = [(f"  {name} {share:.0%}", _COLOURS[name]) for name, share in shares.items()]
    return line.append_text(Text.assemble(*words))


def status_line(state: RunState) -> str:
    """The run in one line."""
    parts = []
    for replica in state.replicas:
        progress = state.progress(replica)
        if progress and progress.loss is not None:
            doing = "" if state.activity(replica) is Activity.TRAINING else f", {activity_words(state, replica)}"
            steps = f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
            parts.append(f"replica {replica}: {steps}, loss {progress.loss:.3f}{doing}")
        else:
            parts.append(f"replica {replica}: {activity_words(state, replica)}")
    losses = state.losses()
    if losses.last is None:
        return "; ".join(parts)
    if losses.validation is not None:
        parts.append(f"validation {losses.validation:.3f}")
    parts += [f"{state.tokens_per_second():,.0f} tokens/s", f"WAN {wan_words(state)}"]
    agreement = agreement_words(state)
    return "; ".join([*parts, agreement] if agreement else parts)


def summary_lines(summary: Summary) -> list[str]:
    """What a newcomer wants to know at the end, and what to try next."""
    alone = summary.attempts == 1
    took = f"{'' if alone else f'attempt {summary.attempts} took '}{duration(summary.seconds)}"
    lines = [f"{summary.name}: {summary.steps} steps, {summary.tokens:,} tokens, {took}"]
    if summary.first_loss is not None and summary.last_loss is not None:
        means = f"{'the' if alone else 'its'} first step's → mean of the last {LOSS_STEPS}"
        lines.append(f"loss        {summary.first_loss:.3f} → {summary.last_loss:.3f} ({means}, in training)")
    if summary.validation_loss is not None:
        lines.append(
            f"validation  {summary.validation_loss:.3f}, perplexity {perplexity(summary.validation_loss):,.4g} "
            "(the result's, on text that it was not trained on)"
        )
    if summary.best_step is not None and summary.best_validation_loss is not None:
        lines.append(f"best        {summary.best_validation_loss:.3f} after step {summary.best_step}")
    if summary.ratio is not None:
        sent, dense = bytes_text(summary.wan_bytes), bytes_text(summary.dense_bytes)
        who = "" if alone else " by this attempt"
        lines.append(
            f"WAN         {sent} sent{who}; dense fp32 at every step: {dense}, {summary.ratio:,.0f} times as much"
        )
    if summary.digests_equal is not None:
        word = "equal in all replicas" if summary.digests_equal else "DIFFERENT"
        lines.append(f"digests     {word} after {summary.rounds} rounds")
    if summary.report is not None:
        lines.append(f"report      {shown_path(summary.report)} (plots; open it in a browser)")
    if summary.result is not None:
        lines.append(f"result      {shown_path(summary.result)}")
    if summary.result is not None and summary.checkpoint is not None:
        lines.append(f"checkpoint  {shown_path(summary.checkpoint)}")
        if summary.best_checkpoint not in (None, summary.checkpoint):
            lines.append(f"best one    {shown_path(str(summary.best_checkpoint))} (the lowest validation loss)")
        if Path(summary.result.removeprefix("file://")).is_absolute():
            lines.append(f"try         {program()} generate {shown_path(summary.result)} --prompt 'def ' --tokens 200")
    return lines


def program() -> str:
    """This command as it was called, so that what is printed can be pasted."""
    called = sys.argv[0]
    return called if Path(called).name == "crosscloud-trainer" else "crosscloud-trainer"


def activity_words(state: RunState, replica: int) -> str:
    activity, progress = state.activity(replica), state.progress(replica)
    if activity is Activity.WAITING and progress is not None and progress.awaited:
        return f"waiting for {progress.awaited}"
    detail = state.detail(replica)
    return f"{activity.value.lower()}: {detail}" if detail else activity.value.lower()


def loss_words(losses: Losses) -> str:
    """As the summary has it at the end."""
    words = [f"{losses.first:.3f} → {losses.last:.3f}"] if losses.first is not None and losses.last is not None else []
    if losses.validation is not None:
        words.append(f"validation {losses.validation:.3f}")
    return ", ".join(words)


def wan_words(state: RunState) -> str:
    wan, dense = state.wan()
    if not wan:
        return "nothing yet" if len(state.replicas) > 1 else "nothing crosses: there is one replica"
    return f"{bytes_text(wan)} sent; dense fp32: {bytes_text(dense)} ({dense / wan:,.0f}x)"


def agreement_words(state: RunState) -> str:
    agreement = state.agreement()
    if agreement is None:
        return ""
    number, equal = agreement
    return f"digests {'equal' if equal else 'DIFFERENT'} (round {number})"


def duration(seconds: float) -> str:
    """1:05 or 2:03:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float], width: int) -> str:
    """At most `width` characters, each the mean of a run of values, scaled between their least and greatest."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((mean - low) / span * 8))] for mean in means)


def shown_path(uri: str) -> str:
    """A local path relative to the current folder where that is shorter."""
    path = Path(uri.removeprefix("file://"))
    if not path.is_absolute():
        return uri
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
