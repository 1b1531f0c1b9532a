"""`crosscloud member add | list | remove`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console

from crosscloud_operator.cli import setup
from crosscloud_operator.cli.apply import Did, apply
from crosscloud_operator.cli.common import (
    INSTALL,
    Commands,
    Failed,
    Hub,
    Seconds,
    admin_cluster,
    checked_host,
    checked_name,
    console,
    hub_options,
    run,
)
from crosscloud_operator.cli.overview import show_members, show_pools
from crosscloud_operator.cli.selector import parse_selector
from crosscloud_operator.domain.inventory import SYSTEM_NAMESPACE, cluster_id
from crosscloud_operator.domain.record import condition_in, has_ended, rfc3339
from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import (
    CLUSTER_ROLE,
    CLUSTER_ROLE_BINDING,
    JOB,
    MEMBER,
    NAMESPACE,
    ROLE_BINDING,
    SECRET,
    Cluster,
    NotFound,
    Obj,
    Ref,
    Refused,
    Unreachable,
)
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.credentials import life_of
from crosscloud_operator.kube.kubeconfig import KubeconfigRefused, render, server_problems, vet

TOKEN_SECONDS = 86_400
LOCAL_HOSTS = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104 - looked for, not listened at


@dataclass(frozen=True)
class Wanted:
    """What the user asked `member add` for."""

    name: str
    allow_namespaces: tuple[str, ...]
    allow_selector: Obj | None
    gateway_address: str | None
    server: str | None
    timeout: int
    dry_run: bool


@click.group(cls=Commands)
def member() -> None:
    """Add, list and remove the clusters that run pods."""


@member.command()
@click.argument("name", callback=checked_name)
@click.option("--kubeconfig", required=True, metavar="FILE", help="An administrator's kubeconfig of the new member.")
@click.option("--context", metavar="NAME", help="The context in it [default: the current one]")
@click.option(
    "--allow-namespace",
    "allow_namespaces",
    multiple=True,
    metavar="NS",
    callback=checked_name,
    help="A namespace in which jobs may run (several times for several). It is made in the member if it is missing.",
)
@click.option(
    "--allow-selector",
    metavar="LABELS",
    callback=lambda _context, _parameter, value: None if value is None else parse_selector(value),
    help="Instead: all namespaces with these labels, like team=ml,env in (dev,test). The operator then gets its rights "
    "in every namespace of the member, since those that will carry the labels can't be known.",
)
@click.option(
    "--gateway-address",
    metavar="HOST",
    callback=checked_host,
    help="Where other members reach this one's node ports [default: a node]",
)
@click.option(
    "--server",
    metavar="URL",
    callback=lambda _context, _parameter, value: _server(value),
    help="The API server's address as the hub reaches it [default: the kubeconfig's]",
)
@click.option(
    "--timeout",
    default=120,
    show_default=True,
    type=Seconds(0, 3600),
    help="Seconds to wait for Ready; 0: don't.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@hub_options
def add(name: str, kubeconfig: str, context: str | None, hub: Hub, **options: Any) -> None:
    """Make the cluster of --kubeconfig the member NAME of the hub.

    In the member: a service account with the least rights that the operator needs (to see nodes, namespaces and pods
    everywhere; to run jobs in the allowed namespaces only; to renew its own token) and a token for it. On the hub: a
    Secret with that token, and the MemberCluster. The administrator's kubeconfig is used now and stored nowhere.

    Doing it again changes what differs and makes a new token. Options left out then stay as they are.
    """
    wanted = Wanted(name=name, **options)
    if wanted.allow_namespaces and wanted.allow_selector is not None:
        raise click.UsageError("--allow-namespace and --allow-selector: give one of the two")
    on_hub, on_member = hub.cluster(), admin_cluster(name, kubeconfig, context)
    run(_add(wanted, on_hub, hub.namespace, on_member, console()), on_hub, on_member)


def _server(value: str | None) -> str | None:
    """By the operator's own rules for addresses in a kubeconfig."""
    if value is not None and (faults := list(server_problems("", value))):
        raise click.BadParameter(faults[0].removeprefix(": "))
    return value


async def _add(wanted: Wanted, hub: HttpCluster, namespace: str, member: HttpCluster, out: Console) -> None:
    present = await _checked_hub(hub, wanted.name, namespace)
    await _checked_cluster(hub, wanted.name, member)
    before: Mapping[str, Any] = (present or {}).get("spec") or {}
    allowed = _allowed(wanted, before)
    gateway: Obj = dict(before.get("gateway") or {"type": "NodePort"})
    if wanted.gateway_address is not None:
        gateway["address"] = wanted.gateway_address
    if before.get("access", {}).get("inCluster") is not None:
        raise Failed(f"MemberCluster {wanted.name} is the hub itself (spec.access.inCluster); choose another name")
    _vetted(_stored(member, wanted, "to-come"), wanted)  # all but the token, before anything is made

    await _apply_all(member, [*setup.account_objects(), *setup.run_objects(allowed)], wanted, out)
    await _withdraw(member, allowed, wanted, out)
    if wanted.dry_run:
        out.print(f"would ask {wanted.name} for a token of {setup.NAMESPACE}/{setup.ACCOUNT}")
        objects = setup.hub_objects(wanted.name, namespace, "", allowed, gateway)
        await _apply_all(hub, objects, wanted, out)
        return
    granted = await member.request_token(setup.NAMESPACE, setup.ACCOUNT, TOKEN_SECONDS)
    access = _stored(member, wanted, granted["token"])
    text = _vetted(access, wanted)
    await _try(access, wanted)
    await _apply_all(hub, setup.hub_objects(wanted.name, namespace, text, allowed, gateway), wanted, out)
    if allowed is None:
        out.print("no namespace may be used yet: add it again with --allow-namespace or --allow-selector")
    if (urlsplit(access.server).hostname or "").startswith(LOCAL_HOSTS):
        out.print(f"note: {access.server} is an address of this machine; if the operator runs elsewhere, give --server")
    if wanted.timeout > 0:
        await _wait(hub, wanted, life_of(access).expires, out)


async def _checked_hub(hub: Cluster, name: str, namespace: str) -> Obj | None:
    await _members(hub)
    if await hub.get(Ref(NAMESPACE, namespace)) is None:
        raise Failed(
            f"--operator-namespace: the hub has no namespace {namespace!r}; must be the one in which the operator runs "
            f"(not there yet? {INSTALL})"
        )
    return await hub.get(Ref(MEMBER, name))


async def _checked_cluster(hub: Cluster, name: str, member: Cluster) -> None:
    """One cluster under two names would have its GPUs counted twice."""
    if found := await _same_cluster(hub, name, member):
        raise Failed(
            f"--kubeconfig: its cluster is the member {found} already, and can be one member only (its GPUs would be "
            f"counted twice); take that name, or first `crosscloud member remove {found}`"
        )


async def _same_cluster(hub: Cluster, name: str, member: Cluster) -> str | None:
    """Another member that is this cluster, as the operator has seen."""
    system = await member.get(Ref(NAMESPACE, SYSTEM_NAMESPACE))
    cluster = cluster_id([system] if system else [])
    others = [other for other in await _members(hub) if other["metadata"]["name"] != name]
    same = (other for other in others if cluster and (other.get("status") or {}).get("clusterId") == cluster)
    return next((str(other["metadata"]["name"]) for other in same), None)


async def _members(hub: Cluster) -> Sequence[Obj]:
    try:
        return await hub.list(MEMBER)
    except NotFound as fault:
        raise Failed(f"the hub does not know MemberClusters: {INSTALL}") from fault


def _allowed(wanted: Wanted, before: Mapping[str, Any]) -> Obj | None:
    if wanted.allow_namespaces:
        return setup.allowed_by_names(wanted.allow_namespaces)
    if wanted.allow_selector is not None:
        return wanted.allow_selector
    found: Obj | None = before.get("allowedNamespaces")
    return found


async def _apply_all(cluster: Cluster, objects: Sequence[Obj], wanted: Wanted, out: Console) -> None:
    words = {Did.CREATED: "created", Did.CHANGED: "changed", Did.KEPT: "as it should be"}
    if wanted.dry_run:
        words = {Did.CREATED: "would be created", Did.CHANGED: "would be changed", Did.KEPT: "as it should be"}
    for obj in objects:
        # A namespace of the user's that is there already is none of our business.
        foreign = obj["kind"] == "Namespace" and "labels" not in obj["metadata"]
        kept = foreign and await cluster.get(Ref.of(obj)) is not None
        did = Did.KEPT if kept else await apply(cluster, obj, dry_run=wanted.dry_run)
        out.print(f"{cluster.name}: {_title(obj)}: {words[did]}")


async def _withdraw(member: Cluster, allowed: Obj | None, wanted: Wanted, out: Console) -> None:
    """Take the rights back where jobs may no longer run."""
    kept = {(obj["kind"], obj["metadata"].get("namespace")) for obj in setup.run_objects(allowed)}
    for kind in (ROLE_BINDING, CLUSTER_ROLE_BINDING):
        for obj in await member.list(kind, selector=setup.MARK_SELECTOR):
            meta = obj["metadata"]
            if meta["name"] != setup.RUN or (kind.kind, meta.get("namespace")) in kept:
                continue
            if not wanted.dry_run:
                await member.delete(Ref.of(obj), uid=meta["uid"])
            out.print(f"{member.name}: {_title(obj)}: {'would be ' if wanted.dry_run else ''}deleted")


def _stored(member: HttpCluster, wanted: Wanted, token: str) -> Access:
    """The member as the operator will reach it."""
    admin = member.access
    return Access(server=wanted.server or admin.server, ca=admin.ca, tls_server_name=admin.tls_server_name, token=token)


def _vetted(access: Access, wanted: Wanted) -> str:
    """The kubeconfig for the Secret, after the operator's own check of it."""
    text = render(access, wanted.name, access.token or "")
    try:
        vet(text)
    except KubeconfigRefused as fault:
        raise Failed(f"the kubeconfig of {wanted.name} can't be stored: {fault}") from fault
    return text


async def _try(access: Access, wanted: Wanted) -> None:
    """One call as the operator will make it, where this machine can reach the member."""
    if wanted.server is not None:
        return  # an address for the hub, which may not be reachable from here
    cluster = HttpCluster(wanted.name, access)
    try:
        await cluster.version()
    except (Refused, Unreachable) as fault:
        raise Failed(f"the new token does not work: {fault.message}") from fault
    finally:
        await cluster.close()


async def _wait(hub: Cluster, wanted: Wanted, expires: float | None, out: Console) -> None:
    """Until the operator has found the member ready by the token just made."""
    mark = rfc3339(expires) if expires is not None else None
    deadline = time.monotonic() + wanted.timeout
    words = "the operator has not looked at it yet; does it run?"
    with out.status(f"waiting until {wanted.name} is Ready"):
        while True:
            obj = await hub.get(Ref(MEMBER, wanted.name))
            status = (obj or {}).get("status") or {}
            ready = condition_in(status, "Ready")
            used = (status.get("credentials") or {}).get("expiresAt")
            if ready and ready["status"] == "True" and (mark is None or used == mark):
                break
            if ready and ready["status"] != "True":
                words = f"{ready['reason']}: {ready['message']}"
            if time.monotonic() > deadline:
                raise Failed(f"{wanted.name} is not Ready after {wanted.timeout} s: {words}")
            await asyncio.sleep(0.5)
    out.print(f"[green]{wanted.name} is Ready[/green]: Kubernetes {status.get('version')}")
    pools = status.get("nodePools") or []
    if not pools:
        out.print("no node with GPUs was found in it yet")
        return
    show_pools(pools, out)


@member.command("list")
@hub_options
def list_members(hub: Hub) -> None:
    """Show the members and what they have."""
    cluster = hub.cluster()
    found = run(_members(cluster), cluster)
    out = console()
    if not found:
        out.print("there is no member yet: `crosscloud member add NAME --kubeconfig FILE`")
        return
    show_members(found, out)


@member.command()
@click.argument("name", callback=checked_name)
@click.option("--force", is_flag=True, help="Also while jobs run there; the operator then can't clean up after them.")
@click.option(
    "--kubeconfig", metavar="FILE", help="An administrator's kubeconfig: also take the rights away in the member."
)
@click.option("--context", metavar="NAME", help="The context in it [default: the current one]")
@hub_options
def remove(name: str, force: bool, kubeconfig: str | None, context: str | None, hub: Hub) -> None:
    """Forget the member NAME: its MemberCluster and its Secret on the hub.

    With --kubeconfig also what `member add` made in the member, but for the namespaces of jobs.
    """
    on_hub = hub.cluster()
    if context is not None and kubeconfig is None:
        raise click.UsageError("--context: is one of --kubeconfig, which is missing; the hub's is --hub-context")
    on_member = None if kubeconfig is None else admin_cluster(name, kubeconfig, context)
    clusters = (on_hub, on_member) if on_member is not None else (on_hub,)
    run(_remove(name, force, on_hub, hub.namespace, on_member, console()), *clusters)


async def _remove(name: str, force: bool, hub: Cluster, namespace: str, member: Cluster | None, out: Console) -> None:
    obj = await hub.get(Ref(MEMBER, name))
    if obj is None:
        raise Failed(f"there is no member {name!r}; `crosscloud member list` shows those that are")
    users = [job for job in await hub.list(JOB) if uses(job, name)]
    if users and not force:
        names = ", ".join(f"{job['metadata']['namespace']}/{job['metadata']['name']}" for job in users)
        raise Failed(f"{name} runs pods of {names}: delete these jobs or wait for their end first, or give --force")
    await hub.delete(Ref.of(obj), uid=obj["metadata"]["uid"])
    out.print(f"hub: {_title(obj)}: deleted")
    secret = await hub.get(Ref(SECRET, setup.secret_name(name), namespace))
    # Only the one that we made: a Secret of an administrator's own is theirs to keep.
    if secret is not None and setup.MARK.items() <= (secret["metadata"].get("labels") or {}).items():
        await hub.delete(Ref.of(secret), uid=secret["metadata"]["uid"])
        out.print(f"hub: {_title(secret)}: deleted")
    if member is None:
        return
    if other := await _same_cluster(hub, name, member):
        out.print(f"{name}: its account and rights stay, since its cluster is the member {other} too")
    else:
        await _remove_rights(member, out)


async def _remove_rights(member: Cluster, out: Console) -> None:
    for kind in (ROLE_BINDING, CLUSTER_ROLE_BINDING, CLUSTER_ROLE):
        for obj in await member.list(kind, selector=setup.MARK_SELECTOR):
            await member.delete(Ref.of(obj), uid=obj["metadata"]["uid"])
            out.print(f"{member.name}: {_title(obj)}: deleted")
    namespace = await member.get(Ref(NAMESPACE, setup.NAMESPACE))
    if namespace is not None and setup.MARK.items() <= (namespace["metadata"].get("labels") or {}).items():
        await member.delete(Ref.of(namespace), uid=namespace["metadata"]["uid"])
        out.print(f"{member.name}: {_title(namespace)}: deleted")


def uses(job: Obj, member: str) -> bool:
    """Whether a job that has not ended has pods, or is promised nodes, in the member."""
    plan = (job.get("status") or {}).get("plan") or ()
    return not has_ended(job) and any(stage.get("member") == member for stage in plan)


def _title(obj: Obj) -> str:
    meta = obj["metadata"]
    return f"{obj['kind']} {meta['namespace'] + '/' if meta.get('namespace') else ''}{meta['name']}"
