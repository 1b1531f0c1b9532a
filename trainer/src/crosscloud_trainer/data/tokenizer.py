"""The byte tokenizer in the form of `transformers`, so that a result loads with AutoTokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from crosscloud_trainer.data.tokens import BOS_ID, EOS_ID, PAD_ID

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"


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
