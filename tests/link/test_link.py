"""Two links on loopback, with real TLS between them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from link.yard import DEADLINE, QUICK, Wan, Yard, until, wan

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.link import (
    Authority,
    Link,
    LinkClosed,
    LinkSettings,
    LinkUnusable,
    Message,
    MessageType,
    Obeyed,
    RankId,
    Received,
    Restarted,
)
from crosscloud_trainer.link.wire import ConnectionEnded, TlsFiles, Wire

ZERO, ONE = RankId(0, 0, 0, 0), RankId(1, 0, 0, 0)


@contextmanager
def crossed(yard: Yard) -> Iterator[tuple[Wan, Link, Link]]:
    """Replica 0 dials replica 1 over a WAN: the road, and both links."""
    with yard.behind_wan(1) as road, yard.link(0) as zero, yard.link(1) as one:
        zero.connect(ONE)
        yield road, zero, one


def take(link: Link) -> Message:
    while True:
        event = link.receive(DEADLINE)
        assert event is not None, f"nothing came; {link.states()} {link.refusals()}"
        if isinstance(event, Received):
            return event.message


def test_messages_of_all_sizes_arrive_whole_and_in_order_in_both_directions(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    sizes = [0, 1, 23, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3_000_001]
    bodies = [random.Random(size).randbytes(size) for size in sizes]
    with yard.link(0) as zero, yard.link(1) as one:
        zero.connect(ONE)
        one.connect(ZERO)
        for number, body in enumerate(bodies):
            zero.send(ONE, Message(MessageType.PAYLOAD, bytes([number]), body))
            one.send(ZERO, Message(MessageType.RESULT, bytes([number]), body[::-1]))
        for number, body in enumerate(bodies):
            there = take(one)
            assert (there.type, there.head, bytes(there.body)) == (MessageType.PAYLOAD, bytes([number]), body)
            back = take(zero)
            assert (back.type, back.head, bytes(back.body)) == (MessageType.RESULT, bytes([number]), body[::-1])
        assert zero.flush(DEADLINE)
        assert one.flush(DEADLINE)
        heads = 13 * len(sizes)  # each message has 12 bytes of lengths and a head of 1
        [sent] = zero.traffic()
        [received] = one.traffic()
        assert sent.wan
        assert sent.sent["payload"] == received.received["payload"] == sum(sizes) + heads
        assert sent.received["result"] == received.sent["result"] == sum(sizes) + heads
        assert sent.sent["result"] == sent.received["payload"] == 0
        assert zero.refusals() == one.refusals() == {}


def test_a_silent_cut_is_noticed_and_everything_arrives_once_after_it_heals(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with crossed(yard) as (road, zero, one):
        zero.send(ONE, Message(MessageType.VIEW, b"before"))
        assert take(one).head == b"before"
        road.cut()
        body = random.Random(1).randbytes(2_000_000)
        zero.send(ONE, Message(MessageType.PAYLOAD, b"during", body))
        one.send(ZERO, Message(MessageType.VIEW, b"back"))
        until(lambda: not zero.states()[ONE].connected, "the dialler notices the cut")
        until(lambda: not one.states()[ZERO].connected, "the listener notices the cut")
        road.heal()
        there = take(one)
        assert (there.head, bytes(there.body)) == (b"during", body)
        assert take(zero).head == b"back"
        assert one.receive(0.2) is None
        assert zero.states()[ONE].connections >= 2


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_break_anywhere_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Breaks within TLS handshakes, frame headers, heads and bodies alike: bytes are cut at random places."""
    yard = Yard(tmp_path)
    chance = random.Random(seed)
    with crossed(yard) as (road, zero, one):
        for number in range(40):
            road.break_after(chance.choice([1, 5, 300, 1500, 2500, 4000, 20_000, 150_000]))
            body = chance.randbytes(chance.choice([0, 10, 1000, 300_000]))
            zero.send(ONE, Message(MessageType.PAYLOAD, bytes([number]), body))
            one.send(ZERO, Message(MessageType.RESULT, bytes([number]), body))
            there, back = take(one), take(zero)
            assert there.head == back.head == bytes([number])
            assert bytes(there.body) == bytes(back.body) == body
        assert one.receive(0.1) is None
        assert zero.receive(0.1) is None
        assert road.breaks >= 10
        assert "garbage" not in one.refusals()


def test_a_process_that_was_started_anew_is_recognised_and_gets_what_is_sent_from_then_on(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard.link(1) as one:
        with yard.link(0) as zero:
            zero.connect(ONE)
            zero.send(ONE, Message(MessageType.VIEW, b"first life"))
            assert take(one).head == b"first life"
        one.send(ZERO, Message(MessageType.VIEW, b"for the dead"))
        with yard.link(0) as zero:
            zero.connect(ONE)
            assert one.receive(DEADLINE) == Restarted(ZERO)
            one.send(ZERO, Message(MessageType.VIEW, b"for the new one"))
            zero.send(ONE, Message(MessageType.VIEW, b"second life"))
            assert take(zero).head == b"for the new one"
            assert take(one).head == b"second life"


def test_send_waits_while_the_outbox_is_full(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    small = LinkSettings(**{**vars(QUICK), "outbox": 1000})
    with yard.link(0, settings=small) as zero:
        zero.connect(ONE)
        zero.send(ONE, Message(MessageType.PAYLOAD, b"", bytes(2000)))
        with pytest.raises(TimeoutError):
            zero.send(ONE, Message(MessageType.PAYLOAD, b"", bytes(10)), seconds=0.2)
        with yard.link(1) as one:
            zero.send(ONE, Message(MessageType.PAYLOAD, b"second", bytes(10)), seconds=DEADLINE)
            assert len(take(one).body) == 2000
            assert take(one).head == b"second"


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    small = LinkSettings(**{**vars(QUICK), "max_message": 1000})
    with Yard(tmp_path).link(0, settings=small) as zero, pytest.raises(ValueError, match="1000 at most"):
        zero.send(ONE, Message(MessageType.PAYLOAD, b"", bytes(1001)))


def test_the_higher_authority_spreads_by_handshakes(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard.link(0, authority=Authority(1, 3, 2)) as zero, yard.link(1) as one:
        zero.connect(ONE)
        assert one.receive(DEADLINE) == Obeyed(Authority(1, 3, 2))
        assert one.authority == Authority(1, 3, 2)
        one.obey(Authority(1, 2, 9))
        assert one.authority == Authority(1, 3, 2)


def test_the_peer_table_is_read_again_while_dialling(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with wan(yard.ports[1]) as road, yard.link(1) as one:
        yard.gateways[1] = 1  # nobody is there
        yard.write()
        with yard.link(0) as zero:
            zero.connect(ONE)
            until(lambda: zero.states().get(ONE) and "dialled" not in zero.states()[ONE].last_fault, "a failed try")
            yard.gateways[1] = road.port
            yard.write()
            zero.send(ONE, Message(MessageType.VIEW, b"found"))
            assert take(one).head == b"found"


def test_a_host_name_that_can_t_be_one_is_told_and_dialled_again_like_any_other_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yard = Yard(tmp_path)
    with yard.behind_wan(1) as road, yard.link(1) as one:
        right = f"127.0.0.1:{road.port}"
        yard.peers.write_text(yard.peers.read_text().replace(right, f"east..west:{road.port}"))
        with yard.link(0) as zero:
            zero.connect(ONE)
            until(lambda: "can't be dialled: UnicodeError" in caplog.text, "the failure")
            yard.write()
            zero.send(ONE, Message(MessageType.VIEW, b"found"))
            assert take(one).head == b"found"
    assert caplog.text.count("can't be dialled") == 1


def test_a_closed_link_says_so_to_those_who_wait(tmp_path: Path) -> None:
    link = Yard(tmp_path).link(0)
    link.start()
    link.close()
    with pytest.raises(LinkClosed):
        link.receive(1)
    with pytest.raises(LinkClosed):
        link.send(ONE, Message(MessageType.VIEW, b""))


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard.link(0):
        second = yard.link(0)
        with pytest.raises(LinkUnusable, match=f"link port {yard.ports[0]} can't be listened on") as caught:
            second.start()
    assert caught.value.exit_code == ExitCode.INVALID_INPUT


def test_files_that_are_missing_or_of_another_pod_are_named(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with pytest.raises(LinkUnusable, match="tls-9"):
        yard.link(9)
    yard.issue(yard.identity(0, incarnation=2), yard.tls(0))
    with pytest.raises(LinkUnusable, match=r"r0-s0-n0-i1.*must be r0-s0-n0-i2"):
        yard.link(0)
    yard.peers.write_text("{")
    with pytest.raises(LinkUnusable, match=r"peers\.json"):
        yard.link(1)


def test_an_end_as_it_should_be_brings_all_acknowledgements_and_no_complaint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yard = Yard(tmp_path)
    for _ in range(10):
        with yard.link(0) as zero, yard.link(1) as one:
            zero.connect(ONE)
            zero.send(ONE, Message(MessageType.PREPARED, b"last"))
            assert take(one).head == b"last"
            one.close()
            assert zero.flush(5), "the acknowledgement was lost"
    assert not [record for record in caplog.records if "lost the link" in record.getMessage()]


def test_a_peer_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard.link(0) as zero, yard.link(1) as one:
        zero.connect(ONE)
        zero.send(ONE, Message(MessageType.PREPARED, b"in time"))
        assert take(one).head == b"in time"
        one.close()
        zero.send(ONE, Message(MessageType.PREPARED, b"too late"))
        assert zero.flush(DEADLINE)


def test_a_lost_link_and_its_return_are_told_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yard = Yard(tmp_path)
    with crossed(yard) as (road, zero, one):
        zero.send(ONE, Message(MessageType.VIEW, b"before"))
        assert take(one).head == b"before"
        road.cut()
        until(lambda: not zero.states()[ONE].connected, "the cut is noticed")
        road.heal()
        zero.send(ONE, Message(MessageType.VIEW, b"after"))
        assert take(one).head == b"after"
    said = [record.getMessage() for record in caplog.records if str(ONE) in record.getMessage()]
    assert len(said) == 2
    assert said[0].startswith(f"lost the link with {ONE}: not heard for 1.")
    assert said[1] == f"the link with {ONE} is back"


def test_a_link_closes_at_any_moment_of_its_handshakes(tmp_path: Path) -> None:
    """Also while it is being refused, when its own failure closes it."""
    now = Yard(tmp_path / "now", attempt=2)
    old = now.of_attempt(1, tmp_path / "old")
    chance = random.Random(0)
    with now.link(1):
        for yard in [now, old] * 15:
            with yard.link(0) as zero:
                zero.connect(ONE)
                time.sleep(chance.random() * 0.04)


def test_links_that_close_at_the_same_moment_have_nothing_to_complain_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a run. Each side is closing while the other one's last word arrives."""
    yard = Yard(tmp_path)
    for _ in range(20):
        with yard.link(0) as zero, yard.link(1) as one:
            zero.connect(ONE)
            zero.send(ONE, Message(MessageType.PREPARED, b"last"))
            assert take(one).head == b"last"
            closing = [threading.Thread(target=link.close) for link in (zero, one)]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join(DEADLINE)
                assert not thread.is_alive()
    assert not caplog.records


@pytest.mark.parametrize("calls", [["finish", "abort"], ["finish", "finish", "abort"], ["abort", "finish", "abort"]])
def test_a_connection_that_its_peer_has_ended_can_be_ended_in_any_order(tmp_path: Path, calls: list[str]) -> None:
    """Python 3.11.2, Debian's, can't abort a TLS transport that was closed twice."""
    yard = Yard(tmp_path)
    zero, one = TlsFiles(yard.tls(0)), TlsFiles(yard.tls(1))

    async def meet() -> None:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Queue[Wire] = asyncio.Queue()
        server = await loop.create_server(lambda: Wire(loop, accepted.put_nowait), "127.0.0.1", 0)
        dialled = Wire(loop)
        await loop.create_connection(lambda: dialled, *server.sockets[0].getsockname())
        met = await accepted.get()
        await asyncio.gather(met.secure(one.server, DEADLINE), dialled.secure(zero.client, DEADLINE, "any"))
        server.close()
        for wire, other in ((met, dialled), (dialled, met)):
            other.abort()
            with pytest.raises(ConnectionEnded):
                await wire.read_frame()
            for call in calls:
                if call == "finish":
                    await wire.finish(DEADLINE)
                else:
                    wire.abort()
            with pytest.raises(ConnectionEnded):
                await wire.write(b"more")

    asyncio.run(meet())
