"""A DeepSpeed script whose rank 1 of the job ends by itself after three steps, while others go on: `ends_alone.py HOW`.

Before that each rank forks a child, whose end concerns nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import deepspeed
import torch

from crosscloud_trainer import join

WAYS: dict[str, Callable[[], object]] = {
    "exits": lambda: sys.exit(0),
    "exits at once": lambda: os._exit(0),
    "has no more data": lambda: next(iter([])),
}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "sub_group_size": 10**9}}

sync = join()
deepspeed.init_distributed(verbose=False)
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = sync.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
for step in range(10):
    if step == 3 and sync.rank == 1:
        WAYS[sys.argv[1]]()
    if step == 1:
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
    engine.backward(engine(torch.ones(1, 8, device=engine.device)).sum())
    engine.step()
