"""Plain DeepSpeed on one rank, without any of our code: what a user had before.

Run by torchrun with [[name, ZeRO stage, precision, clip norm], ...]; rank 0 prints the losses by name as one
JSON line.
"""

import json
import sys

import deepspeed
import torch.distributed as dist
from trainer_core.tiny_llama import STEPS, batches, loss_of, model, optimizer_and_schedule


def losses(stage: int, precision: str, clip_norm: float) -> list[str]:
    llama = model()
    optimizer, schedule = optimizer_and_schedule(llama)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": clip_norm,
    }
    engine, _, _, _ = deepspeed.initialize(model=llama, optimizer=optimizer, lr_scheduler=schedule, config=config)
    result = []
    for tokens in batches(dist.get_rank(), STEPS):
        loss = engine(input_ids=tokens, labels=tokens).loss
        result.append(loss_of(loss))
        engine.backward(loss)
        engine.step()
    return result


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
results = {name: losses(*rest) for name, *rest in json.loads(sys.argv[1])}
if dist.get_rank() == 0:
    print(json.dumps(results), flush=True)
dist.barrier()
dist.destroy_process_group()
