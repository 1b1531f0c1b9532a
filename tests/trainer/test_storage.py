"""Storage on folders and on a real S3 server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer.jobs import TINY_MODEL
from trainer.s3 import S3Server, s3_server
from transformers import AutoModelForCausalLM

from crosscloud_trainer.contract import ExitCode, Model
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.result import write_result
from crosscloud_trainer.storage import Storage


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


def test_what_is_listed_and_deleted_on_s3_is_what_was_written(server: S3Server, bucket: str) -> None:
    storage = Storage(bucket)
    for name in ("a/1", "a/b/2", "c/3"):
        storage.write(name, b"x")
    assert storage.names("") == ["a", "c"]
    assert storage.names("a") == ["1", "b"]
    assert storage.names("none") == []
    storage.remove("a")
    storage.remove("none")
    assert keys(server) == ["some/job/c/3"]


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


def test_a_result_on_s3_is_a_transformers_folder(server: S3Server, bucket: str) -> None:
    model = build_model(Model(config=TINY_MODEL), 32, 1)
    assert write_result(Storage(bucket), model, {"job": "x"}) == f"{bucket}/result"
    loaded = AutoModelForCausalLM.from_pretrained(server.folder / "models" / "some" / "job" / "result")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
