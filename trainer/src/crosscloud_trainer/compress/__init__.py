"""Codecs: cells of fp32 values to bytes and back, error feedback around them, and the sum that an owner makes
of payloads.
"""

from crosscloud_trainer.compress.bf16 import BF16Codec
from crosscloud_trainer.compress.cells import EncodedCells
from crosscloud_trainer.compress.codec import Codec, NonFiniteError, PayloadError
from crosscloud_trainer.compress.feedback import ErrorFeedback
from crosscloud_trainer.compress.int8 import Int8Codec
from crosscloud_trainer.compress.none import NoneCodec
from crosscloud_trainer.compress.reduce import Reducer, weighted_mean
from crosscloud_trainer.compress.topk import TopKCodec
from crosscloud_trainer.sizes import CodecSpec

__all__ = [
    "BF16Codec",
    "Codec",
    "EncodedCells",
    "ErrorFeedback",
    "Int8Codec",
    "NonFiniteError",
    "NoneCodec",
    "PayloadError",
    "Reducer",
    "TopKCodec",
    "codec_named",
    "codec_of",
    "weighted_mean",
]


def codec_of(spec: CodecSpec) -> Codec:
    """The codec with these settings."""
    if spec.name == "TopK":
        return TopKCodec(spec)
    others: dict[str, Codec] = {"None": NoneCodec(), "BF16": BF16Codec(), "Int8": Int8Codec()}
    return others[spec.name]


def codec_named(name: str) -> Codec:
    """The codec that a manifest calls `name`, with its default settings; ValueError for one that doesn't exist."""
    return codec_of(CodecSpec(name))
