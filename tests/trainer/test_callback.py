"""What the callback does to a Trainer of transformers; a whole job of one is in test_library.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from crosscloud_trainer import callback
from crosscloud_trainer.callback import SyncCallback, part_of
from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.library import Alone


class Sync:
    """Replica 1 of 3, which remembers what it was told."""

    joined, replica, replicas = True, 1, 3

    def __init__(self) -> None:
        self.wrapped: list[object] = []
        self.told: list[object] = []

    def wrap(self, optimizer: object) -> object:
        self.wrapped.append(optimizer)
        return ("wrapped", optimizer)

    def steps(self, total: int) -> None:
        self.told.append(total)

    def finish(self) -> None:
        self.told.append("finish")


class Trainer:
    """As much of the Trainer as the callback uses: it asks for its optimizer more than once, and keeps it."""

    def __init__(self, samples: int) -> None:
        self.train_dataset: Any = list(range(samples))
        self.optimizer: Any = None

    def create_optimizer(self) -> Any:
        self.optimizer = self.optimizer or object()
        return self.optimizer


@pytest.fixture
def sync(monkeypatch: pytest.MonkeyPatch) -> Sync:
    made = Sync()
    monkeypatch.setattr(callback, "join", lambda: made)
    return made


def test_the_optimizer_is_wrapped_once_however_often_the_trainer_asks(sync: Sync) -> None:
    trainer = Trainer(10)
    attached = SyncCallback(trainer)
    first, second = trainer.create_optimizer(), trainer.create_optimizer()
    assert first is second is trainer.optimizer
    assert first == ("wrapped", sync.wrapped[0])
    assert len(sync.wrapped) == 1
    attached.on_train_begin(None, SimpleNamespace(max_steps=40))
    attached.on_train_end()
    assert sync.told == [40, "finish"]
    assert list(trainer.train_dataset) == [1, 4, 7]


def test_an_optimizer_that_deepspeed_makes_from_its_configuration_is_refused(sync: Sync) -> None:
    attached = SyncCallback(Trainer(10))
    with pytest.raises(Failure, match='the DeepSpeed configuration has "optimizer"; leave it out') as caught:
        attached.on_train_begin(None, SimpleNamespace(max_steps=40))
    assert caught.value.code == ExitCode.INVALID_INPUT


def test_outside_a_job_the_trainer_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback, "join", Alone)
    trainer = Trainer(10)
    attached = SyncCallback(trainer)
    attached.on_train_begin(None, SimpleNamespace(max_steps=40))
    attached.on_train_end()
    assert trainer.create_optimizer() is trainer.optimizer
    assert trainer.train_dataset == list(range(10))


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [7, 10, 12, 100])
def test_parts_are_apart_and_of_equal_length(count: int, replicas: int) -> None:
    parts = [list(part_of(range(count), replica, replicas)) for replica in range(replicas)]
    assert {len(part) for part in parts} == {count // replicas}
    taken = [sample for part in parts for sample in part]
    assert sorted(taken) == list(range(count // replicas * replicas))
