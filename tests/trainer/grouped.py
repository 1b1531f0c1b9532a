"""A DeepSpeed script in fp32 with a frozen layer, two groups with rates of their own, and a schedule.

`grouped.py OUT STEPS SETTING...`: a setting is a ZeRO stage and the largest norm of the gradient, like 2,0.5 (0 is no
clipping). Alone it trains at each of them in turn, in a job at the only one. Leaves the losses of each rank in
`OUT-SETTING-RANK`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from crosscloud_trainer import join

MICRO_BATCHES = 2

out, steps, *settings = sys.argv[1:]
sync = join()
deepspeed.init_distributed(verbose=False)
for setting in settings:
    stage, clip = setting.split(",")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": float(clip),
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1000,
    }
    torch.manual_seed(1)
    layers = [torch.nn.Linear(16, 48), torch.nn.Linear(48, 48).requires_grad_(False), torch.nn.Linear(48, 1)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    groups = [
        {"params": [layers[0].weight, layers[2].weight], "lr": 2e-2, "weight_decay": 0.1},
        {"params": [layers[0].bias, layers[2].bias], "lr": 1e-2, "weight_decay": 0.0},
    ]
    optimizer = sync.wrap(torch.optim.AdamW(groups))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.95**step)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    draw = torch.Generator().manual_seed(sync.rank)
    losses = []
    for _ in range(int(steps) * MICRO_BATCHES):
        given = torch.randn(8, 16, generator=draw).to(engine.device)
        loss = (engine(given) - given.square().mean(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sync.finish()
    Path(f"{out}-{setting}-{sync.rank}").write_text(" ".join(loss.hex() for loss in losses))
dist.barrier()
dist.destroy_process_group()
