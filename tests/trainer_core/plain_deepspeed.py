"""Plain DeepSpeed on one rank, without any of our code: what a user had before.

Run by torchrun with [[name, ZeRO stage, precision, clip norm, micro-batches of a step, frozen], ...]; rank 0 prints the
losses by name as one JSON line.
"""

import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from trainer_core.tiny_llama import STEPS, batches, loss_of, model, optimizer_and_schedule


def losses(stage: int, precision: str, clip_norm: float, accumulated: int = 1, frozen: bool = False) -> list[str]:
    llama = model(frozen)
    optimizer, schedule = optimizer_and_schedule(llama)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulated,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": clip_norm,
    }
    engine, _, _, _ = deepspeed.initialize(model=llama, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if stage == 0 and precision == "bf16":
        undo_first_step(engine.optimizer, optimizer)
    result = []
    for tokens in batches(dist.get_rank(), STEPS):
        loss = engine(input_ids=tokens, labels=tokens).loss
        result.append(loss_of(loss))
        engine.backward(loss)
        engine.step()
    return result


def undo_first_step(wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
    """Under ZeRO 0 in bf16 DeepSpeed steps once with zero gradients while the engine is built, which decays the fp32
    weights and counts as a step; under no other stage. Our engine leaves it out.
    """
    for working, exact in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for parameter, copy in zip(working, exact, strict=True):
            copy.data.copy_(parameter.data)
    optimizer.state.clear()


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
results = {name: losses(*rest) for name, *rest in json.loads(sys.argv[1])}
if dist.get_rank() == 0:
    print(json.dumps(results), flush=True)
dist.barrier()
dist.destroy_process_group()
