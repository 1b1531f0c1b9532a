"""Codecs: cells of fp32 values to bytes and back, error feedback around them, and the sum that an owner makes
of payloads.
"""

from crosscloud_trainer.compress.cells import EncodedCells
from crosscloud_trainer.compress.codec import Codec, NonFiniteError, PayloadError
from crosscloud_trainer.compress.feedback import ErrorFeedback
from crosscloud_trainer.compress.int8 import Int8Codec
from crosscloud_trainer.compress.none import NoneCodec
from crosscloud_trainer.compress.reduce import Reducer, weighted_mean

__all__ = [
    "Codec",
    "EncodedCells",
    "ErrorFeedback",
    "Int8Codec",
    "NonFiniteError",
    "NoneCodec",
    "PayloadError",
    "Reducer",
    "codec_named",
    "weighted_mean",
]


def codec_named(name: str) -> Codec:
    """The codec that a manifest calls `name`; ValueError for one that doesn't exist."""
    codecs: dict[str, Codec] = {"None": NoneCodec(), "Int8": Int8Codec()}
    if name not in codecs:
        raise ValueError(f"codec {name!r} does not exist; use one of {', '.join(codecs)}")
    return codecs[name]
