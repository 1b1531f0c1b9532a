"""The stream between two ranks as pure code: connections that end after any number of bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscloud_trainer.link.errors import FrameError
from crosscloud_trainer.link.frames import FRAME, FRAME_BODY_BYTES, FrameType, Message, MessageType, parse_frame
from crosscloud_trainer.link.session import Greeting, MessageLimit, Session

LIMIT = MessageLimit(10**7)


class End:
    """One side: a session, and the messages that came in."""

    def __init__(self, number: int) -> None:
        self.session = Session(number, LIMIT)
        self.messages: list[tuple[bytes, bytes]] = []

    def bytes_to_send(self) -> bytes:
        out = b""
        while (frame := self.session.next_unsent()) is not None:
            out += frame.header(self.session.received) + b"".join(frame.parts)
        return out

    def hear(self, stream: bytes) -> None:
        """Takes what a connection brought; an unfinished frame at its end is lost with it."""
        while len(stream) >= FRAME.size:
            header = parse_frame(stream[: FRAME.size])
            body = stream[FRAME.size : FRAME.size + header.length]
            if len(body) < header.length:
                return
            stream = stream[FRAME.size + header.length :]
            self.session.acknowledge(header.acknowledged)
            _, message = self.session.accept(header, body)
            if message is not None:
                self.messages.append((message.head, bytes(message.body)))


def connect(one: End, two: End) -> None:
    """The handshake: the dialler's words are judged first, the listener answers with what it knows then."""
    two.session.greet(one.session.greeting())
    one.session.greet(two.session.greeting())


def test_a_connection_may_end_after_any_byte_and_each_message_arrives_once() -> None:
    sent = [(b"head", b""), (b"", b"x" * 70), (b"h", bytes(FRAME_BODY_BYTES + 3))]
    trial = End(1)
    for head, body in sent:
        trial.session.queue(Message(MessageType.PAYLOAD, head, body))
    connect(trial, End(2))
    length = len(trial.bytes_to_send())
    near_edges = {edge + shift for edge in (0, 24, 40, 64, 76, 146, 183) for shift in range(-2, 3)}
    last_frame = {length - FRAME.size - 3 + shift for shift in range(-3, 30)}
    for end in sorted(place for place in near_edges | last_frame if 0 <= place <= length):
        one, two = End(1), End(2)
        connect(one, two)
        for head, body in sent:
            one.session.queue(Message(MessageType.PAYLOAD, head, body))
        two.hear(one.bytes_to_send()[:end])
        connect(one, two)
        two.hear(one.bytes_to_send())
        assert two.messages == sent, end


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.booleans()), max_size=8),
)
def test_streams_survive_any_series_of_cuts_in_both_directions(
    ours: list[bytes], theirs: list[bytes], cuts: list[tuple[int, int, bool]]
) -> None:
    one, two = End(1), End(2)
    for number in range(max(len(ours), len(theirs))):
        if number < len(ours):
            one.session.queue(Message(MessageType.PAYLOAD, b"1", ours[number]))
        if number < len(theirs):
            two.session.queue(Message(MessageType.RESULT, b"2", theirs[number]))
    for out, back, twice in cuts:
        connect(one, two)
        stream = one.bytes_to_send()[:out]
        two.hear(stream)
        one.hear(two.bytes_to_send()[:back])
        if twice:
            two.hear(stream)  # what is heard again counts once
    connect(one, two)
    two.hear(one.bytes_to_send())
    one.hear(two.bytes_to_send())
    connect(one, two)
    assert two.messages == [(b"1", body) for body in ours]
    assert one.messages == [(b"2", body) for body in theirs]
    assert one.session.pending_bytes == 0
    assert two.session.pending_bytes == 0
    assert one.session.pending_bytes == two.session.pending_bytes == 0


def test_a_new_process_on_either_side_starts_both_streams_anew() -> None:
    one, two = End(1), End(2)
    one.session.queue(Message(MessageType.VIEW, b"a"))
    connect(one, two)
    two.hear(one.bytes_to_send())
    one.session.queue(Message(MessageType.VIEW, b"lost with the old process"))
    again = End(3)
    again.session.queue(Message(MessageType.VIEW, b"from the new one"))
    assert one.session.greet(again.session.greeting())
    assert not again.session.greet(one.session.greeting())
    one.session.queue(Message(MessageType.VIEW, b"b"))
    again.hear(one.bytes_to_send())
    one.hear(again.bytes_to_send())
    assert again.messages == [(b"b", b"")]
    assert one.messages == [(b"from the new one", b"")]


@pytest.mark.parametrize("received", [1, 2**60])
def test_a_peer_that_claims_frames_that_were_never_sent_is_refused(received: int) -> None:
    session = Session(1, LIMIT)
    with pytest.raises(FrameError, match="frames of ours"):
        session.greet(Greeting(9, 1, received))


def test_a_message_is_copied_once_only_where_it_arrives() -> None:
    body = bytearray(3 * FRAME_BODY_BYTES)
    end = End(1)
    end.session.queue(Message(MessageType.PAYLOAD, b"", body))
    connect(end, End(2))
    parts = []
    while (frame := end.session.next_unsent()) is not None:
        parts += [part for part in frame.parts if isinstance(part, memoryview)]
    assert sum(map(len, parts)) == len(body)
    assert all(part.obj is body for part in parts)


def test_a_frame_is_laid_out_as_documented() -> None:
    end = End(1)
    end.session.queue(Message(MessageType.RESULT, b"head", b"body!"))
    connect(end, End(2))
    stream = end.bytes_to_send()
    assert struct.unpack("!HBBIQQ", stream[:24]) == (0xCC11, FrameType.DATA, 1, 21, 1, 0)
    assert struct.unpack("!BBHQ", stream[24:36]) == (MessageType.RESULT, 0, 4, 5)
    assert stream[36:] == b"headbody!"
