"""What a rank stores while it trains: the state that it was told to, and never one that isn't finite (C53)."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load
from trainer.test_checkpoint import document
from trainer_core.local_exchange import ThreadGroup
from waiting import eventually

from crosscloud_trainer.claim import CLAIM, claim
from crosscloud_trainer.compress import codec_named
from crosscloud_trainer.contract import ExitCode, OuterOptimizer, StagePlan
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.layout import Index, ReplicaLayout, contiguous_shard
from crosscloud_trainer.link import Authority
from crosscloud_trainer.meeting import Place
from crosscloud_trainer.membership.solo import SoloExchange
from crosscloud_trainer.saving import Saver
from crosscloud_trainer.shard import Shard
from crosscloud_trainer.storage import Storage

FOLDER = Path("attempt-1/home-1")


class Rank:
    """One of the ranks of a replica that is alone: as much of its engine as is asked for a checkpoint."""

    def __init__(self, storage: Path, group: ThreadGroup) -> None:
        self.index, self.rank, self.skipped = Index.of({"a": 9000}), group.rank, 0
        intervals = [contiguous_shard(self.index, ["a"], -(-9000 // group.ranks), rank) for rank in range(group.ranks)]
        self.layout = ReplicaLayout(self.index, tuple(intervals))
        own = intervals[self.rank]
        size = sum(interval.elements for interval in own)
        self.weights, self.moment = torch.arange(float(size)), torch.ones(size)
        self.shard = Shard.of_flat(self.index, own, self.weights)
        plan = replace(document().replicas[0], stages=(StagePlan(0, "east", 1, group.ranks),))
        run = document(replicas=(plan,), storage_uri=str(storage))
        if self.rank == 0:
            claim(Storage(str(storage)), run)
        pod, attempt = SimpleNamespace(replica=0, stage=0), SimpleNamespace(run=run, plan=plan)
        place = Place(pod, attempt, self.rank, group.ranks, self.rank)  # type: ignore[arg-type]
        exchange = SoloExchange(0, Authority(1, 0, 0))
        settings = OuterOptimizer()
        self.algorithm = DiLoCo(
            self.layout, self.shard, group, group, exchange, codec_named("None"), inner_steps=1, settings=settings
        )
        meeting: Any = SimpleNamespace(exchange=exchange, reducer=None, totals=lambda _: group)
        trained: Any = self
        self.saver = Saver(place, trained, self.algorithm, meeting, Journal(9, 0.0), torch.device("cpu"), 8, 0)

    def optimizer_tensors(self) -> Any:
        return [(interval, {"moment": self.moment}) for interval in self.shard.intervals]

    def schedule(self) -> Any:
        return {}

    def learn(self) -> str:
        """A step with its round; returns the digest after it."""
        self.weights.add_(1)
        self.algorithm.on_step(1)
        return f"{self.algorithm.digest:016x}"


def ranks(storage: Path, count: int) -> list[Rank]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda group: Rank(storage, group), ThreadGroup.of(count)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("vector", ["weights", "moment"])
def test_a_state_that_is_not_finite_on_one_rank_is_stored_by_none(tmp_path: Path, vector: str, value: float) -> None:
    replica = ranks(tmp_path, 2)
    getattr(replica[1], vector)[4321] = value

    def refused(rank: Rank) -> Failure:
        rank.learn()
        with pytest.raises(Failure, match=r"not finite after step 4: no checkpoint of them is written") as caught:
            rank.saver.take(4)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        assert [failure.code for failure in pool.map(refused, replica)] == [ExitCode.NON_FINITE] * 2
    assert [path.name for path in tmp_path.rglob("*")] == [CLAIM]


def test_what_is_stored_while_training_goes_on_is_the_state_that_it_was_begun_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (rank,) = ranks(tmp_path, 1)
    slow = tmp_path / FOLDER / "step-4" / "replica-0" / "rank-0-0.safetensors"
    slow.parent.mkdir(parents=True)
    os.mkfifo(slow)  # whoever writes to it waits until it is read
    digest, weights = rank.learn(), rank.weights.clone()
    rank.saver.take(4)
    assert rank.learn() != digest
    rank.saver.take(8)
    assert "checkpoint of step 8 left out: the one before it is still being stored" in caplog.text
    stored = load(slow.read_bytes())
    manifest_of_4 = tmp_path / FOLDER / "step-4" / "manifest.json"
    eventually(lambda: manifest_of_4.exists() and manifest_of_4.read_bytes().endswith(b"}"), "the manifest")
    manifest = json.loads(manifest_of_4.read_bytes())
    assert torch.equal(stored["outer.weights/a:0"], weights)
    assert (manifest["step"], manifest["round"], manifest["digest"]) == (4, 1, digest)
    rank.saver.last(12)
    assert sorted(path.parent.name for path in tmp_path.rglob("manifest.json")) == ["step-12", "step-4"]
