"""Bytes that no rank of ours sends: refused where they come, and without harm to those who belong."""

from __future__ import annotations

import random
import socket
import struct

import pytest
from link.dialler import DATA, FRAME, HEARTBEAT, HELLO, REFUSE, Dialler, counted, data, frame, hello, still_serves
from link.yard import DEADLINE, Yard, until

from crosscloud_trainer.link import Link, MessageType, Received


def raw(yard: Yard, content: bytes) -> None:
    with socket.create_connection(("127.0.0.1", yard.ports[1]), DEADLINE) as plain:
        plain.sendall(content)
        plain.shutdown(socket.SHUT_WR)
        plain.settimeout(DEADLINE)
        try:
            while plain.recv(4096):
                pass
        except OSError:
            pass


@pytest.mark.parametrize(
    "content",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", random.Random(1).randbytes(3000), b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 500],
    ids=["http", "noise", "ssh", "zeros"],
)
def test_what_is_no_tls_is_refused(yard: Yard, one: Link, content: bytes) -> None:
    raw(yard, content)
    until(lambda: sum(one.refusals().values()) == 1, f"a refusal, has {one.refusals()}")
    still_serves(yard, one)


def test_a_port_scan_is_harmless(yard: Yard, one: Link) -> None:
    for _ in range(20):
        raw(yard, b"")
    still_serves(yard, one)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(b"\x00" * 24, "garbage", id="zeros"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "garbage", id="http"),
        pytest.param(frame(99), "unknown type", id="unknown frame type"),
        pytest.param(frame(DATA, b"x", sequence=1, flags=1), "garbage", id="data first"),
        pytest.param(frame(HEARTBEAT), "garbage", id="heartbeat first"),
        pytest.param(frame(HELLO, b"", length=2**31), "oversize", id="length of gigabytes"),
        pytest.param(frame(HELLO, b"{"), "garbage", id="half JSON"),
        pytest.param(frame(HELLO, b"[" * 16000), "garbage", id="deep JSON"),
        pytest.param(frame(HELLO, b"[1]"), "garbage", id="a list"),
        pytest.param(frame(HELLO, b'{"protocol": 1}'), "garbage", id="missing fields"),
        pytest.param(frame(HELLO, b"\xff\xfe"), "garbage", id="no UTF-8"),
        pytest.param(frame(REFUSE, b"{}"), "garbage", id="empty refusal"),
        pytest.param(frame(HELLO, b"{}", length=5000), "truncated", id="cut in the body"),
        pytest.param(FRAME.pack(0xCC11, HELLO, 0, 10, 0, 0)[:11], "truncated", id="cut in the header"),
    ],
)
def test_a_handshake_of_a_pod_of_ours_that_is_garbage_is_refused(
    yard: Yard, one: Link, words: bytes, reason: str
) -> None:
    with Dialler(yard, yard.tls(0)) as dialler:
        dialler.say(words)
        if reason != "truncated":
            assert dialler.ended()
    counted(one, reason)
    assert one.states() == {}
    still_serves(yard, one)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(b"\x00" * 24, "garbage", id="zeros"),
        pytest.param(frame(99), "unknown type", id="unknown frame type"),
        pytest.param(frame(HELLO, b"{}"), "garbage", id="second handshake"),
        pytest.param(data(1, 250, b""), "unknown type", id="unknown message type"),
        pytest.param(data(2, 4, b"x"), "garbage", id="gap in sequence"),
        pytest.param(data(1, 4, b"x", flags=0), "garbage", id="continues nothing"),
        pytest.param(data(1, 4, b"x", flags=3), "garbage", id="unknown flags"),
        pytest.param(data(1, 4, b"xx", total=1), "garbage", id="body too long"),
        pytest.param(data(1, 4, b"x", total=2**40), "oversize", id="total of terabytes"),
        pytest.param(frame(DATA, b"", sequence=1, flags=1, length=2**30), "oversize", id="length of gigabytes"),
        pytest.param(
            frame(DATA, struct.pack("!BxHQ", 4, 60000, 0), sequence=1, flags=1), "oversize", id="head too long"
        ),
        pytest.param(frame(DATA, struct.pack("!BxHQ", 4, 90, 0), sequence=1, flags=1), "garbage", id="head cut short"),
        pytest.param(frame(DATA, b"xy", sequence=1, flags=1), "garbage", id="start cut short"),
        pytest.param(data(1, 4, b"first", total=9) + data(2, 4, b"again"), "garbage", id="starts twice"),
        pytest.param(FRAME.pack(0xCC11, HEARTBEAT, 0, 0, 0, 5), "garbage", id="acknowledges what was not sent"),
        pytest.param(frame(HEARTBEAT, b"x"), "oversize", id="heartbeat with body"),
    ],
)
def test_an_established_stream_that_breaks_the_protocol_is_ended(
    yard: Yard, one: Link, words: bytes, reason: str
) -> None:
    with Dialler(yard, yard.tls(0)) as dialler:
        dialler.say(frame(HELLO, hello(yard)))
        assert dialler.hear()[0] == HELLO
        dialler.say(words)
        assert dialler.ended()
    counted(one, reason)
    assert one.receive(0.05) is None
    still_serves(yard, one)


def test_messages_of_a_hand_written_peer_arrive(yard: Yard, one: Link) -> None:
    """The other tests' hand-written frames would be accepted if they were not wrong."""
    with Dialler(yard, yard.tls(0)) as dialler:
        dialler.say(frame(HELLO, hello(yard)))
        assert dialler.hear()[0] == HELLO
        dialler.say(data(1, 4, b"first", total=9), frame(DATA, b"rest", sequence=2), data(3, 1, b""), data(3, 1, b""))
        event = one.receive(DEADLINE)
        assert isinstance(event, Received)
        assert (event.message.type, bytes(event.message.body)) == (MessageType.PAYLOAD, b"firstrest")
        event = one.receive(DEADLINE)
        assert isinstance(event, Received)
        assert event.message.type is MessageType.VIEW
        assert one.receive(0.1) is None
    assert one.refusals() == {}
