"""Whether a model keeps documents apart that share a sequence: tried, since `transformers` promises it of no type."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from crosscloud_trainer.contract import Problem
from crosscloud_trainer.failures import invalid

_TOKENS = 12  # of two documents
_SECOND = 5  # where the second one starts
_SLACK = 1e-3  # of what the first document changes where nothing keeps them apart
_ROUNDING = 1e-5


def check_apart(model: PreTrainedModel) -> None:
    """Raises Failure(INVALID_INPUT) where the logits of a document aren't those that it has alone."""
    places = torch.arange(_TOKENS)
    positions = torch.where(places < _SECOND, places, places - _SECOND)[None]
    ids = (places * 37 + 11).remainder(model.config.vocab_size)[None]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = model(input_ids=ids[:, _SECOND:]).logits
            mixed = model(input_ids=ids).logits[:, _SECOND:]
            apart = model(input_ids=ids, position_ids=positions).logits[:, _SECOND:]
    except TypeError:  # it takes no positions
        apart = mixed
    finally:
        model.train(training)
    limit = max(_SLACK * float((mixed - alone).abs().max()), _ROUNDING * float(alone.abs().max()))
    if float((apart - alone).abs().max()) > limit:
        kind = model.config.model_type
        allowed = f"models of type {kind} mix documents of one sequence; set Stream, or take another model, like llama"
        raise invalid([Problem("training.data.packing", "Documents", allowed)])
