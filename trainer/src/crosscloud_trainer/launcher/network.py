"""How the ranks of one stage find each other: the master's address, and the network interface that leads there."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from crosscloud_trainer.contract import ExitCode, Problem
from crosscloud_trainer.failures import Failure, invalid

LOOPBACK = "lo"
VARIABLE = "GLOO_SOCKET_IFNAME"

_ASK_AGAIN_SECONDS = 1.0
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def wait_for_address(name: str, deadline: float, stopped: Callable[[], bool]) -> str:
    """The address of a peer's name, asked for until `deadline` (monotonic): a headless Service may be seconds late.

    Raises Failure(PEERS_MISSING).
    """
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as fault:
            if stopped():
                raise Failure(ExitCode.TERMINATED, "ended by SIGTERM while waiting for peers") from fault
            if time.monotonic() >= deadline:
                message = (
                    f"{name}, the first pod of this stage, has no address yet ({fault}); gave up at the start deadline"
                )
                raise Failure(ExitCode.PEERS_MISSING, message) from fault
            time.sleep(_ASK_AGAIN_SECONDS)


def interface_for(master: str, environ: Mapping[str, str]) -> str:
    """The interface over which a world of several hosts talks: the user's choice if it exists, else the one that routes
    to `master`, never loopback, which others would be told to meet this host at. Raises Failure(INVALID_INPUT) saying
    what to set."""
    names = [name for _, name in socket.if_nameindex() if name != LOOPBACK]
    chosen = environ.get(VARIABLE)
    if chosen is not None:
        if chosen not in names:
            allowed = (
                f"must be one interface that leads to other hosts: {', '.join(names)}; leave it out to have it found"
            )
            raise invalid([Problem(VARIABLE, chosen, allowed)])
        return chosen
    for target in (master, *_default_gateways()):
        source = _source_address(target)
        if source is None or ipaddress.ip_address(source).is_loopback:
            continue
        for name in names:
            if source in _addresses(name):
                return name
    allowed = f"only loopback routes to {master}, and other hosts can't reach that; set it to one of {', '.join(names)}"
    raise invalid([Problem(VARIABLE, None, allowed)])


def _source_address(target: str) -> str | None:
    """The address that this host would talk to `target` from; nothing is sent."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _default_gateways() -> list[str]:
    """Next hops of default routes: they tell the interface where the master's name is wrongly one of loopback."""
    table = Path("/proc/net/route")
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [socket.inet_ntoa(struct.pack("<I", int(row[2], 16))) for row in rows if row[1] == "00000000"]


def _addresses(name: str) -> set[str]:
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(name)[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # an interface without an IPv4 address
    table = Path("/proc/net/if_inet6")
    if table.exists():
        for line in table.read_text().splitlines():
            packed, *_, device = line.split()
            if device == name:
                found.add(str(ipaddress.IPv6Address(bytes.fromhex(packed))))
    return found
