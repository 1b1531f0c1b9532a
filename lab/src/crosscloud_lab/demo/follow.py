"""Follows a job live: its status on the hub, and the bytes at the WAN's network interfaces."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crosscloud_lab.demo.steps import run
from crosscloud_lab.lab import Lab

LINE_EVERY = 10.0  # seconds between lines where there is no terminal
SILENT_LIMIT = 1200.0  # seconds without any change in the status


class JobEndedBadly(Exception):
    """The job failed, or stood still for too long."""


@dataclass(frozen=True)
class Sample:
    """The job at one moment. `wan_bytes` is what the WAN interfaces between members counted, both ways."""

    seconds: float
    step: int
    tokens: int
    loss: float | None
    wan_bytes: int
    dense_bytes: int


@dataclass
class Story:
    """All that the end of the demo tells."""

    job: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def reported(self) -> list[Sample]:
        """The samples at which the status told of new steps."""
        rows: list[Sample] = []
        for item in self.samples:
            if item.loss is not None and (not rows or item.step > rows[-1].step):
                rows.append(item)
        return rows

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job.get("status") or {})


def follow(lab: Lab, namespace: str, name: str, console: Console) -> Story:
    """Until the job has ended. Raises JobEndedBadly with the operator's own reason."""
    story = Story()
    begin, first = time.monotonic(), member_bytes(lab)
    line_at, changed_at, last = 0.0, begin, ""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            story.job = read_job(lab, namespace, name)
            now = time.monotonic()
            progress = story.status.get("progress") or {}
            story.samples.append(sample(now - begin, progress, member_bytes(lab) - first))
            condition = running(story.job)
            if console.is_terminal:
                live.update(view(story), refresh=True)
            elif now >= line_at:
                console.print(line(story))
                line_at = now + LINE_EVERY
            if condition.get("reason") in ("Succeeded", "Failed", "InvalidSpec"):
                break
            if (seen := json.dumps(story.status)) != last:
                last, changed_at = seen, now
            elif now - changed_at > SILENT_LIMIT:
                raise JobEndedBadly(f"the status of {name} has not changed for {SILENT_LIMIT:.0f} s: {condition}")
            time.sleep(1)
    console.print(line(story))
    if condition["reason"] != "Succeeded":
        raise JobEndedBadly(f"{name}: {condition['reason']}: {condition.get('message')}")
    return story


def read_job(lab: Lab, namespace: str, name: str) -> dict[str, Any]:
    kubectl = (lab.binary("kubectl"), "--kubeconfig", lab.kubeconfig("hub"))
    return dict(json.loads(run(*kubectl, "get", "cctj", name, "-n", namespace, "-o", "json")))


def member_bytes(lab: Lab) -> int:
    """Bytes between the members that the WAN interfaces counted, both directions."""
    return sum(count for (a, b), count in lab.wan_bytes().items() if "hub" not in (a, b))


def sample(seconds: float, progress: dict[str, Any], wan: int) -> Sample:
    loss = progress.get("loss")
    dense = int(progress.get("denseBytes") or 0)
    step, tokens = int(progress.get("step") or 0), int(progress.get("tokens") or 0)
    return Sample(seconds, step, tokens, float(loss) if loss else None, wan, dense)


def running(job: dict[str, Any]) -> dict[str, Any]:
    """The condition `Running`, whose reason tells the job's story in a word."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == "Running"), {"reason": "Waiting", "message": ""})


def line(story: Story) -> str:
    last, progress = story.samples[-1], story.status.get("progress") or {}
    condition = running(story.job)
    text = f"      {last.seconds:5.0f} s  {condition['reason']:<16}"
    if not progress:
        return f"{text} {condition.get('message', '')}"[:200]
    steps = f"step {last.step}/{progress.get('totalSteps', '?')}"
    loss = f"loss {last.loss:.3f}" if last.loss is not None else "loss -"
    return f"{text} {steps:<14} {loss}  {progress.get('tokensPerSecond', 0)} tokens/s  WAN {megabytes(last.wan_bytes)}"


def view(story: Story) -> Group:
    """The job as a small picture in the terminal."""
    last, status = story.samples[-1], story.status
    progress = status.get("progress") or {}
    total = int(progress.get("totalSteps") or 0)
    condition = running(story.job)
    head = Text(f"      {condition['reason']}: {condition.get('message', '')}", style="dim", overflow="ellipsis")
    table = Table(box=None, padding=(0, 2, 0, 6), show_edge=False)
    for title in ("replica", "where", "step", "loss", "round", "activity"):
        table.add_column(title, justify="right" if title in ("step", "loss", "round") else "left")
    for row in status.get("replicaStatuses") or []:
        cells = (row.get("step", 0), row.get("loss", "-"), row.get("round", 0), row.get("activity", ""))
        table.add_row(str(row["index"]), where(status, row["index"]), *map(str, cells))
    bar = Table.grid(padding=(0, 2, 0, 6))
    ratio = f"({last.dense_bytes / last.wan_bytes:.0f}x)" if last.wan_bytes and last.dense_bytes else ""
    bar.add_row(ProgressBar(total=max(total, 1), completed=last.step, width=40), f"{last.step}/{total or '?'} steps")
    bar.add_row(
        f"{progress.get('tokensPerSecond', 0)} tokens/s",
        f"WAN {megabytes(last.wan_bytes)}; fp32 all-reduce at every step: {megabytes(last.dense_bytes)} {ratio}",
    )
    return Group(head, table, bar)


def where(status: dict[str, Any], replica: int) -> str:
    """`west: w1 2 GPUs, w2 2 GPUs` of a replica."""
    stages = [stage for stage in status.get("plan") or [] if stage["replica"] == replica]
    return "; ".join(
        f"{stage['member']}: " + ", ".join(f"{node['name']} {node['gpus']} GPUs" for node in stage["nodes"])
        for stage in stages
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
