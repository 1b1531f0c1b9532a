"""Token ids on disk: documents end to end, and where each of them starts. Sequences are cut from that at equal lengths.

Read with plain reads, not mapped: a disk that fails then is an error with words, not the end of the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from crosscloud_trainer.data.tokens import Tokens, Vocabulary

Batch = tuple[Tokens, NDArray[np.bool_]]  # token ids, and whether a document starts there; shape (sequences, length)

_OFFSET = np.dtype(np.int64)
_LEAST_TOKENS = 2  # in fewer there is nothing to predict


class TokenFile:
    """Written once, document by document: `add` some ids any number of times, then `end`."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids, self._starts = path.open("wb"), _starts_of(path).open("wb")
        self.tokens = 0
        self._start: int | None = None  # of the document that is being written

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self._ids.close()
        self._starts.close()

    def add(self, ids: Tokens) -> None:
        if not len(ids):
            return
        if self._start is None:
            self._start = self.tokens
            self._put(self._mark(self._vocabulary.start))
        self._put(ids)

    def end(self) -> None:
        """A document without text leaves nothing behind, nor does one of a single token."""
        if self._start is None:
            return
        self._put(self._mark(self._vocabulary.eos))
        if self.tokens - self._start < _LEAST_TOKENS:
            self._ids.seek(self._start * self._vocabulary.kind.itemsize)
            self._ids.truncate()
            self.tokens = self._start
        else:
            self._starts.write(np.array([self._start], dtype=_OFFSET).tobytes())
        self._start = None

    def _mark(self, token: int | None) -> Tokens:
        return np.array([] if token is None else [token], dtype=self._vocabulary.kind)

    def _put(self, ids: Tokens) -> None:
        self._ids.write(ids.tobytes())
        self.tokens += len(ids)


class Sequences:
    """The sequences of a `TokenFile`; what is left at its end is no sequence."""

    def __init__(self, path: Path, length: int, vocabulary: Vocabulary) -> None:
        self._path, self._length, self._kind = path, length, vocabulary.kind
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # for as long as the process lives
        self._count = path.stat().st_size // self._kind.itemsize // length
        starts = _starts_of(path)
        empty = starts.stat().st_size == 0  # such a file can't be mapped
        self._offsets = np.zeros(0, _OFFSET) if empty else np.memmap(starts, dtype=_OFFSET, mode="r")

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Sequence[int]) -> Batch:
        """Raises OSError naming the file where it can't be read, also where it has become shorter."""
        tokens = [self._read(number) for number in numbers]
        marks = [self.starts(number) for number in numbers]
        return np.stack(tokens), np.stack(marks)

    def _read(self, number: int) -> Tokens:
        size = self._length * self._kind.itemsize
        data = os.pread(self._file, size, number * size)
        if len(data) < size:
            raise OSError(0, f"has become shorter: sequence {number} of {self._count} isn't there", str(self._path))
        return np.frombuffer(data, dtype=self._kind)

    def starts(self, number: int) -> NDArray[np.bool_]:
        """Whether a document starts at each token of a sequence, shape (length,)."""
        first = number * self._length
        low, high = np.searchsorted(self._offsets, [first, first + self._length])
        marks = np.zeros(self._length, dtype=np.bool_)
        marks[self._offsets[low:high] - first] = True
        return marks


def _starts_of(path: Path) -> Path:
    return path.with_name(path.name + ".starts")
