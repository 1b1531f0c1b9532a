"""`crosscloud fetch`: whole or not at all, from a folder and from a real S3 server."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from apiserver import ApiServer, free_port, program
from crdfiles import JOBS, job, minimal_spec
from waiting import wait_until

from crosscloud_operator.cli.common import Failed
from crosscloud_operator.cli.fetch import _place, download, use_environment

from .conftest import Command


def finished_job(hub_api: ApiServer, name: str, uri: str | None, secret: str | None = None, **status: Any) -> None:
    hub_api.namespace("ml")
    storage = {"uri": uri or "s3://bucket/x"} | ({"secretName": secret} if secret else {})
    hub_api.request("POST", JOBS, job(minimal_spec() | {"storage": storage}, name))
    found = status | ({"result": {"uri": uri}} if uri else {})
    hub_api.request("PATCH", f"{JOBS}/{name}/status", {"status": found}, "application/merge-patch+json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder like the one that training leaves."""
    folder = tmp_path / "result"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(3 * 2**20 + 17))
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / "empty").touch()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_result_in_a_folder_is_brought_whole(
    crosscloud: Command, hub_api: ApiServer, model: Path, tmp_path: Path
) -> None:
    finished_job(hub_api, "done", f"file://{model}")
    target = tmp_path / "deep" / "model"
    out = crosscloud("fetch", "done", str(target), "-n", "ml")
    assert content(target) == content(model)
    assert "4 files" in out
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_an_empty_folder_is_filled_and_a_filled_one_is_left_alone(
    crosscloud: Command, hub_api: ApiServer, model: Path, tmp_path: Path
) -> None:
    finished_job(hub_api, "done", f"file://{model}")
    target = tmp_path / "model"
    target.mkdir()
    crosscloud("fetch", "done", str(target), "-n", "ml")
    before = content(target)
    out = crosscloud("fetch", "done", str(target), "-n", "ml", code=2)
    assert "there already" in out
    assert content(target) == before


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """versitygw over a folder; yields the environment that leads to it."""
    port = free_port()
    (folder / "bucket").mkdir(parents=True)
    environment = {**os.environ, "ROOT_ACCESS_KEY": "user", "ROOT_SECRET_KEY": "password"}
    command = [str(program("versitygw")), "--port", f"127.0.0.1:{port}", "--quiet", "posix", str(folder)]
    log = (folder.parent / "s3.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    access = {
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "password",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        wait_until(lambda: _answers(port))
        yield access
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _answers(port: int) -> bool:
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_a_result_in_an_object_store_is_brought_by_the_jobs_own_secret(
    crosscloud: Command, hub_api: ApiServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "s3") as access:
        for name, value in access.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3")
        for name, data in content(model).items():
            store.pipe_file(f"bucket/run/result/{name}", data)
        for name in access:
            monkeypatch.delenv(name)
        fsspec.config.conf.clear()
        type(store).clear_instance_cache()
        hub_api.namespace("ml")
        path = "/api/v1/namespaces/ml/secrets"
        hub_api.raw("DELETE", f"{path}/s3")
        hub_api.request("POST", path, {"metadata": {"name": "s3"}, "stringData": access})
        finished_job(hub_api, "done", "s3://bucket/run/result", secret="s3")
        crosscloud("fetch", "done", str(tmp_path / "model"), "-n", "ml")
        assert content(tmp_path / "model") == content(model)
        type(store).clear_instance_cache()


def test_a_file_that_comes_short_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(fsspec.get_filesystem_class("file")):
        """Announces more than it sends, as a store does when a file is overwritten meanwhile."""

        def find(self, path: str, *arguments: Any, **options: Any) -> Any:
            found = super().find(path, *arguments, **options)
            for info in found.values():
                info["size"] += 1
            return found

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda uri: (Short(), uri))
    with pytest.raises(Failed, match="were announced"):
        download(str(model), tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_secret_sets_storage_variables_only_and_mixes_with_no_identity_of_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", "AWS_PROFILE": "mine", "AWS_SESSION_TOKEN": "mine"})
    use_environment({"AWS_ACCESS_KEY_ID": "a", "PATH": "/evil", "HTTPS_PROXY": "evil", "LD_PRELOAD": "x"})
    assert os.environ == {"PATH": "/bin", "AWS_ACCESS_KEY_ID": "a"}


@pytest.mark.parametrize("name", ["bucket/run/../../etc/passwd", "bucket/other/file", "/etc/passwd"])
def test_a_name_that_leads_out_of_the_target_is_not_fetched(name: str) -> None:
    with pytest.raises(Failed, match="leads out"):
        _place(name, "bucket/run")


def test_what_can_not_be_fetched_is_told_in_one_message(
    crosscloud: Command, hub_api: ApiServer, tmp_path: Path
) -> None:
    running = {
        "type": "Running",
        "status": "True",
        "reason": "Training",
        "message": "step 5 of 10",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    finished_job(hub_api, "early", None, conditions=[running])
    finished_job(hub_api, "empty", f"file://{tmp_path}/nothing")
    finished_job(hub_api, "unknown", "gopher9://x/y")
    finished_job(hub_api, "keyless", "s3://b/x", secret="missing")
    target = str(tmp_path / "target")
    for name, words in (
        ("absent", "there is no job 'absent' in namespace 'ml'"),
        ("early", "has no result yet (Training: step 5 of 10)"),
        ("empty", "nothing"),
        ("unknown", "can't be listed"),
        ("keyless", "there is no Secret ml/missing"),
    ):
        out = crosscloud("fetch", name, target, "-n", "ml", code=1)
        assert words in " ".join(out.split())
        assert not Path(target).exists()
