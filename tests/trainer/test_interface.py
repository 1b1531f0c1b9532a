"""Two hosts whose names resolve to loopback, as /etc/hosts often has them: their ranks meet all the same (case C49)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = ("10.99.7.1", "10.99.7.2")
RANK = """
import os, socket, sys
from crosscloud_trainer.launcher.network import VARIABLE, interface_for, wait_for_address
rank, master = int(sys.argv[1]), sys.argv[2]
os.environ[VARIABLE] = interface_for(wait_for_address(master, 0.0, lambda: False), os.environ)
import torch, torch.distributed as dist
store = dist.TCPStore(master, 29511, 2, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(os.environ[VARIABLE], socket.gethostbyname(socket.gethostname()), total.item())
dist.barrier()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable whose ends are called `wire`, each the other's default route."""
    names = (f"c49-{os.getpid()}-a", f"c49-{os.getpid()}-b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, own, other in zip(names, HOSTS, reversed(HOSTS), strict=True):
            ip("-n", name, "address", "add", f"{own}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "via", other)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start(host: str, hosts_file: Path, rank: int, master: str, **more: str) -> subprocess.Popen[str]:
    """A rank on this host, where `hosts_file` is /etc/hosts."""
    command = f'mount --bind "{hosts_file}" /etc/hosts && exec "$@"'
    python = [sys.executable, "-c", RANK, str(rank), master]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, "sh", "-c", command, "sh", *python],
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_meet_over_the_interface_that_leads_to_the_other_host(hosts: tuple[str, str], tmp_path: Path) -> None:
    own = os.uname().nodename
    files = [tmp_path / "hosts-0", tmp_path / "hosts-1"]
    files[0].write_text(f"127.0.0.1 localhost\n127.0.1.1 {own} first\n")
    files[1].write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{HOSTS[0]} first\n")
    chosen = ({}, {"GLOO_SOCKET_IFNAME": "wire"})
    ranks = [start(host, files[rank], rank, "first", **chosen[rank]) for rank, host in enumerate(hosts)]
    for rank in ranks:
        out, err = rank.communicate(timeout=240)
        assert out.split() == ["wire", "127.0.1.1", "3.0"], err


@pytest.mark.parametrize("wrong", ["^lo,docker", "eth9", "lo"])
def test_an_interface_that_is_none_or_leads_nowhere_is_refused_at_once_and_by_name(
    hosts: tuple[str, str], tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    rank = start(hosts[0], tmp_path / "hosts", 0, HOSTS[0], GLOO_SOCKET_IFNAME=wrong)
    _, err = rank.communicate(timeout=240)
    assert rank.returncode != 0
    assert f'GLOO_SOCKET_IFNAME: found "{wrong}"; must be one interface that leads to other hosts: wire;' in err
