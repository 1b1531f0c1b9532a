"""The byte tokenizer: a byte is its own id, three more mark the start, the end and the padding of a document."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
VOCABULARY_SIZE = 259


def encode_bytes(text: bytes) -> NDArray[np.uint16]:
    """Token ids of a piece of a document, shape (len(text),)."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def mark(token: int) -> NDArray[np.uint16]:
    """One token that is no byte, shape (1,)."""
    return np.array([token], dtype=np.uint16)
