"""How connections come about: dialling, accepting, and the handshake on both sides. Runs in the link's thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Iterable
from typing import Protocol

from crosscloud_trainer.contract import dump_json
from crosscloud_trainer.link.addresses import Addresses
from crosscloud_trainer.link.channel import Channel, LinkSettings, PeerEnded, PeerRefused
from crosscloud_trainer.link.errors import Disagreement, Fenced, FrameError, LinkError
from crosscloud_trainer.link.frames import FRAME, FrameHeader, FrameType
from crosscloud_trainer.link.handshake import (
    Authority,
    Hello,
    RankId,
    Reason,
    Refusal,
    Self,
    judge,
    judge_certificate,
    read_hello,
    read_refusal,
)
from crosscloud_trainer.link.refusals import Refusals
from crosscloud_trainer.link.traffic import OVERHEAD
from crosscloud_trainer.link.wire import ConnectionEnded, TlsFiles, Wire, refused_tls
from crosscloud_trainer.pki import InvalidIdentity, PodIdentity

_log = logging.getLogger(__name__)
_FAREWELL_SECONDS = 1.0  # to let the last words arrive
_BROKEN = (ConnectionEnded, FrameError, PeerRefused, InvalidIdentity, OSError)


class Host(Protocol):
    """What the doors need of the link that they belong to."""

    me: Self
    settings: LinkSettings

    @property
    def authority(self) -> Authority: ...
    def obey(self, authority: Authority) -> None: ...
    def channel(self, peer: RankId) -> Channel: ...
    def restarted(self, peer: RankId) -> None: ...
    def fail(self, error: LinkError) -> None: ...


class Doors:
    """Everything between a socket and a channel."""

    def __init__(self, host: Host, files: TlsFiles, addresses: Addresses, refusals: Refusals) -> None:
        self._host = host
        self._files = files
        self._addresses = addresses
        self._refusals = refusals
        self._server: asyncio.Server | None = None
        self._handshakes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # accepting

    async def open(self, port: int) -> None:
        """Listens on all addresses. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Wire(loop, self._accepted), "0.0.0.0", port)  # noqa: S104 - a pod's own network

    async def shut(self, channels: Iterable[Channel]) -> None:
        """Takes no more connections and ends those that there are."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(channel.end(_FAREWELL_SECONDS) for channel in channels))
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were aborted close in the loop's next turn
        await asyncio.sleep(0)

    def start(self, work: asyncio.Task[None]) -> None:
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    def _accepted(self, wire: Wire) -> None:
        if self._handshakes >= self._host.settings.max_handshakes:
            self._refusals.add("too many handshakes", wire.address, f"{self._handshakes} are unfinished")
            wire.abort()
            return
        self._handshakes += 1
        self.start(asyncio.create_task(self._serve(wire)))

    async def _serve(self, wire: Wire) -> None:
        address = wire.address
        try:
            channel = await self._meet(wire, address)
        finally:
            self._handshakes -= 1
        if channel is None:
            return
        try:
            await channel.run(wire)
        except _BROKEN as fault:
            self._lost(channel, address, fault, established=True)

    async def _meet(self, wire: Wire, address: str) -> Channel | None:
        """The listening side's handshake; None if nothing came of it, which is counted then."""
        channel = None
        seconds = self._host.settings.handshake
        try:
            async with asyncio.timeout(seconds):
                await wire.secure(self._files.server, seconds)
                channel = await self._greet_dialler(wire)
        except PeerRefused as fault:
            self._refusals.add("refused by peer", address, str(fault))
            self._heed(fault.refusal)
        except FrameError as fault:
            self._refusals.add(fault.reason, address, str(fault))
        except InvalidIdentity as fault:
            self._refusals.add("certificate", address, str(fault))
        except TimeoutError:
            self._refusals.add("slow handshake", address, f"not done in {seconds:g} s")
        except ConnectionEnded as fault:
            reason = "truncated" if fault.partial else "broken handshake"
            self._refusals.add(reason, address, f"the connection ended in the handshake ({fault})")
        except OSError as fault:
            self._refusals.add(*_placed(address, refused_tls(fault)))
        finally:
            if channel is None:
                wire.abort()
        return channel

    async def _greet_dialler(self, wire: Wire) -> Channel | None:
        certified = wire.certified()
        refusal = judge_certificate(certified, self._host.me.pod)
        if refusal is not None:
            await self._refuse(wire, refusal)
            return None
        hello = await self._heard(wire, certified)
        if hello is None:
            return None
        channel = self._host.channel(hello.rank)
        self._take_up(channel, wire, hello)
        try:
            await self._say(channel, wire)
        except BaseException:
            channel.leave(wire)
            raise
        return channel

    # dialling

    async def dial(self, channel: Channel) -> None:
        """Keeps a channel connected, for ever."""
        settings = self._host.settings
        failures = 0
        while True:
            made = channel.connections
            try:
                await self._dial_once(channel)
            except _BROKEN as fault:
                established = channel.connections > made
                if isinstance(fault, ssl.SSLError) and not established:
                    self._refusals.add(*_placed(str(channel.peer), refused_tls(fault)))
                self._lost(channel, str(channel.peer), fault, established=established)
            except Exception as fault:  # noqa: BLE001 - an address no one foresaw; the next table may have a better one
                before = channel.last_fault
                self._lost(channel, str(channel.peer), fault, established=channel.connections > made)
                if channel.last_fault != before:
                    _log.warning("%s can't be dialled: %s: %s", channel.peer, type(fault).__name__, fault)
            failures = 0 if channel.connections > made else failures + 1
            pause = min(settings.backoff_cap, settings.backoff * 2.0 ** min(failures, 30))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads diallers, guards nothing

    async def _dial_once(self, channel: Channel) -> None:
        """One connection from its beginning to its end; always raises, one of _BROKEN for all that networks do."""
        self._addresses.refresh()
        target = self._addresses.target(channel.peer)
        if target is None:
            raise ConnectionEnded(f"{channel.peer} is not in the peer table")
        loop = asyncio.get_running_loop()
        wire = Wire(loop)
        seconds = self._host.settings.handshake
        try:
            async with asyncio.timeout(seconds):
                await loop.create_connection(lambda: wire, target.host, target.port)
                await wire.secure(self._files.client, seconds, target.server_name)
                await self._greet_listener(channel, wire)
        except TimeoutError as fault:
            wire.abort()
            raise ConnectionEnded(f"no handshake with {target.host}:{target.port} in time") from fault
        except BaseException:
            wire.abort()
            raise
        await channel.run(wire)

    async def _greet_listener(self, channel: Channel, wire: Wire) -> None:
        """The dialling side's handshake. Raises one of _BROKEN."""
        certified = wire.certified()
        refusal = judge_certificate(certified, self._host.me.pod)
        if refusal is not None:
            await self._refuse(wire, refusal)
            raise ConnectionEnded(refusal.message)
        await self._say(channel, wire)
        hello = await self._heard(wire, certified, channel.peer)
        if hello is None:
            raise ConnectionEnded("the peer was refused")
        self._take_up(channel, wire, hello)

    # both

    async def _heard(self, wire: Wire, certified: PodIdentity, expected: RankId | None = None) -> Hello | None:
        """The peer's handshake; None if it was refused."""
        header, body = await wire.read_frame()
        wire.handshake_bytes = FRAME.size + len(body)
        if header.type is FrameType.REFUSE:
            raise PeerRefused(read_refusal(body))
        if header.type is not FrameType.HELLO:
            raise FrameError("garbage", f"a {header.type.name} frame before the handshake")
        hello = read_hello(body)
        refusal = hello if isinstance(hello, Refusal) else self._judge(hello, certified, expected)
        if isinstance(hello, Hello) and refusal is None:
            return hello
        if refusal is not None:
            await self._refuse(wire, refusal)
        return None

    def _judge(self, hello: Hello, certified: PodIdentity, expected: RankId | None) -> Refusal | None:
        if expected is not None and hello.rank != expected:
            return Refusal(Reason.IDENTITY, f"dialled {expected}, met {hello.rank}")
        peer = self._addresses.find(hello.rank)
        if peer is None or peer.incarnation < hello.incarnation:
            self._addresses.refresh()
            peer = self._addresses.find(hello.rank)
        return judge(hello, certified, self._host.me, peer.incarnation if peer else None)

    def _take_up(self, channel: Channel, wire: Wire, hello: Hello) -> None:
        """The peer is who it must be: the stream goes on here, under the higher authority of the two."""
        channel.traffic.received[OVERHEAD] += wire.handshake_bytes
        again = channel.connections > 0
        if channel.install(wire, hello.greeting):
            self._host.restarted(channel.peer)
        if again:
            _log.warning("the link with %s is back", channel.peer)
        self._host.obey(hello.authority)

    async def _say(self, channel: Channel, wire: Wire) -> None:
        body = self._host.me.hello(channel.peer, self._host.authority, channel.session.greeting())
        channel.traffic.sent[OVERHEAD] += FRAME.size + len(body)
        await wire.write(FrameHeader(FrameType.HELLO, 0, len(body), 0, 0).pack() + body)

    async def _refuse(self, wire: Wire, refusal: Refusal) -> None:
        """Tells the peer why, counts it, and draws the conclusion for ourselves."""
        self._refusals.add(refusal.reason.value, wire.address, refusal.message)
        if refusal.reason is Reason.NEW_ATTEMPT:
            self._host.fail(Fenced(f"a newer attempt has begun: {refusal.message}"))
        if refusal.reason is Reason.AGREEMENT:
            self._host.fail(Disagreement(refusal.message))
        body = dump_json(refusal).encode()
        with contextlib.suppress(ConnectionEnded):
            await wire.write(FrameHeader(FrameType.REFUSE, 0, len(body), 0, 0).pack() + body)
        await wire.finish(_FAREWELL_SECONDS)

    def _heed(self, refusal: Refusal) -> None:
        """A peer, whose certificate is of our attempt or was not judged older, refuses us."""
        if refusal.reason in (Reason.OLD_ATTEMPT, Reason.OLD_INCARNATION):
            self._host.fail(Fenced(f"a peer knows a newer one: {refusal.message}"))
        if refusal.reason is Reason.AGREEMENT:
            self._host.fail(Disagreement(refusal.message))

    def _lost(self, channel: Channel, address: str, fault: BaseException, *, established: bool) -> None:
        """A connection has ended, or none could be made."""
        channel.last_fault = str(fault) or type(fault).__name__
        if established and not channel.ending and not isinstance(fault, PeerEnded):
            _log.warning("lost the link with %s: %s", channel.peer, channel.last_fault)
        if isinstance(fault, PeerRefused):
            self._heed(fault.refusal)
        if isinstance(fault, FrameError):
            self._refusals.add(fault.reason, address, f"{channel.peer}: {fault}")


def _placed(address: str, refused: tuple[str, str]) -> tuple[str, str, str]:
    reason, message = refused
    return reason, address, message
