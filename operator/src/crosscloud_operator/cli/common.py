"""What the commands share: the options that lead to the hub, checks of arguments, and one clear sentence per fault."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from crosscloud_operator.kube.api import JOB, ApiError, Cluster, NotFound, Obj, Ref, Refused, Unreachable
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.local import NoAccess, user_kubeconfig

T = TypeVar("T")

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
HOST = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
NAME_ALLOWED = "must be at most 63 lower-case letters, digits and '-', with a letter or digit at both ends"
INSTALL = "install it with `helm install crosscloud charts/crosscloud --namespace crosscloud-system --create-namespace`"


class Failed(click.ClickException):
    """A fault that the user can act on; shown as one message."""


@dataclass(frozen=True)
class Hub:
    """Where the hub is, as the options say."""

    kubeconfig: str | None
    context: str | None
    namespace: str

    def cluster(self) -> HttpCluster:
        """Raises Failed where there are no credentials."""
        return admin_cluster("hub", self.kubeconfig, self.context, "--hub-kubeconfig")


def hub_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that lead to the hub, and passes the hub on as `hub`; they win over those of the group."""

    @click.option("--hub-kubeconfig", metavar="FILE", help="The hub's kubeconfig [default: KUBECONFIG, ~/.kube/config]")
    @click.option("--hub-context", metavar="NAME", help="The hub's context [default: the current one]")
    @click.pass_obj
    @functools.wraps(command)
    def wrapped(hub: Hub, /, *args: Any, hub_kubeconfig: str | None, hub_context: str | None, **kwargs: Any) -> None:
        kubeconfig = hub.kubeconfig if hub_kubeconfig is None else hub_kubeconfig
        found = Hub(kubeconfig, hub.context if hub_context is None else hub_context, hub.namespace)
        command(*args, hub=found, **kwargs)

    return wrapped


def admin_cluster(name: str, kubeconfig: str | None, context: str | None, option: str = "--kubeconfig") -> HttpCluster:
    """A cluster as the user who runs the command sees it; exec plugins run, since they are the user's own."""
    try:
        return HttpCluster(name, user_kubeconfig(kubeconfig, context, option))
    except NoAccess as fault:
        raise Failed(str(fault)) from fault


def checked_name(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Callback of arguments and options that name something, once or several times."""
    for item in value if isinstance(value, tuple) else (value,):
        if item is not None and not NAME.fullmatch(item):
            raise click.BadParameter(f"found {item!r}; {NAME_ALLOWED}")
    return value


def checked_job(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Callback of the argument that names a job."""
    namespace, slash, name = (value or "").partition("/")
    if slash and NAME.fullmatch(namespace) and NAME.fullmatch(name):
        raise click.BadParameter(f"found {value!r}; must be the job's name alone: `{name} -n {namespace}`")
    return checked_name(context, parameter, value)


namespace_option = click.option(
    "-n", "--namespace", default="default", show_default=True, callback=checked_name, help="The job's namespace."
)


class Commands(click.Group):
    """A group that says which commands there are where it is asked for another one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"No such command {args[0]!r}; must be one of {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class Seconds(click.IntRange):
    """Whole seconds."""

    name = "whole number of seconds"


def checked_host(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Callback of options that take a host name or an address, as the CRD of members has them."""
    if value is not None and not (HOST.fullmatch(value) and len(value) <= 253):
        raise click.BadParameter(f"found {value!r}; must be a host name or an IP address, without port")
    return value


def run(work: Coroutine[Any, Any, T], *clusters: HttpCluster) -> T:
    """Run the asynchronous part of a command, then close its clusters; API errors become one message."""

    async def closing() -> T:
        try:
            return await work
        finally:
            await asyncio.gather(*(cluster.close() for cluster in clusters))

    try:
        return asyncio.run(closing())
    except Refused as fault:
        raise Failed(f"refused by the API server: {fault.message}") from fault
    except NotFound as fault:
        raise Failed(f"not found: {fault.message}") from fault
    except Unreachable as fault:
        raise Failed(f"no usable answer: {fault.message}") from fault
    except ApiError as fault:
        raise Failed(fault.message) from fault


async def existing_job(cluster: Cluster, namespace: str, name: str) -> Obj:
    """The job. Raises Failed, with where jobs of that name are, if it isn't there."""
    found = await cluster.get(Ref(JOB, name, namespace))
    if found is not None:
        return found
    elsewhere = ""
    with contextlib.suppress(Refused):  # who may not see all namespaces is told less
        spaces = [job["metadata"]["namespace"] for job in await existing_jobs(cluster, None) if _name(job) == name]
        elsewhere = f"; there is one in {', '.join(sorted(spaces))}" if spaces else ""
    raise Failed(f"JOB: there is no job {name!r} in namespace {namespace!r}{elsewhere}; `-n` names another namespace")


async def existing_jobs(cluster: Cluster, namespace: str | None) -> Sequence[Obj]:
    """The jobs of a namespace, or of all. Raises Failed where the hub knows no jobs."""
    try:
        return await cluster.list(JOB, namespace=namespace)
    except NotFound as fault:
        raise Failed(f"the hub does not know CrossCloudTrainingJobs: {INSTALL}") from fault


def _name(obj: Obj) -> str:
    return str(obj["metadata"]["name"])


def duration(seconds: float) -> str:
    """A time span in two or three letters, as kubectl shows ages."""
    for unit, length, most in (("s", 1, 120), ("m", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{max(0, int(seconds)) // length}{unit}"
    return f"{int(seconds) // 86_400}d"


def table(*columns: str) -> Table:
    """Without lines, as kubectl's; what doesn't fit goes on in the next line, and nothing is cut."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        found.add_column(name, overflow="fold")
    return found


def console(stderr: bool = False) -> Console:
    """Wide enough in a pipe that tables aren't cut."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=160)
