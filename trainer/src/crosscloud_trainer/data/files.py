"""Which text files a job trains on: globs to files, in an order that is the same on every machine."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosscloud_trainer.contract import Data, Problem

STDLIB = "stdlib:"
HELD_OUT_EVERY = 50  # without `validation`, one file of so many is kept from training
_INSTALLED = ("site-packages", "dist-packages")  # what a user installed is not the standard library


@dataclass(frozen=True)
class Files:
    """Paths of the two parts of a corpus; they have no file in common."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def find_files(data: Data, problems: list[Problem]) -> Files:
    """Files of `data`; what can't be found or read is added to `problems` under its field's name."""
    train = _expand(data.train or (), "training.data.train", problems)
    validation = _expand(data.validation, "training.data.validation", problems)
    if data.validation:
        kept = set(validation)
        return Files(tuple(path for path in train if path not in kept), validation)
    if len(train) < 2:
        return Files(train, ())
    held_out = train[::HELD_OUT_EVERY]
    return Files(tuple(path for number, path in enumerate(train) if number % HELD_OUT_EVERY), held_out)


def _expand(patterns: Sequence[str], field: str, problems: list[Problem]) -> tuple[Path, ...]:
    found: dict[Path, None] = {}  # ordered, and a file that two patterns match counts once
    for number, pattern in enumerate(patterns):
        where = f"{field}[{number}]"
        paths = _matches(pattern)
        if not paths:
            root, _ = split_pattern(pattern)
            hint = f"no file matches it below {root}" if root.is_dir() else f"there is no folder {root}"
            problems.append(Problem(where, pattern, f"{hint}; give a glob like /data/**/*.txt"))
        for path in paths:
            if not os.access(path, os.R_OK):
                problems.append(Problem(where, pattern, f"{path} can't be read: give this user the permission"))
                break
            found[path] = None
    return tuple(found)


def _matches(pattern: str) -> list[Path]:
    root, rest = split_pattern(pattern)
    names = glob.glob(rest, root_dir=root, recursive=True)  # noqa: PTH207 - Path.glob keeps no root
    if pattern.startswith(STDLIB):
        names = [name for name in names if not set(Path(name).parts).intersection(_INSTALLED)]
    return [root / name for name in sorted(names, key=os.fsencode) if (root / name).is_file()]


def split_pattern(pattern: str) -> tuple[Path, str]:
    """(folder, glob below it): the folder is the part in front of the first wildcard."""
    if pattern.startswith(STDLIB):
        return Path(sysconfig.get_path("stdlib")), pattern.removeprefix(STDLIB).lstrip("/")
    parts = Path(pattern).parts
    plain = 0
    while plain < len(parts) - 1 and not glob.has_magic(parts[plain]):
        plain += 1
    return Path(*parts[:plain]), str(Path(*parts[plain:]))
