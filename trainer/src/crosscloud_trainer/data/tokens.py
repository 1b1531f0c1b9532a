"""The byte tokenizer: a byte is its own id, three more mark the start, the end and the padding of a document."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
VOCABULARY_SIZE = 259


def encode_document(text: bytes) -> NDArray[np.uint16]:
    """Token ids of one document, with its start and end, shape (len(text) + 2,)."""
    tokens = np.empty(len(text) + 2, dtype=np.uint16)
    tokens[0] = BOS_ID
    tokens[1:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = EOS_ID
    return tokens
