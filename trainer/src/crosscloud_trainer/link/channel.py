"""The stream to one peer rank on whatever connection there is. Runs in the link's thread only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from crosscloud_trainer.link.errors import FrameError
from crosscloud_trainer.link.frames import FRAME, FrameHeader, FrameType, Message
from crosscloud_trainer.link.handshake import RankId, Refusal, read_refusal
from crosscloud_trainer.link.session import Greeting, Session
from crosscloud_trainer.link.traffic import OVERHEAD, Traffic, kind_of
from crosscloud_trainer.link.wire import ConnectionEnded, Wire


@dataclass(frozen=True)
class LinkSettings:
    """Times in seconds, sizes in bytes.

    A peer that is not heard for `dead_after` is dialled anew, for ever, after a pause that doubles from `backoff` to
    `backoff_cap`. `outbox` is what may wait for one peer before `send` blocks; `max_message` is the largest
    message until the link is told of larger ones.
    """

    heartbeat: float = 2.0
    dead_after: float = 10.0
    handshake: float = 10.0
    backoff: float = 0.2
    backoff_cap: float = 5.0
    max_handshakes: int = 128  # unfinished ones at a time
    outbox: int = 256 * 2**20
    max_message: int = 64 * 2**20
    acknowledge_every: int = 4 * 2**20


class PeerRefused(Exception):
    """The peer sent a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class PeerEnded(ConnectionEnded):
    """The peer has said that it ends; whoever waits for it will learn more elsewhere."""


class Channel:
    """`deliver` takes each complete message; `changed` is called when the outbox has shrunk or the state differs.

    `check_room` raises FrameError if messages of this peer wait to be read by more than a round can have.
    """

    def __init__(
        self,
        peer: RankId,
        session: Session,
        settings: LinkSettings,
        deliver: Callable[[RankId, Message], None],
        check_room: Callable[[RankId], None],
        changed: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.session = session
        self.traffic = Traffic()
        self.last_fault = "not dialled yet"
        self.connections = 0
        self.ending = False
        self.peer_ended = False  # it has said so, and no other process of it has come since
        self._settings = settings
        self._deliver = deliver
        self._check_room = check_room
        self._changed = changed
        self._wire: Wire | None = None
        self._wake = asyncio.Event()
        self._acknowledgement_due = False
        self._unacknowledged = 0  # bytes received since we last told

    @property
    def connected(self) -> bool:
        return self._wire is not None

    def queue(self, message: Message) -> None:
        self.session.queue(message)
        self._wake.set()

    def install(self, wire: Wire, greeting: Greeting) -> bool:
        """Takes up the stream on this connection; an older one ends. True if the peer's process is a new one."""
        restarted = self.session.greet(greeting)
        if self._wire is not None:
            self._wire.abort()
        self._wire = wire
        self.peer_ended = False
        self.connections += 1
        self._changed()
        return restarted

    async def run(self, wire: Wire) -> None:
        """Carries the stream until the connection ends.

        Always raises: ConnectionEnded, FrameError or PeerRefused.
        """
        tasks = [asyncio.create_task(work(wire)) for work in (self._read, self._write, self._watch)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.leave(wire)

    async def end(self, seconds: float) -> None:
        """Tells the peer that this process ends, with a last acknowledgement, if there is a connection."""
        self.ending = True
        wire = self._wire
        if wire is None:
            return
        with contextlib.suppress(ConnectionEnded, TimeoutError):
            async with asyncio.timeout(seconds):
                await wire.write(FrameHeader(FrameType.BYE, 0, 0, 0, self.session.received).pack())
        await wire.finish(seconds)

    def leave(self, wire: Wire) -> None:
        """Ends this connection, if it has not been replaced yet."""
        wire.abort()
        if self._wire is wire:
            self._wire = None
            self._changed()

    def _check_current(self, wire: Wire) -> None:
        if self._wire is not wire:
            raise ConnectionEnded("replaced by a newer connection")

    async def _read(self, wire: Wire) -> None:
        while True:
            header, body = await wire.read_frame()
            self._check_current(wire)
            before = self.session.pending_bytes
            self.session.acknowledge(header.acknowledged)
            if self.session.pending_bytes < before:
                self._changed()
            if header.type is FrameType.REFUSE:
                raise PeerRefused(read_refusal(body))
            if header.type is FrameType.BYE:
                self.peer_ended = True
                raise PeerEnded("the peer has ended")
            if header.type is FrameType.HELLO:
                raise FrameError("garbage", "a second handshake on one connection")
            self.traffic.received[OVERHEAD] += FRAME.size
            if header.type is FrameType.DATA:
                self._take(header, body)

    def _take(self, header: FrameHeader, body: bytes) -> None:
        self._check_room(self.peer)  # before the frame counts as received
        kind, message = self.session.accept(header, body)
        self.traffic.received[kind_of(kind)] += len(body)
        self._unacknowledged += len(body)
        if message is not None or self._unacknowledged >= self._settings.acknowledge_every:
            self._acknowledgement_due = True
            self._wake.set()
        if message is not None:
            self._deliver(self.peer, message)

    async def _write(self, wire: Wire) -> None:
        while True:
            self._check_current(wire)
            frame = self.session.next_unsent()
            if frame is not None:
                self.traffic.sent[OVERHEAD] += FRAME.size
                self.traffic.sent[kind_of(frame.message_type)] += frame.length
                await self._send(wire, frame.header(self.session.received), *frame.parts)
                continue
            self._wake.clear()
            idle = not self._acknowledgement_due
            if idle:
                try:
                    async with asyncio.timeout(self._settings.heartbeat):
                        await self._wake.wait()
                    continue
                except TimeoutError:
                    pass
                self._check_current(wire)
            heartbeat = FrameHeader(FrameType.HEARTBEAT, 0, 0, 0, self.session.received)
            self.traffic.sent[OVERHEAD] += FRAME.size
            await self._send(wire, heartbeat.pack())

    async def _send(self, wire: Wire, *parts: bytes | bytearray | memoryview) -> None:
        self._acknowledgement_due = False
        self._unacknowledged = 0
        await wire.write(*parts)

    async def _watch(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - wire.last_heard
            if silent >= self._settings.dead_after:
                raise ConnectionEnded(f"not heard for {silent:.1f} s")
            await asyncio.sleep(self._settings.dead_after - silent)
