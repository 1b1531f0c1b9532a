"""Rounds over real links: equal results in all replicas, whatever happens to the connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from link.yard import DEADLINE, Yard
from membership.field import Rank, field, together, update, whole

from crosscloud_trainer.exchange import RoundResult

TESTS = Path(__file__).parent.parent


def results(outcomes: list[object]) -> list[RoundResult]:
    faults = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert not faults, faults
    return [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]


def opened(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.link.start()
    assert not any(together(ranks, lambda rank: rank.exchange.connect(DEADLINE)))


def one_round(ranks: list[Rank], number: int, weights: Sequence[int]) -> list[RoundResult]:
    return results(together(ranks, lambda rank: rank.round(number, weights[rank.replica])))


def closed(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.link.close()


def test_two_processes_complete_rounds_over_mutual_tls_with_equal_bytes(tmp_path: Path) -> None:
    Yard(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(TESTS / "membership" / "rank_process.py"), str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(replica)], env=environ, stdout=subprocess.PIPE, text=True) for replica in (0, 1)
    ]
    told = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert told[0]["results"] == told[1]["results"]
    assert len(set(told[0]["results"])) == 3
    assert [one["settled"] for one in told] == [3, 3]
    assert told[0]["wan"] == told[1]["wan"][::-1]


@pytest.mark.parametrize("ranks", [[1, 1], [2, 4], [3, 1, 2]], ids=str)
def test_the_result_is_the_weighted_mean_in_the_order_of_replicas(tmp_path: Path, ranks: list[int]) -> None:
    every = field(tmp_path, ranks, "None")
    weights = [100, 300, 77][: len(ranks)]
    opened(every)
    try:
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
    finally:
        closed(every)
