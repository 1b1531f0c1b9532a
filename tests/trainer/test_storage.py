"""Storage on folders and on a real S3 server, and the checkpoints in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer.jobs import TINY_MODEL
from trainer.s3 import S3Server, s3_server
from transformers import AutoModelForCausalLM

from crosscloud_trainer import checkpoint
from crosscloud_trainer.contract import ExitCode, Model
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.layout import Index, contiguous_shard
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.result import write_result
from crosscloud_trainer.storage import Storage

PLACE = checkpoint.CheckpointId(run_digest="d" * 64, attempt=2, home=1, step=40, round=4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket, and the environment that a pod gets for it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    (server.folder / "models").mkdir()
    yield "s3://models/some/job"
    shutil.rmtree(server.folder / "models")


def keys(server: S3Server) -> list[str]:
    """Keys of the bucket's objects, as the folder that is served shows them."""
    root = server.folder / "models"
    found = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return sorted(key for key in found if not key.startswith(".sgwtmp"))


def failure(uri: str) -> Failure:
    with pytest.raises(Failure) as caught:
        Storage(uri).check()
    told = str(caught.value)
    assert told.startswith(f'storage.uri: found "{uri}"; ')
    assert len(told.splitlines()) == 1
    return caught.value


def test_the_check_on_s3_leaves_nothing_behind(server: S3Server, bucket: str) -> None:
    Storage(bucket).check()
    assert keys(server) == []


def test_what_is_written_to_s3_is_read_back(server: S3Server, bucket: str, tmp_path: Path) -> None:
    storage = Storage(bucket + "/")
    source = tmp_path / "big"
    source.write_bytes(bytes(range(256)) * 40_000)  # more than one part of an upload
    storage.upload(source, "deep/er/big")
    storage.write("deep/small", b"small")
    assert storage.read("deep/er/big") == source.read_bytes()
    assert storage.read("deep/small") == b"small"
    assert storage.read("deep/none") is None
    assert keys(server) == ["some/job/deep/er/big", "some/job/deep/small"]
    assert storage.address("deep/small") == "s3://models/some/job/deep/small"


def test_a_wrong_bucket_is_refused(bucket: str) -> None:
    assert failure("s3://no-such-bucket/x").code == ExitCode.STORAGE_REFUSED


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_wrong_key_is_refused_and_not_shown(bucket: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "wrong")
    found = failure(bucket + "/other")
    assert found.code == ExitCode.STORAGE_REFUSED
    assert "AWS_SECRET_ACCESS_KEY" in str(found)
    assert "a-secret-of-the-test" not in str(found)


def test_a_missing_key_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert failure(bucket + "/another").code == ExitCode.STORAGE_REFUSED


def test_a_server_that_is_not_there_is_unreachable(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    found = failure(bucket + "/elsewhere")
    assert found.code == ExitCode.STORAGE_UNREACHABLE
    assert "AWS_ENDPOINT_URL" in str(found)


def test_folders_are_made_and_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    Storage(str(tmp_path / "new" / "folder")).check()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    Storage(f"file://{tmp_path}/other").check()
    (tmp_path / "file").write_text("x")
    assert failure(str(tmp_path / "file" / "below")).code == ExitCode.STORAGE_REFUSED
    assert failure("/proc/nothing").code == ExitCode.STORAGE_REFUSED


def test_an_address_that_no_file_system_serves_is_invalid_input() -> None:
    with pytest.raises(Failure, match="no file system serves this address") as caught:
        Storage("foo://bar")
    assert caught.value.code == ExitCode.INVALID_INPUT
    assert str(caught.value).startswith('storage.uri: found "foo://bar"; ')


# Checkpoints


def test_a_checkpoint_on_s3_ends_with_the_manifest_of_all_replicas(server: S3Server, bucket: str) -> None:
    storage = Storage(bucket)
    tensors = {"outer.weights/a:0": torch.arange(5.0), "outer.momentum/a:0": torch.zeros(5)}
    for replica, ranks in ((0, 1), (1, 2)):
        chunks = [checkpoint.write_chunk(storage, PLACE, replica, rank, tensors) for rank in range(ranks)]
        assert not [key for key in keys(server) if key.endswith("manifest.json")]
        checkpoint.write_replica(storage, PLACE, replica, chunks)
    path, _ = checkpoint.write_manifest(storage, PLACE, [0, 1], {"digest": "f"}, lambda _: None)
    found = json.loads(storage.read(path) or b"")
    assert path == "attempt-2/home-1/step-40/manifest.json"
    assert [(part["replica"], len(part["chunks"])) for part in found["replicas"]] == [(0, 1), (1, 2)]
    read = checkpoint.read_section(storage, PLACE, 0, "outer.weights")
    assert {key: tensor.tolist() for key, tensor in read.items()} == {("a", 0): [0, 1, 2, 3, 4]}


def test_a_result_on_s3_is_a_transformers_folder(server: S3Server, bucket: str) -> None:
    model = build_model(Model(config=TINY_MODEL), 32, 1)
    assert write_result(Storage(bucket), model, {"job": "x"}) == f"{bucket}/result"
    loaded = AutoModelForCausalLM.from_pretrained(server.folder / "models" / "some" / "job" / "result")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_parts_that_another_job_left_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path))
    older = replace(PLACE, run_digest="e" * 64)
    for replica in (0, 1):
        checkpoint.write_replica(storage, older, replica, [])
    checkpoint.write_replica(storage, PLACE, 0, [])
    monkeypatch.setattr(checkpoint, "_WAIT_SECONDS", 0.0)
    with pytest.raises(Failure, match=r"replicas \[1\] didn't finish") as caught:
        checkpoint.write_manifest(storage, PLACE, [0, 1], {}, lambda _: None)
    assert caught.value.code == ExitCode.PEER_LOST
    assert storage.read(f"{PLACE.folder}/manifest.json") is None


def test_a_chunk_that_changed_in_storage_is_found(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    chunk = checkpoint.write_chunk(storage, PLACE, 0, 0, {"outer.weights/a:0": torch.ones(3)})
    checkpoint.write_replica(storage, PLACE, 0, [chunk])
    path = tmp_path / PLACE.folder / chunk["path"]
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(Failure, match="isn't what was written there"):
        checkpoint.read_section(storage, PLACE, 0, "outer.weights")


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=5), st.integers(1, 4))
def test_sections_by_interval_and_by_cell_hold_each_element_once_at_its_place(sizes: list[int], ranks: int) -> None:
    index = Index.of({f"p{number}": size for number, size in enumerate(sizes)})
    whole = torch.arange(index.elements, dtype=torch.float32)
    order = [parameter.name for parameter in index.parameters]
    piece = -(-index.elements // ranks) or 1
    found = torch.full((index.elements,), -1.0)
    for rank in range(ranks):
        intervals = contiguous_shard(index, order, piece, rank)
        compact = whole[rank * piece : (rank + 1) * piece]
        for key, tensor in checkpoint.by_interval("s", index, intervals, compact).items():
            put(index, found, key, tensor)
    assert torch.equal(found, whole)
    found = torch.full((index.elements,), -1.0)
    for rank in range(ranks):
        ids = np.arange(rank, index.cells, ranks, dtype=np.int64)
        places = [index.cell(int(number)) for number in ids]
        starts = [index.first_elements[index.numbers[name]] for name, _, _ in places]
        parts = [whole[s + a : s + b] for s, (_, a, b) in zip(starts, places, strict=True)]
        values = torch.cat([whole[:0], *parts])
        for key, tensor in checkpoint.by_cell("s", index, ids, values).items():
            put(index, found, key, tensor)
    assert torch.equal(found, whole)


def put(index: Index, target: torch.Tensor, key: str, values: torch.Tensor) -> None:
    name, _, start = key.removeprefix("s/").rpartition(":")
    first = index.first_elements[index.numbers[name]] + int(start)
    assert torch.all(target[first : first + len(values)] == -1.0)
    target[first : first + len(values)] = values
