"""What an encoder does, and the one that needs no file: a byte is its own id, three more mark the start, the end and
the padding of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
VOCABULARY_SIZE = 259

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Vocabulary:
    """What a model must know of a tokenizer: ids are below `size`; a mark that it doesn't have is None."""

    size: int
    bos: int | None
    eos: int | None
    pad: int | None

    @property
    def start(self) -> int | None:
        """The id in front of a document: none where one and the same id marks start and end."""
        return None if self.bos == self.eos else self.bos

    @property
    def kind(self) -> np.dtype[np.unsignedinteger[Any]]:
        """How an id is stored."""
        return np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)


BYTES = Vocabulary(VOCABULARY_SIZE, BOS_ID, EOS_ID, PAD_ID)


class Encoder(Protocol):
    """Turns UTF-8 text into ids, without the marks of documents."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def any_bytes(self) -> bool:
        """Whether text that is no UTF-8 has ids too."""
        ...

    @property
    def summary(self) -> str:
        """Tells it from any other tokenizer."""
        ...

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]: ...


class ByteEncoder:
    """A token for each byte."""

    vocabulary = BYTES
    any_bytes = True
    summary = "Bytes"

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(piece, dtype=np.uint8).astype(np.uint16) for piece in pieces]
