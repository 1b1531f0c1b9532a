"""The token files of one pod: written once by its launcher, mapped into memory by all of its ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from crosscloud_trainer.contract import Data, Problem, Training
from crosscloud_trainer.data.files import find_files
from crosscloud_trainer.data.tokens import BOS_ID, EOS_ID, encode_bytes, mark
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.sizes import bytes_text

_TRAIN = "train.u16"
_VALIDATION = "validation.u16"
_SUMMARY = "summary"
_PIECE_BYTES = 16 * 2**20
_DIGEST_DIGITS = 32  # enough to tell apart what differs by mistake, and it can be read to the end


@dataclass(frozen=True)
class Corpus:
    """Sequences of token ids, shape (sequences, sequence_length) each.

    `summary` tells the files that are trained on: number, size, and a digest of their names and contents in the order
    in which they are read. All replicas must have the same.
    """

    train: NDArray[np.uint16]
    validation: NDArray[np.uint16]
    summary: str


@dataclass(frozen=True)
class _Written:
    tokens: int
    summary: str


def write_corpus(training: Training, replicas: int, folder: Path) -> str:
    """Tokenize the job's files into `folder`; returns a line that says what was found.

    Raises Failure(INVALID_INPUT) naming the field when files are missing, unreadable or too small.
    """
    problems: list[Problem] = []
    files = find_files(training.data, problems)
    length = training.sequence_length
    if not problems:
        train = _write(files.train, folder / _TRAIN, training.data, problems)
        held = _write(files.validation, folder / _VALIDATION, training.data, problems)
    if not problems:
        _check_sizes(training, replicas, train.tokens, held.tokens, problems)
    if problems:
        raise invalid(problems)
    (folder / _SUMMARY).write_text(train.summary)
    told = f"{held.tokens:,} tokens of {len(files.validation):,} files held out for validation"
    if held.tokens < length:
        told = "no validation: it needs two files or more, or training.data.validation"
    return f"{train.tokens:,} tokens of {train.summary}; {told}"


def open_corpus(folder: Path, sequence_length: int) -> Corpus:
    """Map what `write_corpus` left in `folder`."""
    train, validation = (_sequences(folder / name, sequence_length) for name in (_TRAIN, _VALIDATION))
    return Corpus(train, validation, (folder / _SUMMARY).read_text())


def _write(paths: Sequence[Path], target: Path, data: Data, problems: list[Problem]) -> _Written:
    """Tokens of all files, and what was read, in one pass."""
    tokens = size = 0
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for path in paths:
            try:
                with path.open("rb") as text:
                    length, content = _copy(text, out)
            except OSError as fault:
                if fault.filename != str(path):  # the disk that is written to is full
                    raise
                fields = list((data.train or ()) + data.validation)
                problems.append(Problem("training.data", fields, f"{path} can't be read: {fault.strerror}"))
                continue
            tokens += length + 2 if length else 0
            size += length
            digest.update(os.fsencode(path.name) + b"\0" + length.to_bytes(8, "big") + content)
    hexadecimal = digest.hexdigest()[:_DIGEST_DIGITS]
    return _Written(tokens, f"{len(paths):,} files, {bytes_text(size)}, sha256 {hexadecimal}")


def _copy(text: IO[bytes], out: IO[bytes]) -> tuple[int, bytes]:
    """Write a document's tokens, none for an empty one; returns its bytes and their SHA-256."""
    length = 0
    digest = hashlib.sha256()
    while piece := text.read(_PIECE_BYTES):
        if not length:
            out.write(mark(BOS_ID).tobytes())
        out.write(encode_bytes(piece).tobytes())
        digest.update(piece)
        length += len(piece)
    if length:
        out.write(mark(EOS_ID).tobytes())
    return length, digest.digest()


def _check_sizes(training: Training, replicas: int, train: int, validation: int, problems: list[Problem]) -> None:
    length = training.sequence_length
    needed = replicas * training.batch_size * length
    if train < needed:
        allowed = (
            f"{train:,} tokens are too few: one step takes {needed:,} (replicas {replicas} x batchSize "
            f"{training.batch_size} x sequenceLength {length}); give more text or make these smaller"
        )
        train_globs = training.data.train or ("",)
        last = len(train_globs) - 1
        problems.append(Problem(f"training.data.train[{last}]", train_globs[last], allowed))
    if training.data.validation and validation < length:
        last = len(training.data.validation) - 1
        allowed = f"{validation:,} tokens are too few: one sequence takes {length:,}"
        problems.append(Problem(f"training.data.validation[{last}]", training.data.validation[last], allowed))


def _sequences(path: Path, length: int) -> NDArray[np.uint16]:
    count = path.stat().st_size // np.dtype(np.uint16).itemsize // length
    if count == 0:  # an empty file can't be mapped
        return np.empty((0, length), dtype=np.uint16)
    return np.memmap(path, dtype=np.uint16, mode="r", shape=(count, length))
