"""The token files of one pod: written once by its launcher, mapped into memory by all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosscloud_trainer.contract import Data, Problem, Training
from crosscloud_trainer.data.files import find_files
from crosscloud_trainer.data.tokens import encode_document
from crosscloud_trainer.failures import invalid

_TRAIN = "train.u16"
_VALIDATION = "validation.u16"


@dataclass(frozen=True)
class Corpus:
    """Sequences of token ids, shape (sequences, sequence_length) each."""

    train: NDArray[np.uint16]
    validation: NDArray[np.uint16]


def write_corpus(training: Training, replicas: int, folder: Path) -> str:
    """Tokenize the job's files into `folder`; returns a line that says what was found.

    Raises Failure(INVALID_INPUT) naming the field when files are missing, unreadable or too small.
    """
    problems: list[Problem] = []
    files = find_files(training.data, problems)
    length = training.sequence_length
    counts = {}
    if not problems:
        counts = {
            name: _write(paths, folder / name, training.data, problems)
            for name, paths in ((_TRAIN, files.train), (_VALIDATION, files.validation))
        }
    if not problems:
        _check_sizes(training, replicas, counts[_TRAIN], counts[_VALIDATION], problems)
    if problems:
        raise invalid(problems)
    held = f"{counts[_VALIDATION]:,} tokens of {len(files.validation):,} files held out for validation"
    if counts[_VALIDATION] < length:
        held = "no validation: it needs two files or more, or training.data.validation"
    return f"{counts[_TRAIN]:,} tokens of {len(files.train):,} files; {held}"


def open_corpus(folder: Path, sequence_length: int) -> Corpus:
    """Map what `write_corpus` left in `folder`."""
    return Corpus(_sequences(folder / _TRAIN, sequence_length), _sequences(folder / _VALIDATION, sequence_length))


def _write(paths: Sequence[Path], target: Path, data: Data, problems: list[Problem]) -> int:
    """Tokens written."""
    count = 0
    with target.open("wb") as out:
        for path in paths:
            try:
                text = path.read_bytes()
            except OSError as fault:
                fields = list(data.train + data.validation)
                problems.append(Problem("training.data", fields, f"{path} can't be read: {fault.strerror}"))
                continue
            if text:
                tokens = encode_document(text)
                out.write(tokens.tobytes())
                count += len(tokens)
    return count


def _check_sizes(training: Training, replicas: int, train: int, validation: int, problems: list[Problem]) -> None:
    length = training.sequence_length
    needed = replicas * training.batch_size * length
    if train < needed:
        allowed = (
            f"{train:,} tokens are too few: one step takes {needed:,} (replicas {replicas} x batchSize "
            f"{training.batch_size} x sequenceLength {length}); give more text or make these smaller"
        )
        last = len(training.data.train) - 1
        problems.append(Problem(f"training.data.train[{last}]", training.data.train[last], allowed))
    if training.data.validation and validation < length:
        last = len(training.data.validation) - 1
        allowed = f"{validation:,} tokens are too few: one sequence takes {length:,}"
        problems.append(Problem(f"training.data.validation[{last}]", training.data.validation[last], allowed))


def _sequences(path: Path, length: int) -> NDArray[np.uint16]:
    count = path.stat().st_size // np.dtype(np.uint16).itemsize // length
    if count == 0:  # an empty file can't be mapped
        return np.empty((0, length), dtype=np.uint16)
    return np.memmap(path, dtype=np.uint16, mode="r", shape=(count, length))
