"""Links of a set rate between the replicas of a local run, without root: a proxy on loopback that passes bytes on no
faster than a bucket of tokens allows.

Each pair of replicas has one link; a direction's rate is shared by all connections that go over it, whoever dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.failures import invalid

_RATE = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(k|m|g)?bit$")
_UNITS = {None: 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST_BITS = 8_000
_CHUNK = 16 * 1024
_BURST_SECONDS = 0.02  # what may go at once after a pause


def bytes_per_second(text: str) -> float:
    """A rate as `tc` writes it: 20mbit, 512kbit, 1gbit; powers of 1000. Raises Failure(INVALID_INPUT)."""
    found = _RATE.fullmatch(text)
    bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if bits < _LEAST_BITS:
        raise invalid([Problem("--link", text, "must be a rate of at least 8kbit, like 512kbit, 20mbit or 1gbit")])
    return bits / 8


class Bucket:
    """One direction of a link. Bytes leave it as a constant stream, after a pause a small burst at once."""

    def __init__(self, rate: float) -> None:
        """`rate` is in bytes per second."""
        self._rate = rate
        self._free_at = 0.0

    def delay(self, size: int, now: float) -> float:
        """Seconds until `size` more bytes have left, at time `now`; takes them."""
        self._free_at = max(self._free_at, now - _BURST_SECONDS) + size / self._rate
        return max(0.0, self._free_at - now)


@dataclass(frozen=True)
class Way:
    """Ports of one replica as another one dials them: `ports[k]` leads to `target + k`."""

    source: int
    destination: int
    ports: range
    target: int


class ShapedLinks:
    """The running proxy. It serves in a thread until `close`."""

    def __init__(self, ways: list[Way], rate: float) -> None:
        """Raises OSError where a port is taken."""
        self._buckets: Mapping[tuple[int, int], Bucket] = {
            direction: Bucket(rate)
            for way in ways
            for direction in ((way.source, way.destination), (way.destination, way.source))
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        try:
            for way in ways:
                for number, port in enumerate(way.ports):
                    self._run(self._listen(way, port, way.target + number)).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._run(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: object) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, way: Way, port: int, target: int) -> None:
        listener = socket.create_server(("127.0.0.1", port), backlog=64)
        listener.setblocking(False)
        self._loop.create_task(self._accept(listener, way, target))

    async def _accept(self, listener: socket.socket, way: Way, target: int) -> None:
        connections: set[asyncio.Task[None]] = set()
        with listener:
            while True:
                near, _ = await self._loop.sock_accept(listener)
                task = self._loop.create_task(self._join(near, way, target))
                connections.add(task)
                task.add_done_callback(connections.discard)

    async def _join(self, near: socket.socket, way: Way, target: int) -> None:
        """Both directions of one connection, until either end closes it."""
        with near, socket.socket() as far:
            far.setblocking(False)
            with contextlib.suppress(OSError):
                await self._loop.sock_connect(far, ("127.0.0.1", target))
                there = self._buckets[way.source, way.destination]
                back = self._buckets[way.destination, way.source]
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(near, far, there))
                    both.create_task(self._carry(far, near, back))

    async def _carry(self, source: socket.socket, sink: socket.socket, bucket: Bucket) -> None:
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(source, _CHUNK):
                await asyncio.sleep(bucket.delay(len(data), self._loop.time()))
                await self._loop.sock_sendall(sink, data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def shaped(ways: list[Way], rate: float | None) -> Iterator[None]:
    """The links of `ways` while inside; nothing where no rate is asked for."""
    if rate is None or not ways:
        yield
        return
    links = ShapedLinks(ways, rate)
    try:
        yield
    finally:
        links.close()
