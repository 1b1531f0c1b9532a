"""Ranks that come to the end of a script together, or not."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.departure import Departure
from crosscloud_trainer.failures import Failure

DEADLINE = 60.0


def departures(calls: Sequence[int]) -> list[Departure]:
    """A rank for each number of calls."""
    store = HashStore()
    made = [Departure(store, rank, len(calls)) for rank in range(len(calls))]
    for departure, count in zip(made, calls, strict=True):
        departure.calls = count
    return made


def ends(leaving: Sequence[Departure], seconds: float | None = None) -> list[Failure | None]:
    """All of them come to their end at once: how it went for each."""
    found: list[Failure | None] = [None] * len(leaving)

    def leave(number: int) -> None:
        try:
            leaving[number].together(step=7, seconds=seconds)
        except Failure as failure:
            found[number] = failure

    threads = [threading.Thread(target=leave, args=(number,), daemon=True) for number in range(len(leaving))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("calls", [[0], [5], [0, 0, 0], [9, 9, 9]], ids=str)
def test_ranks_that_made_as_many_calls_go_on_together(calls: list[int]) -> None:
    assert ends(departures(calls)) == [None] * len(calls)


def test_a_rank_that_others_have_left_behind_is_waited_for_as_long_as_it_makes_no_further_call() -> None:
    first, second = departures([9, 9])
    threading.Timer(2.5, lambda: second.together(step=7)).start()  # the watch has looked at it meanwhile
    assert ends([first]) == [None]


def test_a_rank_that_ends_while_another_goes_on_is_the_one_that_fails() -> None:
    first, _goes_on = departures([9, 10])
    (failure,) = ends([first])
    assert failure is not None
    assert failure.code == 1
    assert str(failure).startswith("the script has ended on this rank after step 7, while rank 1 goes on")


def test_of_ranks_that_end_after_unlike_numbers_of_calls_the_early_one_is_the_cause() -> None:
    late, early, other = ends(departures([10, 9, 10]))
    assert early is not None
    assert "while rank 0 goes on: all ranks must take equally many steps" in str(early)
    for failure in (late, other):
        assert failure is None or failure.code == ExitCode.PEER_LOST
    assert late is not None
    assert str(late) == "the script has ended earlier on rank 1"


def test_a_rank_that_never_comes_is_named_where_there_is_a_limit() -> None:
    first, _second = departures([9, 9])
    (failure,) = ends([first], seconds=0.3)
    assert failure is not None
    assert "after step 7, and not on rank 1 within 0.3 s; call sync.finish() on all ranks" in str(failure)
