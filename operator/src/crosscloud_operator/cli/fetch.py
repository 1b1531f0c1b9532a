"""`crosscloud fetch JOB DIR`: brings a job's result, whole or not at all."""

from __future__ import annotations

import base64
import binascii
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import click
import fsspec
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from crosscloud_operator.cli.common import (
    Failed,
    Hub,
    checked_job,
    console,
    existing_job,
    hub_options,
    namespace_option,
    run,
)
from crosscloud_operator.domain.record import condition_in
from crosscloud_operator.kube.api import SECRET, Cluster, Obj, Ref

_STORAGE_NAMES = ("AWS_", "AZURE_", "GOOGLE_", "FSSPEC_")
_OWN_IDENTITY = ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")  # must not mix in

# What the libraries below fsspec raise is theirs to choose; each becomes one sentence.
_ANY = Exception


@dataclass(frozen=True)
class RemoteFile:
    """One file of the result: its full name in the store, its place below the target, its size in bytes."""

    source: str
    place: PurePosixPath
    size: int


@click.command()
@click.argument("job", callback=checked_job)
@click.argument("directory", metavar="DIR", callback=lambda _context, _parameter, value: _directory(value))
@namespace_option
@click.option(
    "--endpoint-url",
    metavar="URL",
    callback=lambda _context, _parameter, value: _endpoint(value),
    help="The object store's address from here [default: as the job's pods use it]",
)
@hub_options
def fetch(job: str, directory: Path, namespace: str, endpoint_url: str | None, hub: Hub) -> None:
    """Bring the result of JOB, a `transformers` folder, into DIR.

    The storage credentials are those of the job's Secret. DIR is there only when every file is complete.
    """
    cluster = hub.cluster()
    uri, environment = run(_location(cluster, namespace, job), cluster)
    if endpoint_url:
        environment["AWS_ENDPOINT_URL"] = endpoint_url
    use_environment(environment)
    download(uri, directory)


def _directory(value: str) -> Path:
    """Where the result shall be: told before anything is asked of anybody."""
    path = Path(value)
    allowed = "must be a folder that isn't there yet, or an empty one"
    try:
        if not value or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise click.BadParameter(f"found {value!r}{', which is there already' if value else ''}; {allowed}")
        above = next(parent for parent in path.absolute().parents if parent.exists())
    except (OSError, ValueError) as fault:
        raise click.BadParameter(f"found {value!r}; {allowed} ({fault})") from fault
    if not above.is_dir():
        raise click.BadParameter(f"found {value!r}, but {above} is a file; {allowed}")
    return path


def _endpoint(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        raise click.BadParameter(f"found {value!r}; must be an address like http://127.0.0.1:9000")
    return value


def use_environment(environment: Mapping[str, str]) -> None:
    """The job's storage credentials, where the pods have them too: the storage libraries look there.

    Names that have nothing to do with storage are left out, since a Secret may come from somebody else: it shall not
    set this process's PATH or proxies.
    """
    if any(name.startswith("AWS_") for name in environment):
        for name in _OWN_IDENTITY:
            os.environ.pop(name, None)
    os.environ.update({name: value for name, value in environment.items() if name.startswith(_STORAGE_NAMES)})


async def _location(cluster: Cluster, namespace: str, name: str) -> tuple[str, dict[str, str]]:
    """Address of the result, and the environment that its storage needs."""
    job = await existing_job(cluster, namespace, name)
    status = job.get("status") or {}
    uri = (status.get("result") or {}).get("uri")
    if not uri:
        running = condition_in(status, "Running")
        state = f"{running['reason']}: {running['message']}" if running else "it was not looked at yet"
        raise Failed(f"JOB: {namespace}/{name} has no result yet ({state})")
    return str(uri), await _environment(cluster, namespace, job)


async def _environment(cluster: Cluster, namespace: str, job: Obj) -> dict[str, str]:
    name = job["spec"]["storage"].get("secretName")
    if not name:
        return {}
    secret = await cluster.get(Ref(SECRET, name, namespace))
    if secret is None:
        raise Failed(f"spec.storage.secretName: there is no Secret {namespace}/{name} on the hub")
    try:
        return {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}
    except (binascii.Error, ValueError) as fault:
        raise Failed(f"Secret {namespace}/{name}: a value is not text") from fault


def download(uri: str, directory: Path) -> None:
    """Every file below `uri` into `directory`, which appears only when all of it is there. Raises Failed."""
    filesystem, files = _listing(uri)
    total = sum(file.size for file in files)
    target = directory.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < total:
            raise Failed(f"DIR: {target.parent} has {free} bytes free; the result takes {total}")
        # Beside the target, so that the last step is one rename.
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as fault:
        raise Failed(f"DIR: {fault}") from fault
    try:
        draft.chmod(0o755)
        with _progress() as progress:
            task = progress.add_task("fetch", total=total)
            for file in files:
                progress.update(task, description=str(file.place))
                _one(filesystem, file, draft, lambda count: progress.advance(task, count))
        if target.exists():
            target.rmdir()  # empty, as checked; a folder filled meanwhile is left alone
        draft.rename(target)
    except OSError as fault:
        raise Failed(f"DIR: {fault}") from fault
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console().print(f"{len(files)} files, {total} bytes: {directory}")


def _listing(uri: str) -> tuple[Any, list[RemoteFile]]:
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
        found: Mapping[str, Mapping[str, Any]] = filesystem.find(root, detail=True)
    except _ANY as fault:
        raise Failed(f"{uri}: can't be listed: {_words(fault)}") from fault
    files = [
        RemoteFile(name, _place(name, root), int(info.get("size") or 0))
        for name, info in sorted(found.items())
        if info.get("type", "file") == "file"
    ]
    if not files:
        raise Failed(f"{uri}: there is nothing; was it deleted since the job ended?")
    return filesystem, files


def _place(name: str, root: str) -> PurePosixPath:
    """Where a file goes below the target. An object store's names are free text: none may lead out of it."""
    relative = posixpath.relpath(name, root.rstrip("/") or "/")
    place = PurePosixPath(relative)
    if place.is_absolute() or ".." in PurePosixPath(name).parts or ".." in place.parts:
        raise Failed(f"{name}: a name that leads out of the result; not fetched")
    return place


def _one(filesystem: Any, file: RemoteFile, draft: Path, advance: Callable[[int], None]) -> None:
    path = draft / file.place
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    try:
        with filesystem.open(file.source, "rb") as source, path.open("wb") as sink:
            while chunk := source.read(2**20):
                sink.write(chunk)
                written += len(chunk)
                advance(len(chunk))
    except _ANY as fault:
        raise Failed(f"{file.source}: stopped after {written} of {file.size} bytes: {_words(fault)}") from fault
    if written != file.size:
        raise Failed(f"{file.source}: {written} bytes came, {file.size} were announced")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console(stderr=True),
        transient=True,
    )


def _words(fault: BaseException) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__
