"""Who and what is refused: with a reason that is counted and logged, and without harm to those who belong."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from link.dialler import HELLO, ONE, REFUSE, Dialler, counted, frame, hello, still_serves
from link.yard import DEADLINE, QUICK, Yard

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.link import (
    Authority,
    Disagreement,
    Fenced,
    Link,
    LinkError,
    LinkSettings,
    Message,
    MessageType,
    Received,
)
from crosscloud_trainer.link.refusals import Refusals
from crosscloud_trainer.pki import CertificateAuthority

# certificates


def test_a_certificate_of_another_authority_is_refused(yard: Yard, one: Link, tmp_path: Path) -> None:
    other = yard.issue(yard.identity(0), tmp_path / "other", CertificateAuthority.create(yard.uid))
    with pytest.raises(OSError), Dialler(yard, other) as dialler:  # noqa: PT012
        dialler.say(frame(HELLO, hello(yard)))
        assert dialler.ended()
        raise ConnectionResetError
    counted(one, "certificate")
    still_serves(yard, one)


def test_a_dialler_without_a_certificate_is_refused(yard: Yard, one: Link, tmp_path: Path) -> None:
    with Dialler(yard, tmp_path / "none") as dialler:
        assert dialler.ended()
    counted(one, "certificate")
    still_serves(yard, one)


def test_older_versions_of_tls_are_refused(yard: Yard, one: Link) -> None:
    with pytest.raises(ssl.SSLError):
        Dialler(yard, yard.tls(0), ssl.TLSVersion.TLSv1_2)
    counted(one, "garbage")
    still_serves(yard, one)


def test_a_listener_of_another_authority_is_refused_by_the_dialler(yard: Yard, tmp_path: Path) -> None:
    strangers = Yard(tmp_path / "strangers")
    strangers.ports = yard.ports
    strangers.write()
    with strangers.link(1) as stranger, yard.link(0) as zero:
        zero.connect(ONE)
        counted(zero, "certificate")
        assert zero.states()[ONE].connections == 0
        assert stranger.states() == {}


def test_an_authority_certificate_that_names_no_pod_is_refused(yard: Yard, one: Link, tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    folder.mkdir()
    (folder / "tls.crt").write_bytes(yard.authority.certificate)
    (folder / "tls.key").write_bytes(yard.authority.key)
    with Dialler(yard, folder) as dialler:
        assert dialler.ended()
    counted(one, "certificate")
    still_serves(yard, one)


# who is who


def refused(yard: Yard, folder: Path, **changes: object) -> dict[str, str]:
    with Dialler(yard, folder) as dialler:
        dialler.say(frame(HELLO, hello(yard, **changes)))
        kind, body = dialler.hear()
        assert kind == REFUSE
        assert dialler.ended()
    return dict(json.loads(body))


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"protocol": 2}, "protocol", "found version 2, must be 1"),
        ({"replica": 5}, "identity", "its certificate says"),
        ({"incarnation": 2}, "identity", "incarnation/2"),
        ({"job": "another"}, "identity", "another"),
        ({"attempt": 9}, "identity", "attempt/9"),
        ({"to": "replica 1 stage 0 node 0 rank 4"}, "identity", "this is replica 1 stage 0 node 0 rank 0"),
    ],
    ids=["protocol version", "replica", "incarnation", "job", "attempt", "rank that is meant"],
)
def test_words_that_do_not_fit_are_refused_and_say_what_differs(
    yard: Yard, one: Link, change: dict[str, object], reason: str, words: str
) -> None:
    answer = refused(yard, yard.tls(0), **change)
    assert answer["reason"] == reason
    assert words in answer["message"]
    counted(one, reason)
    still_serves(yard, one)


def test_another_job_with_the_same_authority_is_refused(yard: Yard, one: Link, tmp_path: Path) -> None:
    other = Yard(tmp_path / "other", uid="another-job")
    folder = yard.issue(other.identity(0), tmp_path / "tls-other", yard.authority)
    assert refused(yard, folder)["reason"] == "job"
    counted(one, "job")
    still_serves(yard, one)


def test_an_older_attempt_is_refused_and_told_that_it_is_fenced(tmp_path: Path) -> None:
    now = Yard(tmp_path / "now", attempt=2)
    with now.link(1) as one:
        with now.of_attempt(1, tmp_path / "old").link(0) as zero:
            zero.connect(ONE)
            with pytest.raises(Fenced, match="attempt: found 2, this is 1") as caught:
                zero.receive(DEADLINE)
        assert caught.value.exit_code == ExitCode.FENCED
        assert one.receive(0.2) is None
        assert one.states() == {}


def test_a_listener_that_meets_a_newer_attempt_is_fenced(yard: Yard, one: Link, tmp_path: Path) -> None:
    folder = yard.issue(yard.identity(0, attempt=2), tmp_path / "newer")
    assert refused(yard, folder, attempt=2)["reason"] == "new attempt"
    with pytest.raises(Fenced, match="attempt: found 2, this is 1"):
        one.receive(DEADLINE)


def test_an_older_incarnation_is_refused_and_told_that_it_is_fenced(yard: Yard, tmp_path: Path) -> None:
    with yard.link(0) as zero:
        yard.incarnations[0] = 2
        yard.write()
        with yard.link(1) as one:
            zero.connect(ONE)
            with pytest.raises(Fenced, match="incarnation of replica 0: found 1, now is 2") as caught:
                zero.receive(DEADLINE)
            assert caught.value.exit_code == ExitCode.FENCED
            counted(one, "old incarnation")


def test_an_incarnation_that_the_table_does_not_know_yet_is_met_once_it_does(yard: Yard, one: Link) -> None:
    old_table = yard.peers.read_text()
    yard.incarnations[0] = 2
    yard.issue(yard.identity(0, incarnation=2), yard.tls(0))
    yard.write()
    with yard.link(0) as zero:
        new_table = yard.peers.read_text()
        yard.peers.write_text(old_table)
        zero.connect(ONE)
        counted(one, "new incarnation")
        yard.peers.write_text(new_table)
        zero.send(ONE, Message(MessageType.VIEW, b"second life"))
        event = one.receive(DEADLINE)
        assert isinstance(event, Received)
        assert event.message.head == b"second life"


def test_ranks_that_run_unlike_things_both_end_and_say_what_differs(yard: Yard) -> None:
    mine = {"run document": "d1", "codec version": "1"}
    theirs = {"run document": "d1", "codec version": "2", "schedule": "s"}
    with yard.link(0, agreement=mine) as zero, yard.link(1, agreement=theirs) as one:
        zero.connect(ONE)
        faults: list[LinkError] = []
        for link in (zero, one):
            with pytest.raises(Disagreement) as caught:
                link.receive(DEADLINE)
            faults.append(caught.value)
    for fault in faults:
        assert "codec version: " in str(fault)
        assert "schedule: " in str(fault)
        assert "run document" not in str(fault)
        assert fault.exit_code == ExitCode.INVALID_INPUT


# slow ones and many


def quick_handshakes(yard: Yard, **changes: object) -> Link:
    return yard.link(1, settings=LinkSettings(**{**vars(QUICK), "handshake": 0.4, **changes}))


@pytest.mark.parametrize("secured", [False, True], ids=["before TLS", "after TLS"])
def test_a_slow_handshake_ends_at_its_deadline(yard: Yard, secured: bool) -> None:
    with quick_handshakes(yard) as one:
        if secured:
            with Dialler(yard, yard.tls(0)) as dialler:
                drip(dialler.say, frame(HELLO, hello(yard)), one)
        else:
            with socket.create_connection(("127.0.0.1", yard.ports[1]), DEADLINE) as plain:
                drip(plain.sendall, b"\x16\x03\x01\x02\x00\x01" + bytes(200), one)
        counted(one, "slow handshake")
        still_serves(yard, one)


def drip(send: Callable[[bytes], None], content: bytes, one: Link) -> None:
    for byte in content:
        if one.refusals():
            return
        try:
            send(bytes([byte]))
        except OSError:
            return
        time.sleep(0.05)


def test_unfinished_handshakes_are_limited_in_number(yard: Yard) -> None:
    with quick_handshakes(yard, max_handshakes=4, handshake=2.0) as one:
        idle = [socket.create_connection(("127.0.0.1", yard.ports[1]), DEADLINE) for _ in range(12)]
        counted(one, "too many handshakes", 8)
        for connection in idle:
            connection.close()
        still_serves(yard, one)


def test_a_flood_of_refusals_is_counted_in_full_and_logged_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(quiet_seconds=10, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.add("garbage", "1.2.3.4:5", "line one\nline two")
        now[0] = 11.0
        refusals.add("garbage", "1.2.3.4:6", "again")
        refusals.add("certificate", "1.2.3.4:7", "x" * 10_000)
    assert refusals.counts() == {"garbage": 1001, "certificate": 1}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0] == "refused 1.2.3.4:5 (garbage): line one line two"
    assert lines[1].endswith("; 999 more before")
    assert all(len(line) < 600 for line in lines)


def test_an_authority_from_a_refused_peer_is_not_obeyed(yard: Yard, one: Link) -> None:
    refused(yard, yard.tls(0), home=99, term=99, to="somebody else")
    assert one.authority == Authority(1, 0, 0)
