"""Rounds over real links: equal results in all replicas, whatever happens to the connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from link.yard import DEADLINE, QUICK, Yard, until, wan
from membership.field import INDEX, Rank, field, ranks_of, together, update, whole

from crosscloud_trainer.compress import EncodedCells
from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.exchange import RoundRequest, RoundResult
from crosscloud_trainer.link import Authority, LinkSettings, PeersMissing
from crosscloud_trainer.membership.errors import Diverged, PeerLost, RoundFailed
from crosscloud_trainer.sizes import CodecSpec, payload_bytes

TESTS = Path(__file__).parent.parent


def results(outcomes: list[object]) -> list[RoundResult]:
    faults = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert not faults, faults
    return [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]


@contextmanager
def met(ranks: list[Rank]) -> Iterator[list[Rank]]:
    """All ranks after they have met."""
    try:
        for rank in ranks:
            rank.link.start()
        assert not any(together(ranks, lambda rank: rank.exchange.connect(DEADLINE)))
        yield ranks
    finally:
        for rank in ranks:
            rank.link.close()


def one_round(ranks: list[Rank], number: int, weights: Sequence[int]) -> list[RoundResult]:
    return results(together(ranks, lambda rank: rank.round(number, weights[rank.replica])))


def test_two_processes_complete_rounds_over_mutual_tls_with_equal_bytes(tmp_path: Path) -> None:
    Yard(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(TESTS / "membership" / "rank_process.py"), str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(replica)], env=environ, stdout=subprocess.PIPE, text=True) for replica in (0, 1)
    ]
    told = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert told[0]["results"] == told[1]["results"]
    assert len(set(told[0]["results"])) == 3
    assert [one["settled"] for one in told] == [3, 3]
    assert told[0]["bytes"]["out"] == told[1]["bytes"]["in"]
    assert told[0]["bytes"]["in"] == told[1]["bytes"]["out"]


@pytest.mark.parametrize("ranks", [[1, 1], [2, 4], [3, 1, 2]], ids=str)
def test_the_result_is_the_weighted_mean_in_the_order_of_replicas(tmp_path: Path, ranks: list[int]) -> None:
    every = field(tmp_path, ranks, "None")
    weights = [100, 300, 77][: len(ranks)]
    with met(every):
        for number in (1, 2):
            answers = one_round(every, number, weights)
            share = [np.float32(weight / sum(weights)) for weight in weights]
            expected = update(0, number).numpy() * share[0]
            for replica in range(1, len(ranks)):
                expected = expected + update(replica, number).numpy() * share[replica]
            for body in whole(every, answers).values():
                np.testing.assert_array_equal(np.frombuffer(body, dtype="<f4"), expected)
            assert all(answer.weights == dict(enumerate(weights)) for answer in answers)
            assert all(answer.digests == dict.fromkeys(range(len(ranks)), 7) for answer in answers)
        assert not any(together(every, lambda rank: rank.exchange.settle(DEADLINE)))
        assert {rank.exchange.settled_round for rank in every} == {2}


@pytest.mark.parametrize("passed", [1, 3_000, 40_000], ids="after {} bytes".format)
def test_a_round_that_is_cut_in_the_middle_completes_after_the_link_heals(tmp_path: Path, passed: int) -> None:
    """Both replicas wait and say for whom; the results are those of an undisturbed run, so nobody adds twice."""
    undisturbed = field(tmp_path / "undisturbed", [2, 1])
    with met(undisturbed):
        expected = [whole(undisturbed, one_round(undisturbed, number, [3, 4])) for number in (1, 2, 3)]
    yard = Yard(tmp_path / "cut", replicas=2, ranks=2)
    with wan(yard.ports[1]) as road:
        yard.gateways[1] = road.port
        yard.write()
        ranks = ranks_of(yard, [2, 1])
        with met(ranks):
            assert whole(ranks, one_round(ranks, 1, [3, 4])) == expected[0]
            found: list[list[RoundResult]] = []
            working = threading.Thread(target=lambda: found.append(one_round(ranks, 2, [3, 4])))
            road.cut_after(passed)
            working.start()
            for rank, other in zip(ranks, (1, 1, 0), strict=True):
                until(lambda rank=rank, other=other: waits_for(rank, other), f"{rank.replica} waits for {other}")
            until(lambda: not any(s.connected for s in ranks[2].link.states().values()), "the cut is noticed")
            assert not found
            road.heal()
            working.join(DEADLINE)
            assert whole(ranks, found[0]) == expected[1]
            assert whole(ranks, one_round(ranks, 3, [3, 4])) == expected[2]
            assert all(rank.exchange.waiting() is None for rank in ranks)


def waits_for(rank: Rank, replica: int) -> bool:
    waiting = rank.exchange.waiting()
    return waiting is not None and waiting.replicas == (replica,)


def test_rounds_go_on_over_connections_that_break_again_and_again(tmp_path: Path) -> None:
    undisturbed = field(tmp_path / "undisturbed", [1, 1])
    with met(undisturbed):
        expected = [whole(undisturbed, one_round(undisturbed, number, [1, 1])) for number in range(1, 9)]
    yard = Yard(tmp_path / "broken")
    with wan(yard.ports[1]) as road:
        yard.gateways[1] = road.port
        yard.write()
        ranks = ranks_of(yard, [1, 1])
        with met(ranks):
            for number in range(1, 9):
                road.break_after(7_001 * number)
                assert whole(ranks, one_round(ranks, number, [1, 1])) == expected[number - 1]
            assert not any(together(ranks, lambda rank: rank.exchange.settle(DEADLINE)))
        assert road.breaks >= 5


def test_payload_and_result_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    elements = [parameter.elements for parameter in INDEX.parameters]
    with met(field(tmp_path, [2, 1, 1])) as ranks:
        one_round(ranks, 1, [1, 1, 1])
        assert not any(together(ranks, lambda rank: rank.exchange.settle(DEADLINE)))
        sent = dict.fromkeys(("payload", "result"), 0)
        received = dict(sent)
        for rank in ranks:
            for peer in rank.link.traffic():
                for kind in sent:
                    sent[kind] += peer.sent[kind]
                    received[kind] += peer.received[kind]
    encoded = payload_bytes(CodecSpec("Int8"), elements)
    assert sent == received
    for kind, total in sent.items():
        # Every cell goes from two replicas to its owner and back; each message has 12 bytes of lengths and 80 of head.
        messages, rest = divmod(total - 2 * encoded, 92)
        assert rest == 0, kind
        assert 6 <= messages <= 10, kind


def test_in_an_exact_round_all_have_the_values_of_the_one_replica_that_sends_them(tmp_path: Path) -> None:
    """Between two rounds of updates, whose codec loses something, and whose messages are of other sizes."""
    with met(field(tmp_path, [2, 1, 3], "TopK")) as ranks:
        sent = update(1, 7)

        def exact(rank: Rank) -> RoundResult:
            cells = rank.exact_payload(sent) if rank.replica == 1 else None
            weight = int(rank.replica == 1)
            answer = rank.exchange.exchange(RoundRequest(2, weight, cells, 7, state=rank.replica, exact=True))
            rank.exchange.prepared(2)
            return answer

        one_round(ranks, 1, [1, 1, 1])
        answers = results(together(ranks, exact))
        for body in whole(ranks, answers).values():
            np.testing.assert_array_equal(np.frombuffer(body, dtype="<f4"), sent.numpy())
        assert all(answer.states == {0: 0, 1: 1, 2: 2} for answer in answers)
        assert len(set(whole(ranks, one_round(ranks, 3, [1, 1, 1])).values())) == 1


def test_a_refused_update_counts_for_nothing_and_all_take_the_same_decision(tmp_path: Path) -> None:
    with met(field(tmp_path, [2, 1, 1], "None")) as ranks:
        answers = one_round(ranks, 1, [5, 0, 7])
        assert all(answer.weights == {0: 5, 1: 0, 2: 7} for answer in answers)
        share = [np.float32(5 / 12), np.float32(7 / 12)]
        expected = update(0, 1).numpy() * share[0] + update(2, 1).numpy() * share[1]
        for body in whole(ranks, answers).values():
            np.testing.assert_array_equal(np.frombuffer(body, dtype="<f4"), expected)
        nothing = one_round(ranks, 2, [0, 0, 0])
        assert all(answer.result is None for answer in nothing)
        assert all(answer.weights == {0: 0, 1: 0, 2: 0} for answer in nothing)
        assert len(set(whole(ranks, one_round(ranks, 3, [1, 1, 1])).values())) == 1


def test_outer_states_that_differ_end_all_replicas_and_name_the_wrong_one(tmp_path: Path) -> None:
    with met(field(tmp_path, [1, 1, 1])) as ranks:
        one_round(ranks, 1, [1, 1, 1])
        assert [rank.exchange.mismatches for rank in ranks] == [0, 0, 0]
        faults = together(ranks, lambda rank: rank.round(2, 1, digest=8 if rank.replica == 1 else 7))
        assert [rank.exchange.mismatches for rank in ranks] == [1, 1, 1]
    for fault in faults:
        assert isinstance(fault, Diverged)
        assert fault.exit_code == ExitCode.DIVERGED
        assert "before round 2" in str(fault)
        assert str(fault).endswith("replica 1 differs from the majority")


def test_a_replica_that_has_ended_earlier_than_another_is_named_by_it(tmp_path: Path) -> None:
    """C57: scripts that take unlike numbers of steps."""
    with met(field(tmp_path, [1, 1])) as ranks:
        one_round(ranks, 1, [1, 1])
        settled: list[object] = []
        ends = threading.Thread(
            target=lambda: settled.extend(together(ranks[1:], lambda r: r.exchange.settle(DEADLINE)))
        )
        ends.start()
        (fault,) = together(ranks[:1], lambda rank: rank.round(2, 1))
        ends.join(DEADLINE)
    assert isinstance(fault, RoundFailed)
    assert str(fault).startswith("replica 1 has ended after round 1, and this one is in round 2")
    assert settled == [None]


def test_a_payload_that_is_not_finite_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    def work(rank: Rank) -> object:
        payload = rank.payload(update(rank.replica, 1))
        if rank.replica == 1:
            poisoned = payload.data.clone()
            poisoned.view(torch.float32)[0::4096] = float("nan")
            payload = EncodedCells(payload.codec, payload.ids, payload.lengths, poisoned)
        return rank.exchange.exchange(RoundRequest(1, 1, payload, 7))

    ranks = field(tmp_path, [1, 1], "None")
    with met(ranks):
        caught: list[object] = []
        thread = threading.Thread(target=lambda: caught.extend(together(ranks[1:], work)))
        thread.start()
        [fault] = together(ranks[:1], work)
        for rank in ranks:
            rank.link.close()
        thread.join(DEADLINE)
    assert isinstance(fault, RoundFailed)
    assert "round 1: replica 1 rank 0: payload" in str(fault)
    assert "not finite" in str(fault)


def test_the_view_s_opener_tells_its_authority_to_all_ranks_of_all_replicas(tmp_path: Path) -> None:
    ranks = field(tmp_path, [2, 3])
    ranks[0].link.obey(Authority(1, 4, 2))
    with met(ranks):
        one_round(ranks, 1, [1, 1])
        one_round(ranks, 2, [1, 1])
        assert {rank.exchange.authority for rank in ranks} == {Authority(1, 4, 2)}


def test_peers_that_never_come_are_named_at_the_start_deadline(tmp_path: Path) -> None:
    [zero, *others] = field(tmp_path, [1, 1, 1])
    zero.link.start()
    others[1].link.start()
    try:
        outcomes = together([zero, others[1]], lambda rank: rank.exchange.connect(1.0))
        assert all(isinstance(fault, PeersMissing) for fault in outcomes)
        assert "replica 1" in str(outcomes[0])
        assert "Connect call failed" in str(outcomes[0])
        assert isinstance(outcomes[0], PeersMissing)
        assert outcomes[0].exit_code == ExitCode.PEERS_MISSING
    finally:
        for rank in (zero, *others):
            rank.link.close()


def test_a_peer_that_is_lost_before_it_has_prepared_the_last_round_is_named(tmp_path: Path) -> None:
    with met(field(tmp_path, [1, 1])) as ranks:
        one_round(ranks, 1, [1, 1])
        ranks[1].link.close()
        with pytest.raises(PeerLost, match="after round 1: no answer in time from replica 1") as caught:
            ranks[0].exchange.settle(1.5)
        assert caught.value.exit_code == ExitCode.PEER_LOST


def test_a_message_larger_than_the_first_limit_passes_once_the_round_s_size_is_known(tmp_path: Path) -> None:
    small = LinkSettings(**{**vars(QUICK), "max_message": 2000})
    with met(field(tmp_path, [1, 1], settings=small)) as ranks:
        assert len(set(whole(ranks, one_round(ranks, 1, [1, 1])).values())) == 1
        assert all("oversize" not in rank.link.refusals() for rank in ranks)
