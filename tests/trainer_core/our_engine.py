"""One rank of the replica that a scenario names, with our engine. Run by torchrun; prints one JSON line on rank 0."""

import json
import sys

import torch
import torch.distributed as dist
from trainer_core import scenarios

from crosscloud_trainer import engine

device = engine.init_distributed()
result = getattr(scenarios, sys.argv[1])(device, **json.loads(sys.argv[2]))
if dist.get_rank() == 0:
    print(json.dumps(result), flush=True)
assert torch.get_num_threads() == 1
engine.close()
