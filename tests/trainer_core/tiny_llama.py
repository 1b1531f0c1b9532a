"""A tiny Llama, its optimizer and its data, the same in every process that trains it."""

import math
from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 20


def model(frozen: bool = False, layers: int = 2, tied: bool = True) -> LlamaForCausalLM:
    """`frozen`: the embedding, which is the head too, and the first layer stay as they are."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=259,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )
    if frozen:
        for part in (llama.model.embed_tokens, llama.model.layers[0]):
            part.requires_grad_(False)
    return llama


def optimizer_and_schedule(
    llama: torch.nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a decay and a no-decay group of unlike rates, warmed up and cooled down."""
    parameters = [p for p in llama.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    factor = lambda step: min(1, (step + 1) / 5) * (0.6 + 0.4 * math.cos(step / 7))  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def batches(seed: int, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        start = torch.randint(0, 259, (2, 1), generator=generator)
        stride = torch.randint(1, 4, (2, 1), generator=generator)
        yield (start + stride * torch.arange(32)) % 259


def loss_of(loss: torch.Tensor) -> str:
    """All the bits of a loss."""
    return float(loss.detach()).hex()
