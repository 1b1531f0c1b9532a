"""Links of a set rate on loopback, with real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.attempt import free_ports
from crosscloud_trainer.launcher.shaping import Bucket, ShapedLinks, Way, bytes_per_second

RATE = 2_000_000.0  # bytes per second
SIZE = 400_000


@pytest.mark.parametrize(
    ("text", "expected"), [("20mbit", 2.5e6), ("512kbit", 64_000), ("1gbit", 1.25e8), ("1.5mbit", 187_500)]
)
def test_rates_are_read_as_tc_writes_them(text: str, expected: float) -> None:
    assert bytes_per_second(text) == expected


@pytest.mark.parametrize("text", ["", "20", "20mb", "-1mbit", "20 mbit", "1bit", "infbit", "0gbit"])
def test_other_rates_are_refused_by_the_name_of_the_option(text: str) -> None:
    with pytest.raises(Failure, match=r"--link: found .*must be a rate of at least 8kbit, like"):
        bytes_per_second(text)


def test_a_bucket_lets_bytes_out_as_a_constant_stream_and_a_pause_earns_a_small_burst_only() -> None:
    bucket = Bucket(1000.0)
    delays = [bucket.delay(100, now=50.0) for _ in range(3)]
    assert delays == pytest.approx([0.08, 0.18, 0.28])  # a tenth of a second each, less the burst's 20 ms
    assert bucket.delay(100, now=99.0) == pytest.approx(0.08)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back all that it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def exchanged(port: int, data: bytes) -> bytes:
    """What comes back for `data`, until the other end closes."""
    with socket.create_connection(("127.0.0.1", port)) as near:
        sender = threading.Thread(target=lambda: (near.sendall(data), near.shutdown(socket.SHUT_WR)))
        sender.start()
        found = bytearray()
        while part := near.recv(65536):
            found += part
        sender.join()
        return bytes(found)


def test_bytes_arrive_whole_and_never_faster_than_the_link(echo: int) -> None:
    ((port,),) = free_ports([1])
    links = ShapedLinks([Way(0, 1, range(port, port + 1), echo)], RATE)
    try:
        data = bytes(range(256)) * (SIZE // 256)
        started = time.monotonic()
        assert exchanged(port, data) == data
        assert time.monotonic() - started >= len(data) / RATE * 0.8
    finally:
        links.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_connection_to_nobody_ends_and_a_later_one_works(echo: int) -> None:
    (nobody, port) = free_ports([1, 1])
    first, second = range(port[0], port[0] + 1), free_ports([1])[0]
    links = ShapedLinks([Way(0, 1, first, nobody[0]), Way(0, 2, second, echo)], RATE)
    try:
        with socket.create_connection(("127.0.0.1", first[0])) as near:
            assert near.recv(1) == b""
        assert exchanged(second[0], b"here") == b"here"
    finally:
        links.close()
