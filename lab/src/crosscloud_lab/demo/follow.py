"""Follows a job live: its status on the hub, and the bytes at the WAN's network interfaces."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crosscloud_lab.demo.trainers import Progress, Trainers, of_status
from crosscloud_lab.lab import Lab

LINE_EVERY = 10.0  # seconds between lines where there is no terminal
SILENT_LIMIT = 1200.0  # seconds without any change in the status


class JobEndedBadly(Exception):
    """The job failed, or stood still for too long."""


@dataclass(frozen=True)
class Sample:
    """The job at one moment. `wan_bytes` is what the WAN interfaces between members counted, both ways."""

    seconds: float
    progress: Progress
    wan_bytes: int


@dataclass
class Story:
    """All that the end of the demo tells."""

    job: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def trained(self) -> list[Sample]:
        """The samples that tell of new steps."""
        rows: list[Sample] = []
        for item in self.samples:
            if item.progress.loss is not None and (not rows or item.progress.step > rows[-1].progress.step):
                rows.append(item)
        return rows

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job.get("status") or {})


def follow(lab: Lab, namespace: str, name: str, console: Console) -> Story:
    """Until the job has ended. Raises JobEndedBadly with the operator's own reason."""
    story, trainers = Story(), Trainers(lab, namespace, name)
    begin, first = time.monotonic(), member_bytes(lab)
    line_at, changed_at, last = 0.0, begin, ""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            story.job = read_job(lab, namespace, name)
            now = time.monotonic()
            # The status is seconds old, the trainers are silent before they start and after they end.
            told = [of_status(story.status), trainers.read(story.status)]
            newest = max((item for item in told if item), key=lambda item: item.step)
            story.samples.append(Sample(now - begin, newest, member_bytes(lab) - first))
            reason = running(story.job)["reason"]
            if console.is_terminal:
                live.update(view(story), refresh=True)
            elif now >= line_at:
                console.print(line(story))
                line_at = now + LINE_EVERY
            if reason in ("Succeeded", "Failed", "InvalidSpec"):
                break
            if (seen := json.dumps(story.status)) != last:
                last, changed_at = seen, now
            elif now - changed_at > SILENT_LIMIT:
                raise JobEndedBadly(
                    f"the status of {name} has not changed for {SILENT_LIMIT:.0f} s: {running(story.job)}"
                )
            time.sleep(1)
    if not console.is_terminal:
        console.print(line(story))
    if reason != "Succeeded":
        raise JobEndedBadly(f"{name}: {reason}: {running(story.job).get('message')}")
    return story


def read_job(lab: Lab, namespace: str, name: str) -> dict[str, Any]:
    return dict(json.loads(lab.kubectl("hub", "get", "cctj", name, "-n", namespace, "-o", "json")))


def member_bytes(lab: Lab) -> int:
    """Bytes between the members that the WAN interfaces counted, both directions."""
    return sum(count for (a, b), count in lab.wan_bytes().items() if "hub" not in (a, b))


def running(job: dict[str, Any]) -> dict[str, Any]:
    """The condition `Running`, whose reason tells the job's story in a word."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == "Running"), {"reason": "Waiting", "message": ""})


def situation(story: Story) -> str:
    """What the job is about, in the operator's words; and what takes its time before the first step."""
    condition = running(story.job)
    message = str(condition.get("message") or "")
    if condition["reason"] == "Starting" and "starting" in message:
        return f"{message}: each rank imports torch and DeepSpeed and reads its data, then they find each other"
    if condition["reason"] == "Training" and story.samples[-1].progress.step == 0:
        return f"{message}: the first inner step is under way"
    return message


def line(story: Story) -> str:
    last, told = story.samples[-1], story.status.get("progress") or {}
    text = f"      {last.seconds:5.0f} s  {running(story.job)['reason']:<16}"
    if last.progress.loss is None:
        return f"{text} {situation(story)}"[:200]
    steps = f"step {last.progress.step}/{told.get('totalSteps') or '?'}"
    speed = f"{told.get('tokensPerSecond', 0)} tokens/s"
    return f"{text} {steps:<14} loss {last.progress.loss:.3f}  {speed}  WAN {megabytes(last.wan_bytes)}"


def view(story: Story) -> Group:
    """The job as a small picture in the terminal."""
    last, status = story.samples[-1], story.status
    told = status.get("progress") or {}
    head = Text(f"      {running(story.job)['reason']}: {situation(story)}", style="dim", overflow="ellipsis")
    if last.progress.loss is None:
        return Group(head)
    table = Table(box=None, padding=(0, 2, 0, 6), show_edge=False)
    for title in ("replica", "where", "step", "loss", "round", "activity"):
        table.add_column(title, justify="right" if title in ("step", "loss", "round") else "left")
    for row in status.get("replicaStatuses") or []:
        cells = (row.get("step", 0), row.get("loss", "-"), row.get("round", 0), row.get("activity", ""))
        table.add_row(str(row["index"]), members(status, row["index"]), *map(str, cells))
    step, dense, total = last.progress.step, last.progress.dense_bytes, int(told.get("totalSteps") or 0)
    bar = Table.grid(padding=(0, 2))
    ratio = f"({dense / last.wan_bytes:.0f}x)" if last.wan_bytes and dense else ""
    words = [f"{step}/{total or '?'} steps", f"loss {last.progress.loss:.3f}"]
    if last.progress.validation_loss is not None:
        words.append(f"validation {last.progress.validation_loss:.3f}")
    bar.add_row(ProgressBar(total=max(total, 1), completed=step, width=40), ", ".join(words))
    bar.add_row(
        f"{told.get('tokensPerSecond', 0)} tokens/s",
        f"WAN {megabytes(last.wan_bytes)}; in fp32 at every step: {megabytes(dense)} {ratio}",
    )
    return Group(head, table, Padding(bar, (0, 0, 0, 6)))


def where(status: dict[str, Any], replica: int) -> str:
    """`west: w1 2 GPUs, w2 2 GPUs` of a replica; of one in stages, for each stage in order."""
    places = (f"{stage['member']}: " + ", ".join(map(gpus, stage["nodes"])) for stage in stages(status, replica))
    return " -> ".join(places)


def members(status: dict[str, Any], replica: int) -> str:
    """`west -> east` of a replica in two stages; short enough for a narrow terminal."""
    return " -> ".join(stage["member"] for stage in stages(status, replica))


def stages(status: dict[str, Any], replica: int) -> list[dict[str, Any]]:
    return [stage for stage in status.get("plan") or [] if stage["replica"] == replica]


def gpus(node: dict[str, Any]) -> str:
    return f"{node['name']} {node['gpus']} GPU{'s' if node['gpus'] != 1 else ''}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
