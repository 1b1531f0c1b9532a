"""One side of the stream between two ranks, which outlives its connections. Pure: no sockets, no clock.

A session has a random number per process. Both sides tell the other's number and how many frames they have of it when
they connect: frames that were lost with a connection are sent again, those that arrive twice are dropped, and a process
that was started anew is recognised by its new number (its stream starts from nothing then, on both sides).
"""

from __future__ import annotations

from dataclasses import dataclass

from crosscloud_trainer.link.errors import FrameError
from crosscloud_trainer.link.frames import (
    FIRST,
    FRAME_BODY_BYTES,
    MESSAGE,
    FrameHeader,
    FrameType,
    Message,
    MessageType,
    parse_message,
)

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Greeting:
    """What one side knows of the stream: its own number, the other's (0: none yet), frames it has of the other."""

    session: int
    peer_session: int
    received: int


@dataclass(frozen=True)
class DataFrame:
    """A frame that waits for its acknowledgement. `message_type` is for accounting."""

    sequence: int
    flags: int
    parts: tuple[Buffer, ...]
    length: int
    message_type: MessageType

    def header(self, acknowledged: int) -> bytes:
        return FrameHeader(FrameType.DATA, self.flags, self.length, self.sequence, acknowledged).pack()


class _Assembly:
    """A message of which not all frames are here."""

    def __init__(self, kind: MessageType, head: bytes, total: int) -> None:
        self.type = kind
        self.head = head
        self.body = bytearray(total)  # pages are only taken as they are written
        self.filled = 0

    def add(self, part: Buffer) -> None:
        if self.filled + len(part) > len(self.body):
            found = f"{self.filled + len(part)} bytes of body"
            raise FrameError("garbage", f"a {self.type.name} message of {len(self.body)} bytes has {found}")
        self.body[self.filled : self.filled + len(part)] = part
        self.filled += len(part)


@dataclass
class MessageLimit:
    """The largest body of a message, shared by all sessions of a link. A round's size is known late."""

    bytes: int


class Session:
    """`number` must be random and not 0. Not safe for several threads."""

    def __init__(self, number: int, limit: MessageLimit) -> None:
        self.number = number
        self._limit = limit
        self.peer_number = 0
        self.received = 0  # frames of the other that are here
        self.pending_bytes = 0  # queued and not acknowledged
        self._frames: dict[int, DataFrame] = {}  # sent or not, not acknowledged, by sequence
        self._last = 0
        self._acknowledged = 0
        self._cursor = 1  # next sequence for the present connection
        self._assembly: _Assembly | None = None

    def greeting(self) -> Greeting:
        return Greeting(self.number, self.peer_number, self.received)

    def greet(self, peer: Greeting) -> bool:
        """Takes up the stream on a new connection. True if the other is not the process that was known before.

        Raises FrameError if the other claims frames that were never sent.
        """
        restarted = self.peer_number not in (0, peer.session)
        if restarted:
            self._frames.clear()
            self.pending_bytes = 0
            self._last = self._acknowledged = 0
        if self.peer_number != peer.session:
            self.peer_number = peer.session
            self.received = 0
            self._assembly = None
        known = peer.received if peer.peer_session == self.number else 0
        if not self._acknowledged <= known <= self._last:
            found = f"the peer has {known} frames of ours"
            raise FrameError("garbage", f"{found}; must be {self._acknowledged} to {self._last}")
        self._cursor = known + 1
        self.acknowledge(known)
        return restarted

    def queue(self, message: Message) -> None:
        """Adds the frames of a message. Its body is referred to, not copied."""
        body = memoryview(message.body).cast("B") if len(message.body) else memoryview(b"")
        start = MESSAGE.pack(message.type, len(message.head), len(body)) + message.head
        first = body[:FRAME_BODY_BYTES]
        self._append(message.type, FIRST, (start, first) if len(first) else (start,))
        for offset in range(FRAME_BODY_BYTES, len(body), FRAME_BODY_BYTES):
            self._append(message.type, 0, (body[offset : offset + FRAME_BODY_BYTES],))

    def _append(self, kind: MessageType, flags: int, parts: tuple[Buffer, ...]) -> None:
        self._last += 1
        length = sum(len(part) for part in parts)
        self._frames[self._last] = DataFrame(self._last, flags, parts, length, kind)
        self.pending_bytes += length

    @property
    def has_unsent(self) -> bool:
        return self._cursor <= self._last

    def next_unsent(self) -> DataFrame | None:
        """The next frame that the present connection has not carried yet."""
        if not self.has_unsent:
            return None
        self._cursor += 1
        return self._frames[self._cursor - 1]

    def acknowledge(self, sequence: int) -> None:
        """The other has all frames up to this one. Raises FrameError for frames that were never sent."""
        if sequence >= self._cursor and sequence > self._acknowledged:
            raise FrameError("garbage", f"frame {sequence} is acknowledged, the last one sent is {self._cursor - 1}")
        for number in range(self._acknowledged + 1, sequence + 1):
            self.pending_bytes -= self._frames.pop(number).length
        self._acknowledged = max(self._acknowledged, sequence)

    def accept(self, header: FrameHeader, body: bytes) -> tuple[MessageType | None, Message | None]:
        """Takes a DATA frame: its message's type (None: it was here before) and, if complete now, the message.

        Raises FrameError; nothing is taken then.
        """
        if header.sequence <= self.received:
            return None, None
        if header.sequence != self.received + 1:
            raise FrameError("garbage", f"frame {header.sequence} follows frame {self.received}")
        if bool(header.flags & FIRST) != (self._assembly is None):
            raise FrameError("garbage", f"frame {header.sequence} starts or continues a message out of turn")
        assembly = self._assembly
        if assembly is None:
            kind, head, total, part = parse_message(body, self._limit.bytes)
            assembly = _Assembly(kind, head, total)
            assembly.add(part)
        else:
            assembly.add(body)
        self.received += 1
        if assembly.filled < len(assembly.body):
            self._assembly = assembly
            return assembly.type, None
        self._assembly = None
        return assembly.type, Message(assembly.type, assembly.head, assembly.body)
