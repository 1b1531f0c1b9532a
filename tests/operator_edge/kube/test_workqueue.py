"""The worker: one look at a time per job, none lost, none hot, none held up by another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from waiting import until

from crosscloud_operator.kube.api import Unreachable
from crosscloud_operator.kube.backoff import Backoff
from crosscloud_operator.kube.workqueue import Outcome, WorkQueue

Make = Callable[[Callable[[str, str], Awaitable[float | None]]], WorkQueue]


@pytest.fixture
def outcomes() -> list[Outcome]:
    return []


@pytest.fixture
async def queue(outcomes: list[Outcome]) -> AsyncIterator[Make]:
    made: list[WorkQueue] = []

    def make(work: Callable[[str, str], Awaitable[float | None]]) -> WorkQueue:
        made.append(WorkQueue(work, pause=0.01, done=outcomes.append, backoff=lambda: Backoff(0.02, 0.1)))
        return made[-1]

    yield make
    for item in made:
        await item.close()


async def test_a_burst_of_wakes_is_one_look(queue: Make, outcomes: list[Outcome]) -> None:
    async def work(namespace: str, name: str) -> float | None:
        return None

    worker = queue(work)
    for _ in range(100):
        worker.wake("ml", "a")
    await until(lambda: not worker._entries)
    assert [outcome.key for outcome in outcomes] == [("ml", "a")]


async def test_a_wake_during_a_look_is_another_look_and_never_two_at_once(queue: Make, outcomes: list[Outcome]) -> None:
    gate, running, most = asyncio.Event(), 0, 0

    async def work(namespace: str, name: str) -> float | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return None

    worker = queue(work)
    worker.wake("ml", "a")
    await until(lambda: running == 1)
    for _ in range(10):
        worker.wake("ml", "a")
    gate.set()
    await until(lambda: not worker._entries)
    assert len(outcomes) == 2
    assert most == 1


async def test_a_hanging_look_holds_up_no_other_job(queue: Make, outcomes: list[Outcome]) -> None:
    async def work(namespace: str, name: str) -> float | None:
        if name == "hangs":
            await asyncio.Event().wait()
        return None

    worker = queue(work)
    worker.wake("ml", "hangs")
    for number in range(50):
        worker.wake("ml", f"job-{number}")
    await until(lambda: len(outcomes) == 50)
    assert worker.longest > 0


async def test_comes_again_when_asked_to_and_sooner_when_woken(queue: Make, outcomes: list[Outcome]) -> None:
    async def work(namespace: str, name: str) -> float | None:
        return 0.02 if len(outcomes) < 3 else 3600.0

    worker = queue(work)
    worker.wake("ml", "a")
    await until(lambda: len(outcomes) == 4)
    worker.wake("ml", "a")
    await until(lambda: len(outcomes) == 5)


@pytest.mark.parametrize("fault", [Unreachable("no answer"), ZeroDivisionError("a bug")])
async def test_a_failed_look_is_repeated_with_growing_pauses(
    fault: Exception, queue: Make, outcomes: list[Outcome]
) -> None:
    async def work(namespace: str, name: str) -> float | None:
        if len(outcomes) < 4:
            raise fault
        return None

    worker = queue(work)
    worker.wake("ml", "a")
    await until(lambda: not worker._entries)
    assert [outcome.error for outcome in outcomes] == [type(fault).__name__] * 4 + [""]


def test_pauses_grow_to_a_limit_with_jitter() -> None:
    pause = Backoff(1.0, 8.0)
    for bound in (1, 2, 4, 8, 8, 8):
        assert bound / 2 <= pause.next() <= bound
    pause.reset()
    assert pause.next() <= 1
