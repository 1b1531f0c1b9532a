"""Which files a replica trains on: globs and addresses to files, in an order that is the same on every machine."""

from __future__ import annotations

import glob
import io
import os
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from crosscloud_trainer.contract import Data, DataFormat, ExitCode, Problem, Source
from crosscloud_trainer.failures import Failure, invalid
from crosscloud_trainer.storage import file_system, refused

STDLIB = "stdlib:"
FIELD_NAME = "text"  # of JSON objects and columns, where the manifest names none
_INSTALLED = ("site-packages", "dist-packages")  # what a user installed is not the standard library
_SUFFIXES = {".jsonl": DataFormat.JSONL, ".ndjson": DataFormat.JSONL, ".parquet": DataFormat.PARQUET}
_SMALL_BYTES = 2**28  # of a tokenizer's file


@dataclass(frozen=True)
class File:
    """One file: its path as a person knows it, how it is read, and the pattern that matched it by field and value."""

    path: str
    format: DataFormat
    name: str  # of the JSON object's key, or the column
    field: str
    pattern: str
    system: Any = None  # of fsspec; None for a local path

    def open(self) -> IO[bytes]:
        """Raises OSError, or what the file system has for errors."""
        if self.system is None:
            return Path(self.path).open("rb")
        return io.BufferedReader(self.system.open(self.path.partition("://")[2], "rb"))  # as readline needs it


@dataclass(frozen=True)
class Found:
    """Files of one source; `place` is its number in the manifest."""

    place: int
    source: Source
    files: tuple[File, ...]


@dataclass(frozen=True)
class Files:
    """What one replica reads. No file is in both parts."""

    sources: tuple[Found, ...]
    validation: tuple[File, ...]


def find_files(data: Data, members: Collection[str], problems: list[Problem]) -> Files:
    """Files of `data` for a replica in `members`; what can't be found or read is added to `problems` under its field.

    Raises Failure(STORAGE_UNREACHABLE) where a file system doesn't answer.
    """
    validation = _expand("training.data.validation", Source(name="validation", paths=data.validation), problems)
    kept = {file.path for file in validation}
    sources = []
    for place in data.sources_of(members):
        source = data.all_sources[place]
        files = _expand(data.path_of(place), source, problems)
        sources.append(Found(place, source, tuple(file for file in files if file.path not in kept)))
    if not sources:
        names = [source.name for source in data.all_sources]
        where = " and ".join(sorted(members))
        allowed = f"none of them is for member {where}, where this replica runs: add it to the members of one"
        problems.append(Problem("training.data.sources", names, allowed))
    return Files(tuple(sources), validation)


def _expand(field: str, source: Source, problems: list[Problem]) -> tuple[File, ...]:
    found: dict[str, File] = {}  # ordered, and a file that two patterns match counts once
    for number, pattern in enumerate(source.paths):
        where = f"{field}[{number}]"
        system, paths, root = _matches(where, pattern)
        if not paths:
            problems.append(Problem(where, pattern, f"{root}; give a glob like /data/**/*.txt"))
        for path in paths:
            if system is None and not os.access(path, os.R_OK):
                problems.append(Problem(where, pattern, f"{path} can't be read: give this user the permission"))
                break
            kind = source.format or _SUFFIXES.get(Path(path).suffix.lower(), DataFormat.TEXT)
            found.setdefault(path, File(path, kind, source.field or FIELD_NAME, where, pattern, system))
    return tuple(found.values())


def _matches(field: str, pattern: str) -> tuple[Any, list[str], str]:
    """(file system or None, paths, why there are none)."""
    if "://" in pattern:
        return _remote_matches(field, pattern)
    root, rest = split_pattern(pattern)
    names = glob.glob(rest, root_dir=root, recursive=True)  # noqa: PTH207 - Path.glob keeps no root
    if pattern.startswith(STDLIB):
        names = [name for name in names if not set(Path(name).parts).intersection(_INSTALLED)]
    paths = [str(root / name) for name in sorted(names, key=os.fsencode) if (root / name).is_file()]
    return None, paths, f"no file matches it below {root}" if root.is_dir() else f"there is no folder {root}"


def _remote_matches(field: str, pattern: str) -> tuple[Any, list[str], str]:
    scheme = pattern.partition("://")[0]
    system, path = file_system(pattern, field)
    try:
        if glob.has_magic(path):
            found = [name for name, about in system.glob(path, detail=True).items() if about["type"] == "file"]
        else:
            found = [path] if system.isfile(path) else []
    except Exception as fault:  # every file system has its own tree of errors
        raise unreadable(field, pattern, pattern, fault) from fault
    return system, [f"{scheme}://{name}" for name in sorted(found, key=os.fsencode)], "no file matches it"


def unreadable(field: str, pattern: str, path: str, fault: BaseException) -> Failure:
    """What to tell of a file that can't be read: final where it was refused, else worth another attempt."""
    final = refused(fault) or isinstance(fault, FileNotFoundError | PermissionError)
    advice = "check the name, the credentials and what they may do" if final else "it may pass"
    problem = Problem(field, pattern, f"{path} can't be read: {words(fault)}; {advice}")
    return Failure(ExitCode.INVALID_INPUT if final else ExitCode.STORAGE_UNREACHABLE, str(problem))


def words(fault: BaseException) -> str:
    """What an error says, on one line."""
    return getattr(fault, "strerror", None) or " ".join(str(fault).split())[:300] or type(fault).__name__


def fetch_small_files(address: str, names: Sequence[str], folder: Path, field: str) -> Path:
    """The file or folder at `address`, on this machine: of a remote folder the files that match one of `names`."""
    if "://" not in address:
        if not Path(address).exists():
            raise invalid([Problem(field, address, "there is no such file or folder")])
        return Path(address)
    system, path = file_system(address, field)
    try:
        if system.isfile(path):
            system.get_file(path, str(folder / "tokenizer.json"))
            return folder / "tokenizer.json"
        for about in system.ls(path, detail=True):
            name = about["name"].rpartition("/")[2]
            if (
                about["type"] == "file"
                and about["size"] <= _SMALL_BYTES
                and any(fnmatch(name, known) for known in names)
            ):
                system.get_file(about["name"], str(folder / name))
    except Exception as fault:  # every file system has its own tree of errors
        raise unreadable(field, address, address, fault) from fault
    return folder


def split_pattern(pattern: str) -> tuple[Path, str]:
    """(folder, glob below it): the folder is the part in front of the first wildcard."""
    if pattern.startswith(STDLIB):
        return Path(sysconfig.get_path("stdlib")), pattern.removeprefix(STDLIB).lstrip("/")
    parts = Path(pattern).parts
    plain = 0
    while plain < len(parts) - 1 and not glob.has_magic(parts[plain]):
        plain += 1
    return Path(*parts[:plain]), str(Path(*parts[plain:]))
