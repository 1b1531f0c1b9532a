"""`crosscloud status JOB`: where its replicas are, how far they got, and why it isn't further."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from crosscloud_operator.cli.common import Failed, Hub, checked_name, console, hub_options, run
from crosscloud_operator.domain.record import condition_in
from crosscloud_operator.kube.api import JOB, Obj, Ref


@click.command()
@click.argument("job")
@click.option(
    "-n", "--namespace", default="default", show_default=True, callback=checked_name, help="The job's namespace."
)
@hub_options
def status(job: str, namespace: str, hub: Hub) -> None:
    """Show where JOB runs, how far each replica is, and what it waits for."""
    cluster = hub.cluster()
    found = run(cluster.get(Ref(JOB, job, namespace)), cluster)
    if found is None:
        raise Failed(f"JOB: there is no job {job!r} in namespace {namespace!r}; `-n` names another namespace")
    show(found, console())


def show(job: Obj, out: Console) -> None:
    """Print a job's status for a person."""
    found = job.get("status") or {}
    meta = job["metadata"]
    running = condition_in(found, "Running")
    out.print(
        f"[bold]{meta['namespace']}/{meta['name']}[/bold]: {running['reason'] if running else 'not looked at yet'}"
    )
    if running and running.get("message"):
        out.print(f"  {running['message']}", markup=False)
    _show_progress(found.get("progress") or {}, out)
    attempt = found.get("attempt") or {}
    if attempt:
        out.print(f"  attempt {attempt.get('number')}, restarts {found.get('restarts', 0)}")
    if cause := attempt.get("cause"):
        out.print(f"  last end: {cause.get('reason')}: {cause.get('message')}", markup=False)
    for item in found.get("members") or ():
        if item.get("unreachableSince"):
            out.print(f"  {item['name']} can't be reached since {item['unreachableSince']}")
    _show_replicas(found, out)
    for item in found.get("refused") or ():
        out.print(f"  {item['member']}: {item['reason']}", markup=False)
    if result := (found.get("result") or {}).get("uri"):
        out.print(f"  result: {result}; `crosscloud fetch {meta['name']} DIR -n {meta['namespace']}` brings it")


def _show_progress(progress: Mapping[str, Any], out: Console) -> None:
    if not progress:
        return
    parts = [f"step {progress.get('step')} of {progress.get('totalSteps')}", f"round {progress.get('round')}"]
    for key, text in (
        ("loss", "loss {}"),
        ("validationLoss", "validation loss {}"),
        ("tokensPerSecond", "{} tokens/s"),
    ):
        if progress.get(key) is not None:
            parts.append(text.format(progress[key]))
    if progress.get("wanPerStep"):
        parts.append(f"WAN {progress['wanPerStep']} per step")
    out.print("  " + ", ".join(parts))


def _show_replicas(found: Mapping[str, Any], out: Console) -> None:
    plan = found.get("plan") or []
    if not plan:
        return
    told = {item["index"]: item for item in found.get("replicaStatuses") or ()}
    table = Table(
        "REPLICA", "STAGE", "MEMBER", "POOL", "NODES", "ACTIVITY", "STEP", "ROUND", "LOSS", "WAITS FOR", box=None
    )
    for stage in plan:
        own = told.get(stage["replica"], {})
        nodes = ", ".join(f"{node['name']} ({node['gpus']})" for node in stage.get("nodes") or ())
        waits = ", ".join(str(number) for number in own.get("waitingFor") or ())
        table.add_row(
            f"{stage['replica']}",
            f"{stage.get('stage', 0)}",
            stage["member"],
            stage.get("pool", "-"),
            nodes,
            own.get("activity", "-"),
            *(str(own.get(key, "-")) for key in ("step", "round", "loss")),
            f"{waits} since {own['waitingSince']}" if waits and own.get("waitingSince") else waits or "-",
        )
    out.print(table)
