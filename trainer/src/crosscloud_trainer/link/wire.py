"""One TLS connection as asyncio sees it: exact reads, writes that wait, and when the peer was last heard."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from crosscloud_trainer.link.errors import LinkUnusable
from crosscloud_trainer.link.frames import FRAME, FrameHeader, parse_frame
from crosscloud_trainer.pki import PodIdentity, identity_of

_READ_AHEAD_BYTES = 1024 * 1024  # a small one would hold a long, fast path below its bandwidth
_WRITE_BEHIND_BYTES = 1024 * 1024


class ConnectionEnded(Exception):
    """The connection is gone; `partial` says whether it ended inside a frame."""

    def __init__(self, message: str, *, partial: bool = False) -> None:
        super().__init__(message)
        self.partial = partial


class TlsFiles:
    """The pod's certificate, key and issuer. Raises LinkUnusable if they can't be read or don't fit."""

    def __init__(self, folder: Path) -> None:
        certificate, key, issuer = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
        try:
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, issuer)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, issuer)
            self.identity = identity_of(ssl.PEM_cert_to_DER_cert(certificate.read_text()))
        except (OSError, ValueError) as fault:
            problem = f"certificates of the link in {folder}: {fault}"
            raise LinkUnusable(f"{problem}; tls.crt, tls.key and ca.crt must be of this job") from fault


def _context(protocol: int, certificate: Path, key: Path, issuer: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The name in the certificate is judged by its URI, against the peer table: that tells an older attempt from an
    # intruder, and says so.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(issuer)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


class Wire(asyncio.Protocol):
    """A connection, of which `secure` is to be called first. `accepted` is called for one that the peer has dialled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, accepted: Callable[[Wire], None] | None = None) -> None:
        self._loop = loop
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self._reader = asyncio.StreamReader(limit=_READ_AHEAD_BYTES, loop=loop)
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended: str | None = None
        self.last_heard = loop.time()
        self._closed = asyncio.Event()
        self.handshake_bytes = 0  # of the peer's

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()  # the first bytes belong to TLS, which is not there yet
        if self._accepted is not None:
            self._accepted(self)

    def data_received(self, data: bytes) -> None:
        self.last_heard = self._loop.time()
        self._reader.feed_data(data)

    def eof_received(self) -> bool:
        self._reader.feed_eof()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = str(exc) if exc else "closed by the peer"
        self._reader.feed_eof()
        self._writable.set()
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # called by the link

    @property
    def address(self) -> str:
        found: Any = self._transport.get_extra_info("peername") if self._transport else None
        return f"{found[0]}:{found[1]}" if isinstance(found, tuple) else "unknown address"

    async def secure(self, context: ssl.SSLContext, seconds: float, server_name: str | None = None) -> None:
        """TLS on a connection that has just been made; whoever dialled says whom. Raises OSError (ssl.SSLError is one).

        Not by `create_connection`, which may close a transport twice, as `finish` must not.
        """
        assert self._transport is not None
        transport = await self._loop.start_tls(
            self._transport,
            self,
            context,
            server_side=server_name is None,
            server_hostname=server_name,
            ssl_handshake_timeout=seconds,
        )
        if transport is None:
            raise ConnectionResetError("closed during the TLS handshake")
        self._transport = transport
        self._reader.set_transport(transport)
        transport.set_write_buffer_limits(high=_WRITE_BEHIND_BYTES)

    def certified(self) -> PodIdentity:
        """Who the verified certificate of the peer names. Raises InvalidIdentity."""
        assert self._transport is not None
        ssl_object: ssl.SSLObject = self._transport.get_extra_info("ssl_object")
        return identity_of(ssl_object.getpeercert(binary_form=True) or b"")

    async def read_frame(self) -> tuple[FrameHeader, bytes]:
        """The next frame. Raises ConnectionEnded or FrameError."""
        header = parse_frame(await self._read(FRAME.size, inside=False))
        return header, await self._read(header.length, inside=True)

    async def _read(self, count: int, *, inside: bool) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as fault:
            message = self._ended or "closed by the peer"
            raise ConnectionEnded(message, partial=inside or bool(fault.partial)) from fault
        except OSError as fault:
            raise ConnectionEnded(str(fault)) from fault

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Hands bytes to TLS and waits while too many are on their way. Raises ConnectionEnded."""
        if self._ended is not None or self._transport is None:
            raise ConnectionEnded(self._ended or "not connected")
        self._transport.writelines(parts)
        await self._writable.wait()
        if self._ended is not None:
            raise ConnectionEnded(self._ended)

    async def finish(self, seconds: float) -> None:
        """Ends the connection after what was written, and without waiting any longer than this."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()  # closed twice, a TLS transport of Python 3.11.2 (Debian's) can't be aborted
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def refused_tls(fault: BaseException) -> tuple[str, str]:
    """(reason, message) of a TLS handshake that failed."""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return "certificate", f"certificate: {fault.verify_message}"
    if isinstance(fault, ssl.SSLError):
        text = fault.reason or str(fault)
        certificate = "CERTIFICATE" in text or "UNKNOWN_CA" in text
        return ("certificate" if certificate else "garbage"), f"TLS: {text}"
    if isinstance(fault, TimeoutError | ConnectionAbortedError):
        return "slow handshake", "the handshake took too long"
    return "broken handshake", f"the connection ended in the handshake ({fault})"
