"""Checkpoints as files: whole or not at all, found by what is written in them, deleted only once acknowledged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.disks import disk_of

from crosscloud_trainer import checkpoint
from crosscloud_trainer.checkpoint import Abandoned, Checkpoint, CheckpointId, Damaged, Part, Scope, Span
from crosscloud_trainer.claim import CLAIM, check_claim, claim, release
from crosscloud_trainer.contract import (
    Acknowledged,
    Data,
    ExitCode,
    Home,
    JobRef,
    Model,
    ModelPreset,
    ReplicaPlan,
    RunDocument,
    StagePlan,
    StoredCheckpoint,
    Sync,
    Training,
    best_of,
    dump_json,
    remembered,
)
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.layout import Index, contiguous_shard, split_shard
from crosscloud_trainer.reporting import write_whole
from crosscloud_trainer.retention import Retention, prune
from crosscloud_trainer.state import cell_spans, parts_of, spans_of
from crosscloud_trainer.storage import Storage

PLACE = CheckpointId("u", run_digest="d" * 64, attempt=2, home=1, step=40, round=4)
INDEX = Index.of({"a": 9000, "b": 3, "c": 4096})


def vector(index: Index = INDEX) -> torch.Tensor:
    return torch.arange(index.elements, dtype=torch.float32)


def whole(index: Index, section: str, scope: Scope, values: torch.Tensor) -> list[Part]:
    spans = [Span(number, 0, parameter.elements) for number, parameter in enumerate(index.parameters)]
    return parts_of(section, scope, spans, values)


def store(
    storage: Storage, which: CheckpointId, ranks: dict[tuple[int, int], list[Part]], index: Index = INDEX
) -> StoredCheckpoint:
    """A checkpoint of these parts by (replica, rank)."""
    for (replica, rank), parts in ranks.items():
        chunks = checkpoint.write_chunks(storage, which, replica, rank, index, parts)
        sections = {part.section: part.scope.value for part in parts}
        checkpoint.write_list(storage, which, replica, rank, {"chunks": chunks, "sections": sections})
    counts: dict[int, int] = {}
    for replica, rank in ranks:
        counts[replica] = max(counts.get(replica, 0), rank + 1)
    state = {"parameters": [[item.name, item.elements] for item in index.parameters]}
    return checkpoint.write_manifest(storage, which, counts, state, lambda _: None)


def read(stored: StoredCheckpoint, section: str, replica: int | None, spans: list[Span], size: int) -> torch.Tensor:
    found = torch.full((size,), -1.0)
    parts = parts_of(section, Scope.REPLICA, spans, found)
    Checkpoint(stored).read([(section, replica, part.span, part.values) for part in parts])
    return found


def two(storage: Storage, step: int = 40) -> StoredCheckpoint:
    """Weights that two ranks share, and a residual that both replicas have."""
    spans = [spans_of(contiguous_shard(INDEX, ["a", "b", "c"], 7000, rank)) for rank in (0, 1)]
    values = vector()
    cut = [parts_of("outer.weights", Scope.MODEL, spans[0], values[:7000])]
    cut += [parts_of("outer.weights", Scope.MODEL, spans[1], values[7000:])]
    own = [whole(INDEX, "residual", Scope.REPLICA, values + 1000 * replica) for replica in (0, 1)]
    ranks = {(0, 0): [*cut[0], *own[0]], (0, 1): cut[1], (1, 0): own[1]}
    return store(storage, replace(PLACE, step=step), ranks)


def test_what_was_stored_is_read_back_by_element(tmp_path: Path) -> None:
    stored = two(Storage(str(tmp_path)))
    spans = [Span(0, 100, 9000), Span(2, 0, 5)]
    expected = torch.cat([vector()[100:9000], vector()[9003:9008]])
    assert torch.equal(read(stored, "outer.weights", 1, spans, len(expected)), expected)
    assert torch.equal(read(stored, "residual", 1, spans, len(expected)), expected + 1000)
    text = (tmp_path / PLACE.folder / "manifest.json").read_bytes()
    assert stored.digest == hashlib.sha256(text).hexdigest()
    assert stored.step == 40


SIZES = st.lists(st.integers(1, 9000), min_size=1, max_size=4)


@given(SIZES, st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_number_of_ranks_reads_what_any_other_number_has_stored(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], before: int, after: int, cut_each: bool
) -> None:
    index = Index.of({f"p{number}": size for number, size in enumerate(sizes)})
    order = [parameter.name for parameter in index.parameters]
    values = vector(index)
    firsts = index.first_elements
    piece = -(-index.elements // before) or 1

    def of(spans: list[Span]) -> torch.Tensor:
        return torch.cat(
            [values[:0], *(values[firsts[s.parameter] + s.start : firsts[s.parameter] + s.stop] for s in spans)]
        )

    ranks = {}
    for rank in range(before):
        spans = spans_of(contiguous_shard(index, order, piece, rank))
        ranks[0, rank] = parts_of("outer.weights", Scope.MODEL, spans, of(spans))
        ids = np.arange(rank, index.cells, before, dtype=np.int64)
        cells = cell_spans(index, ids)
        ranks[0, rank] += parts_of("residual", Scope.REPLICA, cells, of(cells))
    stored = store(Storage(str(tmp_path_factory.mktemp("any"))), PLACE, ranks, index)
    for rank in range(after):
        shard = split_shard if cut_each else contiguous_shard
        count = after if cut_each else -(-index.elements // after) or 1
        spans = spans_of(shard(index, order, count, rank))
        expected = of(spans)
        for section in ("outer.weights", "residual"):
            assert torch.equal(read(stored, section, 0, spans, len(expected)), expected)


def damaged(stored: StoredCheckpoint) -> str:
    with pytest.raises(Damaged) as caught:
        read(stored, "outer.weights", 0, [Span(0, 0, 9000)], 9000)
    return str(caught.value)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_chunk_that_was_cut_off_is_found(tmp_path: Path, part: float) -> None:
    stored = two(Storage(str(tmp_path)))
    path = tmp_path / PLACE.folder / "replica-0" / "rank-1-0.safetensors"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    assert "bytes; " in damaged(stored)
    assert "replica-0/rank-1-0.safetensors has" in damaged(stored)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    stored = two(Storage(str(tmp_path)))
    path = tmp_path / PLACE.folder / "replica-0" / "rank-0-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert damaged(stored) == "replica-0/rank-0-0.safetensors isn't what was written there: the storage changed it"


def test_a_missing_chunk_and_a_missing_or_changed_manifest_are_found(tmp_path: Path) -> None:
    stored = two(Storage(str(tmp_path)))
    (tmp_path / PLACE.folder / "replica-0" / "rank-0-0.safetensors").unlink()
    assert damaged(stored) == "replica-0/rank-0-0.safetensors isn't there"
    manifest = tmp_path / PLACE.folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    assert damaged(stored) == "its manifest isn't the one that was written"
    manifest.unlink()
    assert damaged(stored) == "its manifest isn't there"


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([Span(0, 0, 8999), Span(1, 0, 3), Span(2, 0, 4096)], "1 elements are missing"),
        ([Span(0, 0, 9000), Span(1, 0, 3)], "4096 elements are missing"),
        ([Span(0, 0, 9000), Span(0, 4096, 9000), Span(1, 0, 3), Span(2, 0, 4096)], "leave a gap or lie twice"),
        ([Span(0, 0, 4096), Span(0, 4097, 9000), Span(1, 0, 3), Span(2, 0, 4096)], "leave a gap or lie twice"),
    ],
)
def test_a_checkpoint_that_lacks_an_element_or_has_one_twice_is_never_read(
    tmp_path: Path, spans: list[Span], told: str
) -> None:
    size = sum(span.stop - span.start for span in spans)
    parts = parts_of("outer.weights", Scope.MODEL, spans, torch.zeros(size))
    stored = store(Storage(str(tmp_path)), PLACE, {(0, 0): parts[:1], (0, 1): parts[1:]})
    assert told in damaged(stored)


def test_large_vectors_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 4096 * 4)
    stored = two(Storage(str(tmp_path)))
    files = list((tmp_path / PLACE.folder / "replica-0").glob("rank-0-*.safetensors"))
    assert len(files) == 6  # 7,000 weights of one part and 13,099 residuals of three, of 4 bytes
    assert all(path.stat().st_size < 4096 * 4 + 1000 for path in files)
    assert torch.equal(read(stored, "outer.weights", 0, [Span(0, 0, 9000)], 9000), vector()[:9000])


def test_a_replica_that_takes_no_part_ends_the_checkpoint_for_all(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    checkpoint.write_list(storage, PLACE, 0, 0, {"chunks": []})
    checkpoint.abandon(storage, PLACE, 1, 0, "its disk is full")
    with pytest.raises(Abandoned, match="replica 1: its disk is full"):
        checkpoint.write_manifest(storage, PLACE, {0: 1, 1: 1}, {}, lambda _: None)
    with pytest.raises(Abandoned, match="replica 1: its disk is full"):
        checkpoint.wait_for_manifest(storage, PLACE)
    assert storage.read(f"{PLACE.folder}/manifest.json") is None


def test_parts_that_another_job_left_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path))
    for replica in (0, 1):
        checkpoint.write_list(storage, replace(PLACE, run_digest="e" * 64), replica, 0, {"chunks": []})
    checkpoint.write_list(storage, PLACE, 0, 0, {"chunks": []})
    monkeypatch.setattr(checkpoint, "_WAIT_SECONDS", 0.0)
    with pytest.raises(Failure, match=r"replicas \[1\] didn't finish") as caught:
        checkpoint.write_manifest(storage, PLACE, {0: 1, 1: 1}, {}, lambda _: None)
    assert caught.value.code == ExitCode.PEER_LOST
    assert storage.read(f"{PLACE.folder}/manifest.json") is None


# A disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with disk_of(tmp_path / "disk", "256k") as folder:
        yield folder


def test_a_full_disk_is_told_and_the_checkpoint_before_stays_good(small_disk: Path) -> None:
    storage = Storage(str(small_disk))
    before = two(storage)
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 8192))
    with pytest.raises(Failure, match="No space left on device; make room there") as caught:
        two(storage, step=60)
    assert caught.value.code == ExitCode.STORAGE_REFUSED
    checkpoint.discard(storage, replace(PLACE, step=60), 0, 0)
    assert list((small_disk / "attempt-2" / "home-1" / "step-60").rglob("*.safetensors")) == []
    assert torch.equal(read(before, "outer.weights", 0, [Span(0, 0, 9000)], 9000), vector()[:9000])


# Which checkpoints stay


def steps_in(folder: Path) -> list[str]:
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob("manifest.json"))


def test_only_what_is_older_than_an_acknowledged_one_is_deleted(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    stored = [two(storage, step) for step in (20, 30, 40, 50)]
    checkpoint.write_list(storage, replace(PLACE, step=35), 0, 0, {"chunks": []})  # one that was abandoned
    prune(storage, Acknowledged(()))
    assert len(steps_in(tmp_path)) == 4
    prune(storage, Acknowledged((stored[2], stored[0])))
    home = "attempt-2/home-1"
    assert steps_in(tmp_path) == [f"{home}/step-20", f"{home}/step-40", f"{home}/step-50"]
    assert sorted(path.name for path in (tmp_path / home).iterdir()) == ["step-20", "step-40", "step-50"]
    later = store(
        storage, replace(PLACE, attempt=3, step=10), {(0, 0): whole(INDEX, "outer.weights", Scope.MODEL, vector())}
    )
    prune(storage, Acknowledged((later,)))
    assert steps_in(tmp_path) == ["attempt-3/home-1/step-10"]


def test_an_acknowledgement_of_another_storage_deletes_nothing(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "here"))
    two(storage)
    prune(storage, Acknowledged((StoredCheckpoint("s3://there/attempt-9/home-1/step-90/manifest.json", "0" * 64, 90),)))
    assert len(steps_in(tmp_path / "here")) == 1


def acknowledge(path: Path, *stored: StoredCheckpoint) -> None:
    write_whole(path, dump_json(Acknowledged(stored)))


def test_at_the_end_older_ones_go_once_the_last_is_acknowledged(tmp_path: Path) -> None:
    storage, path = Storage(str(tmp_path / "storage")), tmp_path / "acknowledged.json"
    stored = [two(storage, step) for step in (20, 30, 40, 50)]
    acknowledge(path, stored[1])
    retention = Retention(storage, path)
    asked = []

    def stopped() -> bool:
        """The launcher takes its time."""
        asked.append(len(steps_in(tmp_path)))
        if len(asked) == 3:
            acknowledge(path, stored[3], stored[2])
        return False

    retention.finish(stored[3], 2, stopped)
    assert asked == [3, 3, 3]  # what is newer than the acknowledged one has stayed
    home = "storage/attempt-2/home-1"
    assert steps_in(tmp_path) == [f"{home}/step-40", f"{home}/step-50"]


def test_at_the_end_nothing_is_waited_for_where_nothing_would_go_or_the_pod_is_told_to_end(tmp_path: Path) -> None:
    storage, path = Storage(str(tmp_path / "storage")), tmp_path / "acknowledged.json"
    stored = [two(storage, step) for step in (20, 30, 40)]
    Retention(storage, path).finish(stored[2], 3, lambda: pytest.fail("asked"))
    Retention(storage, path).finish(stored[2], 2, lambda: True)
    assert len(steps_in(tmp_path)) == 3


def at(step: int, loss: str | None = None) -> StoredCheckpoint:
    return StoredCheckpoint(f"/step-{step}", "0" * 64, step, loss)


def test_the_last_ones_stay_and_beside_them_the_best_one_for_as_long_as_it_is_the_best() -> None:
    known: tuple[StoredCheckpoint, ...] = ()
    seen = []
    for step, loss in (
        (1, "9.5000"),
        (2, "10.1000"),
        (3, "9.9000"),
        (4, None),
        (5, "9.4000"),
        (6, "9.6000"),
        (7, "9.6000"),
    ):
        known = remembered(at(step, loss), known, 2)
        seen.append([item.step for item in known])
    assert seen == [[1], [2, 1], [3, 2, 1], [4, 3, 1], [5, 4], [6, 5], [7, 6, 5]]
    assert best_of(known) == at(5, "9.4000")
    assert best_of([at(3, "9.6000"), at(2, "9.6000")]) == at(3, "9.6000")
    assert best_of([at(1)]) is None


def test_a_checkpoint_tells_the_mean_of_what_the_replicas_have_measured_last(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))

    def stored(step: int, *losses: float | None) -> StoredCheckpoint:
        which = replace(PLACE, step=step)
        for replica, loss in enumerate(losses):
            checkpoint.write_list(storage, which, replica, 0, {"chunks": [], "validationLoss": loss})
        return checkpoint.write_manifest(storage, which, dict.fromkeys(range(len(losses)), 1), {}, lambda _: None)

    assert stored(1, 2.0, 2.5).validation_loss == "2.2500"
    assert stored(2, 2.0, None).validation_loss is None


# Two jobs that write into one storage


def document(**changes: Any) -> RunDocument:
    made = RunDocument(
        api_version="run.crosscloud.dev/v1",
        job=JobRef("ml", "first", "uid-1"),
        attempt=1,
        home=Home(1, "east"),
        replicas=(ReplicaPlan(0, 1, 1, (StagePlan(0, "east", 1, 1),)),),
        sync=Sync(),
        training=Training(model=Model(preset=ModelPreset.TINY_LLAMA), data=Data(train=("x",)), tokens=1),
        storage_uri="s3://models/x",
    )
    return replace(made, **changes)


def test_a_storage_belongs_to_one_job_until_it_has_succeeded(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    first, other = document(), document(job=JobRef("ml", "second", "uid-2"))
    claim(storage, first)
    with pytest.raises(Failure, match="belongs to job ml/first, which has not succeeded") as caught:
        claim(storage, other)
    assert caught.value.code == ExitCode.STORAGE_REFUSED
    claim(storage, replace(first, attempt=2))
    with pytest.raises(Failure, match="attempt 2 of this job writes there now") as caught:
        check_claim(storage, first)
    assert caught.value.code == ExitCode.FENCED
    release(storage, replace(first, attempt=2))
    claim(storage, other)
    with pytest.raises(Failure, match=r"job ml/second \(uid-2\) writes there now"):
        check_claim(storage, first)


def test_a_job_that_was_made_again_takes_its_storage_over(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    claim(storage, document(attempt=3))
    claim(storage, document(job=JobRef("ml", "first", "uid-9")))
    assert json.loads((tmp_path / CLAIM).read_text())["uid"] == "uid-9"
    (tmp_path / CLAIM).write_text("no JSON")
    claim(storage, document())
