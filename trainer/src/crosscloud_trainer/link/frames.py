"""Frames: what stands on the wire inside TLS.

    magic u16 | frame type u8 | flags u8 | length u32 | sequence u64 | acknowledged u64 | body (length bytes)

Big-endian. Only DATA frames have a sequence (from 1); every frame acknowledges all DATA frames up to `acknowledged`. A
message is one or more DATA frames in a row; the first one starts with

    message type u8 | zero u8 | head length u16 | body length u64 | head

and everything after it is the message's body. Lengths are judged before anything is read or reserved.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from crosscloud_trainer.link.errors import FrameError

PROTOCOL_VERSION = 1
MAGIC = 0xCC11
FRAME = struct.Struct("!HBBIQQ")
MESSAGE = struct.Struct("!BxHQ")
FRAME_BODY_BYTES = 256 * 1024  # what is sent again after a cut is at most what was on its way
MAX_FRAME_BYTES = FRAME_BODY_BYTES + 4096 + MESSAGE.size
MAX_HANDSHAKE_BYTES = 16 * 1024
MAX_HEAD_BYTES = 4096
FIRST = 1  # flag: the frame starts a message


class FrameType(enum.IntEnum):
    HELLO = 1
    REFUSE = 2
    HEARTBEAT = 3
    DATA = 4
    BYE = 5  # a heartbeat, and the last frame of a process that ends as it should


class MessageType(enum.IntEnum):
    """What ranks tell each other. What each means stands in membership/rounds.py; the last three: stage_link.py."""

    VIEW = 1
    LAYOUT = 2
    ANNOUNCE = 3
    PAYLOAD = 4
    RESULT = 5
    PREPARED = 6
    ACTIVATION = 7
    GRADIENT = 8
    TOTALS = 9


_LIMITS = {
    FrameType.HELLO: MAX_HANDSHAKE_BYTES,
    FrameType.REFUSE: MAX_HANDSHAKE_BYTES,
    FrameType.HEARTBEAT: 0,
    FrameType.BYE: 0,
    FrameType.DATA: MAX_FRAME_BYTES,
}


@dataclass(frozen=True)
class FrameHeader:
    type: FrameType
    flags: int
    length: int
    sequence: int
    acknowledged: int

    def pack(self) -> bytes:
        return FRAME.pack(MAGIC, self.type, self.flags, self.length, self.sequence, self.acknowledged)


@dataclass(frozen=True)
class Message:
    """A typed message. `body` is not copied on its way out: it must not change until it is acknowledged."""

    type: MessageType
    head: bytes
    body: bytes | bytearray | memoryview = b""


def parse_frame(data: bytes) -> FrameHeader:
    """The header in these FRAME.size bytes. Raises FrameError for what no frame of ours can be."""
    magic, kind, flags, length, sequence, acknowledged = FRAME.unpack(data)
    if magic != MAGIC:
        raise FrameError("garbage", f"a frame starts with {data[:2].hex()}, must start with {MAGIC:04x}")
    try:
        frame_type = FrameType(kind)
    except ValueError as fault:
        raise FrameError("unknown type", f"frame type {kind} is unknown") from fault
    if length > _LIMITS[frame_type]:
        allowed = f"must be at most {_LIMITS[frame_type]}"
        raise FrameError("oversize", f"a {frame_type.name} frame says {length} bytes, {allowed}")
    if (frame_type is FrameType.DATA) != (sequence > 0) or flags & ~FIRST:
        raise FrameError("garbage", f"a {frame_type.name} frame has sequence {sequence} and flags {flags}")
    return FrameHeader(frame_type, flags, length, sequence, acknowledged)


def parse_message(body: bytes, max_bytes: int) -> tuple[MessageType, bytes, int, memoryview]:
    """(type, head, length of the whole body, first part of the body) of a message's first frame."""
    if len(body) < MESSAGE.size:
        raise FrameError("garbage", f"a message starts with {len(body)} bytes, must be {MESSAGE.size} or more")
    kind, head_bytes, total = MESSAGE.unpack_from(body)
    try:
        message_type = MessageType(kind)
    except ValueError as fault:
        raise FrameError("unknown type", f"message type {kind} is unknown") from fault
    if head_bytes > MAX_HEAD_BYTES or total > max_bytes:
        found = f"a {message_type.name} message says {head_bytes} bytes of head and {total} of body"
        raise FrameError("oversize", f"{found}; must be at most {MAX_HEAD_BYTES} and {max_bytes}")
    start = MESSAGE.size + head_bytes
    if len(body) < start:
        raise FrameError("garbage", f"the head of a {message_type.name} message is cut short")
    return message_type, body[MESSAGE.size : start], total, memoryview(body)[start:]
