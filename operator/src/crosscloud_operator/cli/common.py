"""What the commands share: the options that lead to the hub, checks of arguments, and one clear sentence per fault."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console

from crosscloud_operator.kube.api import ApiError, NotFound, Refused, Unreachable
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.local import NoAccess, user_kubeconfig

P = ParamSpec("P")
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
        return admin_cluster("hub", self.kubeconfig, self.context)


def hub_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that lead to the hub, and passes the hub on as `hub`; they win over those of the group."""

    @click.option("--hub-kubeconfig", metavar="FILE", help="The hub's kubeconfig [default: KUBECONFIG, ~/.kube/config]")
    @click.option("--hub-context", metavar="NAME", help="The hub's context [default: the current one]")
    @click.pass_obj
    @functools.wraps(command)
    def wrapped(hub: Hub, /, *args: Any, hub_kubeconfig: str | None, hub_context: str | None, **kwargs: Any) -> None:
        found = Hub(hub_kubeconfig or hub.kubeconfig, hub_context or hub.context, hub.namespace)
        command(*args, hub=found, **kwargs)

    return wrapped


def admin_cluster(name: str, kubeconfig: str | None, context: str | None) -> HttpCluster:
    """A cluster as the user who runs the command sees it; exec plugins run, since they are the user's own."""
    try:
        return HttpCluster(name, user_kubeconfig(kubeconfig, context))
    except NoAccess as fault:
        raise Failed(str(fault)) from fault


def checked_name(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Callback of arguments and options that name something, once or several times."""
    for item in value if isinstance(value, tuple) else (value,):
        if item is not None and not NAME.fullmatch(item):
            raise click.BadParameter(f"found {item!r}; {NAME_ALLOWED}")
    return value


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


def console(stderr: bool = False) -> Console:
    """Wide enough in a pipe that tables aren't cut."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=160)
