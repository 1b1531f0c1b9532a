"""Pods on loopback: certificates, a peer table, and a proxy that stands for the WAN."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from waiting import eventually

from crosscloud_trainer.contract import RUN_VERSION, Peer, PeerTable, dump_json
from crosscloud_trainer.link import Authority, Link, LinkSettings
from crosscloud_trainer.pki import CertificateAuthority, PodIdentity

UID = "5b0a6c1e-1d0f-4b43-9a53-5a7cfbd2a001"
QUICK = LinkSettings(heartbeat=0.1, dead_after=1.0, handshake=2.0, backoff=0.02, backoff_cap=0.2)
DEADLINE = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Waits for a condition; fails with `what` when it doesn't come."""
    eventually(condition, what, seconds, 0.01)


class Yard:
    """The pods of one attempt: one stage, one node per replica, each in a member of its own.

    `of_stages` has the stages of one replica in their places.
    """

    staged = False

    def __init__(self, folder: Path, replicas: int = 2, ranks: int = 1, attempt: int = 1, uid: str = UID) -> None:
        self.folder = folder
        self.uid = uid
        self.attempt = attempt
        self.authority = CertificateAuthority.create(uid)
        self.ports = {replica: self._ports(ranks) for replica in range(replicas)}
        self.gateways: dict[int, int] = {}
        self.incarnations = dict.fromkeys(range(replicas), 1)
        for replica in range(replicas):
            self.issue(self.identity(replica), self.tls(replica))
        self.write()

    @classmethod
    def of_stages(cls, folder: Path, stages: int, ranks: int = 1) -> Yard:
        """The pods of one replica whose stages lie in members of their own."""
        yard = cls(folder, 0)
        yard.staged = True
        yard.ports = {stage: cls._ports(ranks) for stage in range(stages)}
        yard.incarnations = dict.fromkeys(range(stages), 1)
        for stage in range(stages):
            yard.issue(yard.identity(stage), yard.tls(stage))
        yard.write()
        return yard

    def of_attempt(self, attempt: int, folder: Path) -> Yard:
        """The pods of another attempt of the job, who meet those of this one at replica 1's port."""
        other = Yard(folder, attempt=attempt)
        other.authority, other.ports = self.authority, {0: self._ports(1), 1: self.ports[1]}
        for replica in other.ports:
            other.issue(other.identity(replica), other.tls(replica))
        other.write()
        return other

    @contextlib.contextmanager
    def behind_wan(self, replica: int) -> Iterator[Wan]:
        """A WAN in front of a replica, by which the others reach it from now on."""
        with wan(self.ports[replica]) as road:
            self.gateways[replica] = road.port
            self.write()
            yield road

    @staticmethod
    def _ports(ranks: int) -> int:
        """The first of `ranks` free ports in a row."""
        while True:
            first = free_port()
            with contextlib.ExitStack() as stack:
                try:
                    for port in range(first, first + ranks):
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                except OSError:
                    continue
                return first

    def identity(self, replica: int, **changes: int) -> PodIdentity:
        place = {"replica": 0, "stage": replica} if self.staged else {"replica": replica, "stage": 0}
        fields = {"attempt": self.attempt, **place, "node": 0, "incarnation": 1}
        return PodIdentity(self.uid, **{**fields, **changes})

    def tls(self, replica: int) -> Path:
        return self.folder / f"tls-{replica}"

    @property
    def peers(self) -> Path:
        return self.folder / "peers.json"

    def issue(self, identity: PodIdentity, folder: Path, authority: CertificateAuthority | None = None) -> Path:
        issued = (authority or self.authority).issue(identity)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tls.crt").write_bytes(issued.certificate)
        (folder / "tls.key").write_bytes(issued.key)
        (folder / "ca.crt").write_bytes(self.authority.certificate)
        return folder

    def write(self) -> None:
        """The peer table as it is now; a replica with a gateway is reached there by the others."""
        peers = tuple(
            Peer(
                replica=0 if self.staged else replica,
                stage=replica if self.staged else 0,
                node=0,
                incarnation=self.incarnations[replica],
                member=f"member-{replica}",
                server_name=self.identity(replica, incarnation=self.incarnations[replica]).server_name,
                direct="127.0.0.1",
                link_port=port,
                gateway=f"127.0.0.1:{self.gateways[replica]}" if replica in self.gateways else None,
            )
            for replica, port in self.ports.items()
        )
        draft = self.peers.with_suffix(".part")
        draft.write_text(dump_json(PeerTable(RUN_VERSION, self.attempt, peers)))
        draft.replace(self.peers)
        assert json.loads(self.peers.read_text())["attempt"] == self.attempt

    def link(
        self,
        replica: int,
        local: int = 0,
        *,
        agreement: dict[str, str] | None = None,
        authority: Authority | None = None,
        settings: LinkSettings = QUICK,
    ) -> Link:
        alike = {"run document": "d1"} if agreement is None else agreement
        return Link(local, self.tls(replica), self.peers, alike, authority or Authority(1, 0, 0), settings)


class Wan:
    """A TCP proxy in front of one port that can be cut: silently (a black hole), or after a number of bytes."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._black_hole = False
        self._break_after: int | None = None
        self._cut_after: int | None = None
        self.breaks = 0
        self._stop = False
        self._passing = threading.Lock()  # no socket is closed while the thread works on it
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """From now on no byte passes and no connection ends: neither side is told."""
        self._black_hole = True

    def cut_after(self, count: int) -> None:
        """Cuts once `count` more bytes have passed, perhaps within a frame."""
        self._cut_after = count

    def heal(self) -> None:
        """New connections pass. Those of before stay dead, as after a long cut."""
        with self._passing:
            for one in list(self._pairs):
                self._drop(one)
            self._black_hole = False

    def break_after(self, count: int) -> None:
        """Both directions are closed once `count` more bytes have passed, perhaps within a frame."""
        self._break_after = count

    def close(self) -> None:
        self._stop = True
        self._thread.join(10)
        for one in list(self._pairs):
            self._drop(one)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stop:
            ready = self._selector.select(0.02)
            with self._passing:
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                        self._pass(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target), 5)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, source: socket.socket) -> None:
        if self._black_hole:
            self._selector.unregister(source)
            return
        sink = self._pairs[source]
        bounds = [65536, *(b for b in (self._break_after, self._cut_after) if b is not None)]
        room = max(1, min(bounds))
        try:
            data = source.recv(room)
            if not data:
                self._drop(source)
                return
            sink.sendall(data)
        except OSError:
            self._drop(source)
            return
        if self._cut_after is not None:
            self._cut_after -= len(data)
            if self._cut_after <= 0:
                self._cut_after, self._black_hole = None, True
        if self._break_after is not None:
            self._break_after -= len(data)
            if self._break_after <= 0:
                self._break_after = None
                self.breaks += 1
                self._drop(source)

    def _drop(self, one: socket.socket) -> None:
        other = self._pairs.pop(one, None)
        for end in (one, other):
            if end is not None:
                self._pairs.pop(end, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(end)
                end.close()


@contextlib.contextmanager
def wan(target: int) -> Iterator[Wan]:
    made = Wan(target)
    try:
        yield made
    finally:
        made.close()
