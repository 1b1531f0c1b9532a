"""Where checkpoints and the result go: any fsspec address, checked before the first step.

Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL,
AWS_DEFAULT_REGION for s3), never from the manifest.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from crosscloud_trainer.contract import ExitCode, Problem
from crosscloud_trainer.failures import Failure, invalid

FIELD = "storage.uri"

_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EIO})
_TRANSIENT_STATUS = frozenset({408, 425, 429})  # of HTTP: refusals that pass by themselves


class Storage:
    """Files below one address. Paths are relative to it, with slashes."""

    def __init__(self, uri: str, field: str = FIELD) -> None:
        """Raises Failure(INVALID_INPUT) when no file system serves the address. `field` is where it was given."""
        self.uri = uri.rstrip("/")
        self._field = field
        self._fs, self._root = file_system(self.uri, field)

    def address(self, path: str) -> str:
        """The whole address of `path`."""
        return f"{self.uri}/{path}"

    def check(self) -> None:
        """Write and delete a probe. Raises Failure(STORAGE_REFUSED or STORAGE_UNREACHABLE)."""
        probe = f".crosscloud-probe-{uuid.uuid4().hex}"
        self.write(probe, b"probe")
        with self._explained(probe):
            self._fs.rm_file(self._path(probe))

    def write(self, path: str, data: bytes) -> None:
        with self._explained(path):
            self._make_folder(path)
            self._fs.pipe_file(self._path(path), data)

    def upload(self, source: Path, path: str) -> None:
        """Copy a local file to `path`."""
        with self._explained(path):
            self._make_folder(path)
            self._fs.put_file(str(source), self._path(path))

    def download(self, path: str, target: Path) -> None:
        """Copy the file at `path` to a local one."""
        with self._explained(path):
            self._fs.get_file(self._path(path), str(target))

    def read(self, path: str) -> bytes | None:
        """The bytes at `path`, None where nothing is."""
        with self._explained(path):
            try:
                self._fs.invalidate_cache()
                return bytes(self._fs.cat_file(self._path(path)))
            except FileNotFoundError:
                return None

    def names(self, path: str) -> list[str]:
        """Names of the files and folders at `path`, none where nothing is."""
        with self._explained(path):
            try:
                self._fs.invalidate_cache()
                found = self._fs.ls(self._path(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found})

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing where nothing is."""
        with self._explained(path):
            try:
                self._fs.invalidate_cache()
                self._fs.rm(self._path(path), recursive=True)
            except FileNotFoundError:
                return

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _make_folder(self, path: str) -> None:
        if "file" in _protocols(self._fs):  # object stores have no folders; there makedirs would make a bucket
            self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as fault:
            raise self._failure(ExitCode.STORAGE_REFUSED, path, f"it isn't there: {_words(fault)}") from fault
        except PermissionError as fault:
            raise self._failure(ExitCode.STORAGE_REFUSED, path, f"permission denied: {_words(fault)}") from fault
        except Exception as fault:  # every file system has its own tree of errors
            if refused(fault):
                full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT)
                raise self._failure(ExitCode.STORAGE_REFUSED, path, _words(fault), full=full) from fault
            raise self._failure(ExitCode.STORAGE_UNREACHABLE, path, f"no answer: {_words(fault)}") from fault

    def _failure(self, code: ExitCode, path: str, what: str, *, full: bool = False) -> Failure:
        advice = "make room there" if full else _advice(self._fs, code)
        problem = Problem(self._field, self.uri, f"{path} can't be written or read; {what}; {advice}")
        return Failure(code, str(problem))


def refused(fault: BaseException) -> bool:
    """Whether the storage answered with a no that asking again won't change."""
    seen: BaseException | None = fault
    while seen is not None:
        if type(seen).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError"):
            return True
        response = getattr(seen, "response", None)  # of botocore's errors
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        if isinstance(status, int) and 400 <= status < 500 and status not in _TRANSIENT_STATUS:
            return True
        if type(seen) is OSError and seen.errno is not None and seen.errno not in _UNREACHABLE:
            return True
        if isinstance(seen, NotADirectoryError | IsADirectoryError | FileExistsError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def file_system(uri: str, field: str) -> tuple[Any, str]:
    """The file system of an address in this field, and the path in it. Raises Failure(INVALID_INPUT)."""
    try:
        fs, root = url_to_fs(uri, **_options(uri))
    except (ValueError, ImportError) as fault:
        known = "a path, file:// or s3://"
        allowed = f"no file system serves this address ({_words(fault)}); {known} always work"
        raise invalid([Problem(field, uri, allowed)]) from fault
    return fs, str(root).rstrip("/")


def _options(uri: str) -> dict[str, Any]:
    if not uri.startswith(("s3://", "s3a://")):
        return {}
    config: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        config["s3"] = {"addressing_style": "path"}  # no bucket.host name resolves in front of an own server
    # fsspec would hand out the file system of an earlier environment again
    return {"config_kwargs": config, "skip_instance_cache": True}


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    found = fs.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _advice(fs: fsspec.AbstractFileSystem, code: ExitCode) -> str:
    if "s3" not in _protocols(fs):
        return "choose a folder that this user may write to"
    if code is ExitCode.STORAGE_UNREACHABLE:
        return "check AWS_ENDPOINT_URL and the network"
    return "check the bucket's name, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what that key may do"


def _words(fault: BaseException) -> str:
    return " ".join(str(fault).split())[:300] or type(fault).__name__
