"""Tables of members and of their node pools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from crosscloud_operator.cli import setup
from crosscloud_operator.cli.common import duration, table
from crosscloud_operator.domain.record import condition_in, parsed
from crosscloud_operator.kube.api import Obj


def show_members(found: Sequence[Obj], out: Console) -> None:
    """A line for each member, then why those that aren't ready aren't."""
    shown = table("NAME", "READY", "REASON", "VERSION", "GPUS", "FREE", "NAMESPACES", "TOKEN")
    for obj in found:
        shown.add_row(*_row(obj))
    out.print(shown)
    for obj in found:
        ready = condition_in(obj.get("status") or {}, "Ready")
        if ready and ready["status"] != "True":
            out.print(f"{obj['metadata']['name']}: {ready['message']}", markup=False)


def show_pools(pools: Sequence[Mapping[str, Any]], out: Console) -> None:
    """A line for each node pool of a member."""
    shown = table("POOL", "GPU", "NODES", "GPUS", "FREE")
    for pool in pools:
        shown.add_row(pool["name"], pool.get("gpu") or "-", *(str(pool[key]) for key in ("nodes", "gpus", "freeGpus")))
    out.print(shown)


def _row(obj: Obj) -> list[str]:
    status, spec = obj.get("status") or {}, obj["spec"]
    ready = condition_in(status, "Ready") or {"status": "Unknown", "reason": "NotSeenYet"}
    allowed = spec.get("allowedNamespaces")
    names = None if allowed is None else setup.allowed_names(allowed)
    shown = "none" if allowed is None else ", ".join(names) if names is not None else "by labels"
    expires = parsed((status.get("credentials") or {}).get("expiresAt"))
    left = None if expires is None else expires - time.time()
    counts = [str(status.get(key, "-")) for key in ("gpus", "freeGpus")]
    return [
        obj["metadata"]["name"],
        ready["status"],
        ready["reason"],
        status.get("version", "-"),
        *counts,
        shown,
        "-" if left is None else "ended" if left <= 0 else f"{duration(left)} left",
    ]
