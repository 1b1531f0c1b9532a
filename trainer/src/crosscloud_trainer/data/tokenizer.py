"""Tokenizers in the form of `transformers`: the one for bytes, and those that are read from a file or a folder.

A pod's launcher loads the file once and leaves a copy in the pod's folder, from which the ranks make the result.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.data.files import fetch_small_files
from crosscloud_trainer.data.tokens import BOS_ID, EOS_ID, PAD_ID, Tokens, Vocabulary
from crosscloud_trainer.failures import invalid

FIELD = "training.data.tokenizerFile"
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
# what a tokenizer may consist of; a folder of a model has gigabytes of other files
_PARTS = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.jinja"]
_PARTS += ["config.json"]


class FileEncoder:
    """A tokenizer of the `tokenizers` library."""

    any_bytes = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocabulary = Vocabulary(size, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        digest = hashlib.sha256(self._backend.to_str().encode() + repr(self.vocabulary).encode()).hexdigest()
        self.summary = f"{size:,} tokens, sha256 {digest[:32]}"

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        found = self._backend.encode_batch_fast([piece.decode() for piece in pieces], add_special_tokens=False)
        return [np.array(item.ids, dtype=self.vocabulary.kind) for item in found]


def read_tokenizer(address: str, target: Path) -> FileEncoder:
    """The tokenizer at `address`, a file or a folder; a copy for `load_tokenizer` is left in `target`.

    Raises Failure(INVALID_INPUT) where there is none.
    """
    with tempfile.TemporaryDirectory(prefix="crosscloud-tokenizer-") as name:
        found = fetch_small_files(address, _PARTS, Path(name), FIELD)
        try:
            if found.is_dir():
                tokenizer: Any = AutoTokenizer.from_pretrained(found, local_files_only=True)
            else:
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(found))
            encoder = FileEncoder(tokenizer)
        except Exception as fault:  # each kind of tokenizer has exceptions of its own
            words = " ".join(str(fault).split())[:300] or type(fault).__name__
            allowed = f"no tokenizer can be read there ({words}); give a tokenizer.json, or a folder that has one"
            raise invalid([Problem(FIELD, address, allowed)]) from fault
    tokenizer.save_pretrained(target)
    return encoder


def load_tokenizer(folder: Path) -> Any:
    """What `read_tokenizer` left there, as `transformers` has it."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def byte_tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes of UTF-8 text; the start of a document is put in front, its end is not."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {BOS: BOS_ID, EOS: EOS_ID, PAD: PAD_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    length = getattr(config, "max_position_embeddings", None)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=length
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (Radford et al. 2019): printable ones for
    themselves, the others in order from code point 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
