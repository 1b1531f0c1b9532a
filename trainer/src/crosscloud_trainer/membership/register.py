"""Where the view is kept: read and compare-and-swap, in a ConfigMap of the home member or in a file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crosscloud_trainer.contract import ExitCode, InvalidDocument, dump, dump_json, read, read_json
from crosscloud_trainer.environment import report_credentials
from crosscloud_trainer.link import LinkError
from crosscloud_trainer.membership.kube import ConfigMapClient, KubeConflict
from crosscloud_trainer.membership.view import VIEW_KEY, View, opened


class Conflict(Exception):
    """The register has changed since it was read."""


class RegisterUnusable(LinkError):
    """The register doesn't answer, or holds what is no view."""

    exit_code = ExitCode.PEERS_MISSING


@dataclass(frozen=True)
class Versioned:
    """What the register holds; `view` is None before the first one. `version` is for `swap` only."""

    view: View | None
    version: str


class Register(Protocol):
    """Both calls raise OSError where the register can't be reached, and InvalidDocument where it holds no view."""

    def read(self) -> Versioned: ...

    def swap(self, view: View, version: str) -> Versioned:
        """Writes the view if the register is still at `version`. Raises Conflict if it is not."""
        ...


class ConfigMapRegister:
    """The key `view.json` of a ConfigMap that exists already; its resourceVersion is the version."""

    def __init__(self, client: ConfigMapClient, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name

    def read(self) -> Versioned:
        found = self._client.get(self._namespace, self._name)
        text = found.data.get(VIEW_KEY)
        return Versioned(None if text is None else read_json(View, text), found.resource_version)

    def swap(self, view: View, version: str) -> Versioned:
        try:
            written = self._client.patch(
                self._namespace, self._name, {VIEW_KEY: dump_json(view)}, resource_version=version
            )
        except KubeConflict as fault:
            raise Conflict(str(fault)) from fault
        return Versioned(view, written.resource_version)


class FileRegister:
    """A file with a number that counts its changes, guarded by a lock file beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Versioned:
        try:
            data = json.loads(self._path.read_text())
        except FileNotFoundError:
            return Versioned(None, "0")
        except ValueError as fault:
            raise OSError(f"{self._path}: holds no JSON ({fault})") from fault
        if not isinstance(data, dict) or not isinstance(data.get("version"), int):
            raise OSError(f"{self._path}: holds no register")
        return Versioned(read(View, data.get("view"), "view"), str(data["version"]))

    def swap(self, view: View, version: str) -> Versioned:
        with self._locked():
            found = self.read()
            if found.version != version:
                raise Conflict(f"{self._path}: found version {found.version}, expected {version}")
            number = int(version) + 1
            draft = self._path.with_name(self._path.name + ".part")
            with draft.open("w") as file:
                json.dump({"version": number, "view": dump(view)}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            return Versioned(view, str(number))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._path.with_name(self._path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def register_from(text: str, environ: Mapping[str, str] = os.environ) -> Register:
    """The register that `configmap:NAMESPACE/NAME` or `file:PATH` stands for. Raises RegisterUnusable."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileRegister(Path(rest))
    namespace, _, name = rest.partition("/")
    if kind != "configmap" or not namespace or not name:
        raise RegisterUnusable(f"register: found {text!r}; must be configmap:NAMESPACE/NAME or file:PATH")
    try:
        client = ConfigMapClient.in_cluster(report_credentials(environ), environ)
    except OSError as fault:
        raise RegisterUnusable(str(fault)) from fault
    return ConfigMapRegister(client, namespace, name)


def open_view(
    register: Register,
    home: int,
    attempt: int,
    incarnations: Mapping[int, int],
    seconds: float = 60.0,
    pause: Callable[[float], None] = time.sleep,
) -> View:
    """Takes charge of the view: a swap that raises its term. `incarnations` are by replica number.

    Raises Fenced if the register is of a newer attempt or home, RegisterUnusable if it can't be had in time.
    """
    deadline = time.monotonic() + seconds
    wait = 0.1
    while True:
        try:
            found = register.read()
            view = opened(found.view, home, attempt, incarnations)
            register.swap(view, found.version)
        except InvalidDocument as fault:
            raise RegisterUnusable(f"the register holds no view of ours: {fault}") from fault
        except (Conflict, OSError) as fault:
            if time.monotonic() + wait > deadline:
                raise RegisterUnusable(f"no view could be opened in {seconds:g} s: {fault}") from fault
            pause(wait)
            wait = min(5.0, wait * 2)
        else:
            return view
