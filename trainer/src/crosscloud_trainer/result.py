"""The end of a job: a normal `transformers` folder, made from the outer weights in the checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from crosscloud_trainer.checkpoint import WEIGHTS, Checkpoint, Span
from crosscloud_trainer.data.tokenizer import byte_tokenizer, load_tokenizer
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.storage import Storage

FOLDER = "result"
PROVENANCE = "crosscloud.json"


def fill(model: PreTrainedModel, found: Checkpoint) -> None:
    """Put a checkpoint's weights into `model`. Raises Damaged where they can't be read, ValueError unless they are all
    of the model's.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored = [(name, Span(number, 0, size)) for number, (name, size) in enumerate(found.manifest["parameters"])]
    wrong = [name for name, span in stored if name not in parameters or parameters[name].numel() != span.stop]
    missing = sum(parameter.numel() for parameter in model.parameters()) - sum(span.stop for _, span in stored)
    if wrong or missing:
        raise ValueError(f"parameters of other sizes: {wrong}; {missing} elements of the model have no value")
    with torch.no_grad():
        found.read([(WEIGHTS, None, span, parameters[name].view(-1)) for name, span in stored])


def write_result(
    storage: Storage, model: PreTrainedModel, provenance: Mapping[str, Any], tokenizer: Path | None = None
) -> str:
    """Store model, generation settings and tokenizer below `result/`; returns the folder's address.

    `tokenizer` is a folder that `read_tokenizer` left; without it the model knows bytes.
    """
    words = load_tokenizer(tokenizer) if tokenizer else byte_tokenizer(model.config)
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_k=40,
    )
    with tempfile.TemporaryDirectory(prefix="crosscloud-result-") as name:
        folder = Path(name)
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1, sort_keys=True))
        return store_folder(storage, folder)


def store_folder(storage: Storage, folder: Path) -> str:
    """Store the files below `folder` as the result; returns its address. Raises Failure where there are none."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise invalid([f"result: {folder} holds no files; give the folder in which the model was stored"])
    for path in paths:
        storage.upload(path, f"{FOLDER}/{path.relative_to(folder).as_posix()}")
    return storage.address(FOLDER)
