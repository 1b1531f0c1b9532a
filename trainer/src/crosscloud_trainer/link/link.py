"""The link of one rank: mutual TLS connections to peer ranks, in a thread of their own, behind blocking calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from crosscloud_trainer.link.addresses import Addresses
from crosscloud_trainer.link.channel import Channel, LinkSettings
from crosscloud_trainer.link.doors import Doors
from crosscloud_trainer.link.errors import FrameError, LinkClosed, LinkError, LinkUnusable
from crosscloud_trainer.link.frames import MAX_HEAD_BYTES, Message
from crosscloud_trainer.link.handshake import Authority, RankId, Self
from crosscloud_trainer.link.refusals import Refusals
from crosscloud_trainer.link.session import MessageLimit, Session
from crosscloud_trainer.link.traffic import PeerTraffic
from crosscloud_trainer.link.wire import TlsFiles

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Received:
    peer: RankId
    message: Message


@dataclass(frozen=True)
class Restarted:
    """The peer's process is another one than before: it has nothing of what was sent to the old one."""

    peer: RankId


@dataclass(frozen=True)
class Obeyed:
    """A handshake brought a higher authority; it is in force from now on."""

    authority: Authority


Event = Received | Restarted | Obeyed


@dataclass(frozen=True)
class PeerState:
    """`connections` counts those made so far; `last_fault` is why the newest one ended or could not be made."""

    connected: bool
    connections: int
    last_fault: str


class Link:
    """All calls are safe from any thread; those that wait raise the LinkError that ended the link.

    `tls` is the folder with tls.crt, tls.key and ca.crt; `peers` the file of the peer table, read again before each
    dialling; `agreement` what must be alike in all ranks, as text by name. Either side may call `connect`; the rank
    with the lower number dials. Raises LinkUnusable if the files can't be used.
    """

    def __init__(
        self,
        local_rank: int,
        tls: Path,
        peers: Path,
        agreement: Mapping[str, str],
        authority: Authority,
        settings: LinkSettings | None = None,
    ) -> None:
        files = TlsFiles(tls)
        self.me = Self(files.identity, local_rank, dict(agreement))
        self.settings = settings or LinkSettings()
        self._limit = MessageLimit(self.settings.max_message)
        self._addresses = Addresses(peers, files.identity)
        self._authority = authority
        self._refusals = Refusals()
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._unread: dict[RankId, int] = {}  # bytes received that nobody has asked for yet
        self._handed: dict[RankId, int] = {}  # bytes given to `send` that aren't in the outbox yet
        self._failure: LinkError | None = None
        self._channels: dict[RankId, Channel] = {}
        self._dialled: set[RankId] = set()
        self._doors = Doors(self, files, self._addresses, self._refusals)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    # life

    def start(self) -> None:
        """Listens for peers. Raises LinkUnusable if the port can't be had."""
        port = self._addresses.mine.link_port + self.me.local
        self._thread.start()
        try:
            self._call(self._doors.open(port))
        except OSError as fault:
            self.close()
            raise LinkUnusable(f"link port {port} can't be listened on: {fault.strerror or fault}") from fault

    def close(self) -> None:
        """Ends all connections; use `flush` before. Later calls raise LinkClosed."""
        self.fail(LinkClosed("the link is closed"))
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._call(self._doors.shut(tuple(self._channels.values())))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def __enter__(self) -> Link:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_log_fault)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # talking

    def allow(self, message_bytes: int) -> None:
        """Raises the limit for messages of either direction, once it is known how large they can be."""
        self._limit.bytes = max(self._limit.bytes, message_bytes + MAX_HEAD_BYTES)

    def connect(self, peer: RankId) -> None:
        """Begins to connect, for ever if need be, if it is on us to dial; returns at once."""
        self._check()
        self._loop.call_soon_threadsafe(self._connect, peer)

    def send(self, peer: RankId, message: Message, seconds: float | None = None) -> None:
        """Hands over a message; waits while more than `settings.outbox` bytes wait for this peer.

        The body is not copied: it must stay as it is. Raises TimeoutError, and ValueError for a body that is too large.
        """
        size = len(message.head) + memoryview(message.body).nbytes
        if size > self._limit.bytes:
            raise ValueError(f"a {message.type.name} message has {size} bytes; {self._limit.bytes} at most")
        with self._changed:
            self._wait(lambda: self._pending(peer) < self.settings.outbox, seconds)
            self._handed[peer] = self._handed.get(peer, 0) + size
        self._loop.call_soon_threadsafe(self._queue, peer, message, size)

    def receive(self, seconds: float | None = None) -> Event | None:
        """The next event, in the order in which they came; None if there was none in this time."""
        with self._changed:
            try:
                self._wait(lambda: bool(self._events), seconds)
            except TimeoutError:
                return None
            event = self._events.popleft()
            if isinstance(event, Received):
                self._unread[event.peer] -= len(event.message.body)
            return event

    def flush(self, seconds: float) -> bool:
        """Waits until each peer has all that was sent, or has ended; whether that came in time."""
        with self._changed:
            try:
                self._wait(lambda: not any(map(self._awaited, (*self._handed, *self._channels))), seconds)
            except TimeoutError:
                return False
            return True

    # what is known

    @property
    def authority(self) -> Authority:
        return self._authority

    def obey(self, authority: Authority) -> None:
        """Takes the higher of the two (home, term, view). Lower ones are no news."""
        with self._changed:
            if authority > self._authority:
                self._authority = authority
                self._add(Obeyed(authority))

    def states(self) -> dict[RankId, PeerState]:
        channels = dict(self._channels)
        return {peer: PeerState(c.connected, c.connections, c.last_fault) for peer, c in channels.items()}

    def traffic(self) -> list[PeerTraffic]:
        return [
            PeerTraffic(peer, self._addresses.is_wan(peer), dict(c.traffic.sent), dict(c.traffic.received))
            for peer, c in sorted(dict(self._channels).items())
        ]

    def refusals(self) -> dict[str, int]:
        return self._refusals.counts()

    def fail(self, error: LinkError) -> None:
        """Ends the link: every call that waits raises this. The first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # shared between threads; `_changed` is held

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, condition: Callable[[], bool], seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        self._check()
        while not condition():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("not done in time")
            self._changed.wait(left)
            self._check()

    def _pending(self, peer: RankId) -> int:
        channel = self._channels.get(peer)
        return self._handed.get(peer, 0) + (channel.session.pending_bytes if channel else 0)

    def _awaited(self, peer: RankId) -> bool:
        channel = self._channels.get(peer)
        return self._pending(peer) > 0 and not (channel and channel.peer_ended)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._changed.notify_all()

    # in the link's thread

    def channel(self, peer: RankId) -> Channel:
        """The channel to a peer, made if there is none yet."""
        if peer not in self._channels:
            session = Session(secrets.randbits(63) + 1, self._limit)
            self._channels[peer] = Channel(peer, session, self.settings, self._deliver, self._check_room, self._notify)
        return self._channels[peer]

    def restarted(self, peer: RankId) -> None:
        with self._changed:
            self._add(Restarted(peer))

    def _connect(self, peer: RankId) -> None:
        channel = self.channel(peer)
        if self.me.rank < peer and peer not in self._dialled:
            self._dialled.add(peer)
            self._doors.start(self._loop.create_task(self._doors.dial(channel)))

    def _queue(self, peer: RankId, message: Message, size: int) -> None:
        with self._changed:
            self.channel(peer).queue(message)
            self._handed[peer] -= size

    def _deliver(self, peer: RankId, message: Message) -> None:
        with self._changed:
            self._unread[peer] = self._unread.get(peer, 0) + len(message.body)
            self._add(Received(peer, message))

    def _check_room(self, peer: RankId) -> None:
        unread = self._unread.get(peer, 0)
        if unread > 4 * self._limit.bytes:
            raise FrameError("oversize", f"{unread} bytes of {peer} wait to be read; a round has less")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _log_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _log.warning("link: %s", context.get("message"), exc_info=context.get("exception"))
