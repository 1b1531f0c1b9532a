"""Interfaces, routes and firewall rules of a lab.

Each cluster is one network namespace that holds the addresses of its nodes on `lo`. A veth pair leads to
the host and one to each other cluster: the WAN link of that pair, called `to-PEER` on each end. Nothing but
node addresses is routed; pods leave their cluster under the address of their node.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from crosscloud_lab.errors import LabError
from crosscloud_lab.labfile import POD_RANGE
from crosscloud_lab.plan import ClusterPlan, LabPlan, wan_interface
from crosscloud_lab.sandbox import Sandbox
from crosscloud_lab.shell import run, succeeds
from crosscloud_lab.spec import rate_bits

HOST_INTERFACE = "host"
_SYSCTLS = {
    "net/ipv4/ip_forward": 1,
    "net/ipv4/conf/all/rp_filter": 0,
    "net/ipv4/conf/default/rp_filter": 0,
    "net/ipv6/conf/all/disable_ipv6": 1,
    "net/ipv6/conf/default/disable_ipv6": 1,
}


@dataclass(frozen=True)
class LinkState:
    """What a WAN link should be like now."""

    rate: str
    cut: bool


def connect_host(cluster: ClusterPlan, sandbox: Sandbox, lab: LabPlan) -> None:
    """Brings up a cluster's own addresses and its way to the host; changes nothing that is right already."""
    if not _has_interface(sandbox, HOST_INTERFACE):
        await_no_interface(cluster.host_interface)
        inner = ["peer", HOST_INTERFACE, "netns", str(sandbox.pid())]
        run(["ip", "link", "add", cluster.host_interface, "type", "veth", *inner])
    for name, value in _SYSCTLS.items():
        sandbox.run(["sh", "-c", f"[ ! -e /proc/sys/{name} ] || echo {value} > /proc/sys/{name}"])
    own = [f"{node.address}/32" for node in cluster.nodes]
    if cluster == lab.storage_cluster:
        own.append(f"{lab.storage_address}/32")
    lines = ["link set lo up", *(f"address replace {address} dev lo" for address in own)]
    lines.append(f"link set {HOST_INTERFACE} up")
    lines.append(f"route replace {lab.host_address}/32 dev {HOST_INTERFACE} src {cluster.api_address}")
    sandbox.run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
    outside = [
        f"address replace {lab.host_address}/32 dev {cluster.host_interface}",
        f"link set {cluster.host_interface} up",
        f"route replace {cluster.region} dev {cluster.host_interface} src {lab.host_address}",
    ]
    run(["ip", "-batch", "-"], stdin="\n".join(outside) + "\n")
    sandbox.run(["nft", "-f", "-"], stdin=masquerade_rules(cluster))


def connect_pair(lab: LabPlan, a: str, b: str, sandboxes: dict[str, Sandbox]) -> None:
    """Brings up the link between two clusters unless it is there."""
    if not _has_interface(sandboxes[a], wan_interface(b)):
        _await_no_inner_interface(sandboxes[b], wan_interface(a))
        ends = ["name", wan_interface(b), "netns", str(sandboxes[a].pid()), "type", "veth"]
        run(["ip", "link", "add", *ends, "peer", "name", wan_interface(a), "netns", str(sandboxes[b].pid())])
    for here, there in ((a, b), (b, a)):
        cluster = lab.cluster(here)
        interface = wan_interface(there)
        route = f"route replace {lab.cluster(there).region} dev {interface} src {cluster.api_address}"
        sandboxes[here].run(["ip", "-batch", "-"], stdin=f"link set {interface} up\n{route}\n")


def shape(sandbox: Sandbox, peer: str, rate: str) -> None:
    """Sets what the cluster's end of a link may send; established connections go on."""
    interface = wan_interface(peer)
    bits = rate_bits(rate)
    if bits is None:
        shown = sandbox.run(["tc", "qdisc", "show", "dev", interface, "root"])
        if "tbf" in shown:
            sandbox.run(["tc", "qdisc", "del", "dev", interface, "root"])
        return
    # A burst of 4 ms at full rate, but never less than a large packet; a queue of 200 ms behind it.
    burst = max(bits // 8 * 4 // 1000, 16_000)
    tbf = ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "200ms"]
    sandbox.run(["tc", "qdisc", "replace", "dev", interface, "root", *tbf])


def apply_cuts(sandbox: Sandbox, peers: list[str]) -> None:
    """Drops everything that arrives from `peers`, and nothing from others, in one transaction.

    The rule sits before connection tracking on the receiving side, so that nobody is told: established
    connections hang, new ones get no answer.
    """
    sandbox.run(["nft", "-f", "-"], stdin=cut_rules(peers))


def masquerade_rules(cluster: ClusterPlan) -> str:
    """The nft table that gives packets of pods the address of their node when they leave the cluster."""
    outside = ", ".join(f'"{name}"' for name in [HOST_INTERFACE, *map(wan_interface, cluster.peers)])
    rules = "\n".join(
        f"    ip saddr {node.pods} oifname {{ {outside} }} snat to {node.address}" for node in cluster.nodes
    )
    return f"""table ip crosscloud
delete table ip crosscloud
table ip crosscloud {{
  chain leaving {{
    type nat hook postrouting priority srcnat + 10; policy accept;
{rules}
  }}
  chain arriving {{
    type filter hook prerouting priority raw; policy accept;
    iifname {{ {outside} }} ip daddr {POD_RANGE} drop
  }}
}}
"""


def cut_rules(peers: list[str]) -> str:
    """The nft table that drops what comes in over the links to `peers`."""
    rules = "\n".join(f'    iifname "{wan_interface(peer)}" drop' for peer in sorted(peers))
    return f"""table inet crosscloud_cut
delete table inet crosscloud_cut
table inet crosscloud_cut {{
  chain arriving {{
    type filter hook prerouting priority raw - 10; policy accept;
{rules}
  }}
}}
"""


def sent_bytes(sandbox: Sandbox, interface: str) -> int:
    """Bytes that the cluster sent on an interface since it was made, from the kernel's counters."""
    table = Path(f"/proc/{sandbox.pid()}/net/dev").read_text(encoding="ascii")
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise LabError(f"interface {interface} is missing: run `crosscloud-lab up`")


def host_conflicts(lab: LabPlan) -> list[str]:
    """Routes and addresses of this machine, other than the lab's own, that overlap the lab's network."""
    own = {cluster.host_interface for cluster in lab.clusters}
    found = []
    for route in json.loads(run(["ip", "-4", "-json", "route", "show", "table", "all"]) or "[]"):
        target, device = route.get("dst", ""), route.get("dev", "")
        if device in own or target in ("default", ""):
            continue
        if _overlaps(lab, target):
            found.append(f"{target} on {device or 'no device'}")
    return sorted(set(found))


def _overlaps(lab: LabPlan, target: str) -> bool:
    try:
        return IPv4Network(target, strict=False).overlaps(lab.spec.network)
    except ValueError:
        return False


def _has_interface(sandbox: Sandbox, name: str) -> bool:
    return succeeds(sandbox.enter(["ip", "link", "show", "dev", name]))


def await_no_interface(name: str) -> None:
    """The kernel removes a dead namespace's interfaces a moment later."""
    deadline = time.monotonic() + 5
    while succeeds(["ip", "link", "show", "dev", name]):
        if time.monotonic() > deadline:
            run(["ip", "link", "delete", name])
        time.sleep(0.05)


def _await_no_inner_interface(sandbox: Sandbox, name: str) -> None:
    deadline = time.monotonic() + 5
    while _has_interface(sandbox, name):
        if time.monotonic() > deadline:
            sandbox.run(["ip", "link", "delete", name])
        time.sleep(0.05)
