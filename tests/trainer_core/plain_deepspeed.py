"""Plain DeepSpeed on one rank, without any of our code: what a user had before. Run by torchrun; prints one JSON line on rank 0."""

import json
import sys

import deepspeed
import torch.distributed as dist
from trainer_core.tiny_llama import STEPS, batches, loss_of, model, optimizer_and_schedule

stage, precision, clip_norm = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
llama = model()
optimizer, schedule = optimizer_and_schedule(llama)
engine, _, _, _ = deepspeed.initialize(
    model=llama,
    optimizer=optimizer,
    lr_scheduler=schedule,
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": clip_norm,
    },
)
losses = []
for tokens in batches(dist.get_rank(), STEPS):
    loss = engine(input_ids=tokens, labels=tokens).loss
    losses.append(loss_of(loss))
    engine.backward(loss)
    engine.step()
if dist.get_rank() == 0:
    print(json.dumps({"losses": losses}), flush=True)
dist.barrier()
dist.destroy_process_group()
