"""`crosscloud status [JOB]`: the jobs, or where one's replicas are, how far they got, and why it isn't further."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from crosscloud_operator.cli.common import (
    Failed,
    Hub,
    checked_job,
    console,
    duration,
    existing_job,
    existing_jobs,
    hub_options,
    namespace_option,
    run,
    table,
)
from crosscloud_operator.domain.record import condition_in, parsed
from crosscloud_operator.kube.api import Obj

DIGEST_LETTERS = 16


@click.command()
@click.argument("job", required=False, callback=checked_job)
@namespace_option
@click.option("-A", "--all-namespaces", is_flag=True, help="Without JOB: the jobs of all namespaces.")
@hub_options
def status(job: str | None, namespace: str, all_namespaces: bool, hub: Hub) -> None:
    """Show where JOB runs, how far each replica is, and what it waits for; without JOB, a line for each job."""
    if job is not None and all_namespaces:
        raise click.UsageError("JOB and --all-namespaces: give one of the two; `-n` names the job's namespace")
    cluster = hub.cluster()
    if job is not None:
        show(run(existing_job(cluster, namespace, job), cluster), console())
        return
    found = run(existing_jobs(cluster, None if all_namespaces else namespace), cluster)
    if not found and not all_namespaces:
        raise Failed(f"there is no job in namespace {namespace!r}; `-n` names another one, `-A` shows those of all")
    show_all(found, console(), with_namespace=all_namespaces)


def show_all(jobs: Sequence[Obj], out: Console, *, with_namespace: bool) -> None:
    """Print a line for each job, as `kubectl get` does."""
    if not jobs:
        out.print("there is no job yet: `kubectl apply -f JOB.yaml` makes one")
        return
    head = ("NAMESPACE",) if with_namespace else ()
    found = table(*head, "NAME", "STATUS", "STEP", "LOSS", "TOKENS/S", "WAN/STEP", "RESTARTS", "AGE")
    for job in sorted(jobs, key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"])):
        meta, told = job["metadata"], job.get("status") or {}
        progress = told.get("progress") or {}
        running = condition_in(told, "Running") or {}
        found.add_row(
            *((meta["namespace"],) if with_namespace else ()),
            meta["name"],
            running.get("reason", "-"),
            *(str(progress.get(key, "-")) for key in ("step", "loss", "tokensPerSecond", "wanPerStep")),
            str(told.get("restarts", 0)),
            _since(meta.get("creationTimestamp")),
        )
    out.print(found)


def show(job: Obj, out: Console) -> None:
    """Print a job's status for a person."""
    found = job.get("status") or {}
    meta = job["metadata"]
    running = condition_in(found, "Running")
    attempt = found.get("attempt") or {}
    heading = [running["reason"] if running else "not looked at yet"]
    if attempt:
        heading.append(f"attempt {attempt.get('number')}")
    if restarts := found.get("restarts"):
        heading.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    out.print(f"[bold]{meta['namespace']}/{meta['name']}[/bold]: {', '.join(heading)}")
    message = (running or {}).get("message", "").removeprefix(f"attempt {attempt.get('number')}: ")
    if message:
        out.print(f"  {message}", markup=False)
    _show_progress(found.get("progress") or {}, out)
    _show_checkpoints(found.get("checkpoints") or [], out)
    cause = attempt.get("cause") or {}
    if cause and cause.get("message", "") not in message:
        out.print(f"  last end: {cause.get('reason')}: {cause.get('message')}", markup=False)
    for item in found.get("members") or ():
        if item.get("unreachableSince"):
            out.print(f"  {item['name']} can't be reached for {_since(item['unreachableSince'])}")
    _show_replicas(found, out)
    for item in found.get("refused") or ():
        out.print(f"  {item['member']}: {item['reason']}", markup=False)
    if result := (found.get("result") or {}).get("uri"):
        out.print(f"  result: {result}", markup=False)
        out.print(f"  `crosscloud fetch {meta['name']} DIR -n {meta['namespace']}` brings it")


def _show_checkpoints(checkpoints: Sequence[Obj], out: Console) -> None:
    if not checkpoints:
        return
    out.print(f"  last checkpoint: after step {checkpoints[0].get('step')}")
    measured = [item for item in checkpoints if item.get("validationLoss")]
    if measured:
        best = min(measured, key=lambda item: float(item["validationLoss"]))
        where = f"after step {best.get('step')}, validation loss {best['validationLoss']}"
        out.print(f"  best checkpoint: {where}, {best.get('uri')}", markup=False)


def _show_progress(progress: Mapping[str, Any], out: Console) -> None:
    if not progress:
        return
    total = f" of {progress['totalSteps']}" if progress.get("totalSteps") else ""  # a script may not say how many
    parts = [f"step {progress.get('step')}{total}", f"round {progress.get('round')}"]
    for key, text in (
        ("loss", "loss {}"),
        ("validationLoss", "validation loss {}"),
        ("validationPerplexity", "perplexity {}"),
        ("tokensPerSecond", "{} tokens/s"),
    ):
        if progress.get(key) is not None:
            parts.append(text.format(progress[key]))
    if progress.get("wanPerStep"):
        parts.append(f"WAN {progress['wanPerStep']} per step")
    out.print("  " + ", ".join(parts))


def _show_replicas(found: Mapping[str, Any], out: Console) -> None:
    """Two tables, since one of all columns is wider than a terminal."""
    plan = found.get("plan") or []
    if not plan:
        return
    told = {item["index"]: item for item in found.get("replicaStatuses") or ()}
    progress = table("REPLICA", "MEMBER", "ACTIVITY", "STEP", "ROUND", "LOSS", "DIGEST", "WAITS FOR")
    cut = any(stage["stage"] for stage in plan)
    places = table("REPLICA", *(("STAGE", "MEMBER") if cut else ()), "POOL", "NODES (GPUS)")
    for replica in sorted({stage["replica"] for stage in plan}):
        members = list(dict.fromkeys(stage["member"] for stage in plan if stage["replica"] == replica))
        own = told.get(replica, {})
        waits = ", ".join(
            [str(number) for number in own.get("waitingFor") or ()]
            + [f"own stage {number}" for number in own.get("waitingForStages") or ()]
        )
        progress.add_row(
            str(replica),
            ", ".join(members),
            own.get("activity", "-"),
            *(str(own.get(key, "-")) for key in ("step", "round", "loss")),
            (own.get("digest") or "-")[:DIGEST_LETTERS],
            f"{waits}, for {_since(own['waitingSince'])}" if waits and own.get("waitingSince") else waits or "-",
        )
    for stage in plan:
        nodes = ", ".join(f"{node['name']} ({node['gpus']})" for node in stage.get("nodes") or ())
        which = (str(stage["stage"]), stage["member"]) if cut else ()
        places.add_row(str(stage["replica"]), *which, stage.get("pool", "-"), nodes)
    out.print(progress)
    out.print(places)
    for index, own in sorted(told.items()):
        if own.get("message"):
            out.print(f"  replica {index}: {own['message']}", markup=False)


def _since(text: str | None) -> str:
    at = parsed(text)
    return "-" if at is None else duration(time.time() - at)
