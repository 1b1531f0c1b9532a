"""A pod's dialler written by hand: it speaks TLS well, and whatever a test wants after it."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from pathlib import Path

from link.yard import DEADLINE, Yard, until

from crosscloud_trainer.link import Link, Message, MessageType, RankId, Received

ZERO, ONE = RankId(0, 0, 0, 0), RankId(1, 0, 0, 0)
FRAME = struct.Struct("!HBBIQQ")
HELLO, REFUSE, HEARTBEAT, DATA = 1, 2, 3, 4


def hello(yard: Yard, **changes: object) -> bytes:
    """The handshake of replica 0, written by hand."""
    said = {
        "protocol": 1, "job": yard.uid, "attempt": 1, "replica": 0, "stage": 0, "node": 0, "localRank": 0,
        "incarnation": 1, "to": "replica 1 stage 0 node 0 rank 0", "home": 1, "term": 0, "view": 0,
        "agreement": {"run document": "d1"}, "session": 77, "peerSession": 0, "received": 0,
    }  # fmt: skip
    return json.dumps({**said, **changes}).encode()


def frame(kind: int, body: bytes = b"", *, sequence: int = 0, flags: int = 0, length: int | None = None) -> bytes:
    return FRAME.pack(0xCC11, kind, flags, len(body) if length is None else length, sequence, 0) + body


def data(sequence: int, kind: int, body: bytes, *, total: int | None = None, flags: int = 1) -> bytes:
    start = struct.pack("!BxHQ", kind, 0, len(body) if total is None else total)
    return frame(DATA, start + body, sequence=sequence, flags=flags)


class Dialler:
    """A client that speaks TLS well and whatever a test wants after it."""

    def __init__(self, yard: Yard, folder: Path, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = minimum
        if (folder / "tls.crt").exists():
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self.socket = context.wrap_socket(socket.create_connection(("127.0.0.1", yard.ports[1]), DEADLINE))

    def say(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def hear(self) -> tuple[int, bytes]:
        """(type, body) of the next frame; (0, b"") at the end."""
        header = self._exactly(FRAME.size)
        if len(header) < FRAME.size:
            return 0, b""
        _, kind, _, length, _, _ = FRAME.unpack(header)
        return kind, self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        found = b""
        try:
            while len(found) < count and (part := self.socket.recv(count - len(found))):
                found += part
        except OSError:
            pass
        return found

    def ended(self) -> bool:
        """Whether the listener ends the connection."""
        while self.hear()[0]:
            pass
        return True

    def __enter__(self) -> Dialler:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def counted(link: Link, reason: str, count: int = 1) -> None:
    until(lambda: link.refusals().get(reason, 0) >= count, f"{count} x {reason!r} in {link.refusals()}")


def still_serves(yard: Yard, one: Link) -> None:
    """Replica 0 is met and heard as if nothing had happened."""
    with yard.link(0) as zero:
        zero.connect(ONE)
        zero.send(ONE, Message(MessageType.VIEW, b"still there"))
        while not (isinstance(event := one.receive(DEADLINE), Received) and event.message.head == b"still there"):
            assert event is not None
