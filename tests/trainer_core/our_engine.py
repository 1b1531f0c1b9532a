"""One rank of a replica with our engine, through several scenarios.

Run by torchrun with [[name, scenario, arguments], ...]; rank 0 prints their results by name as one JSON line.
"""

import json
import sys

import torch.distributed as dist
from trainer_core import scenarios

from crosscloud_trainer import engine

device = engine.init_distributed()
results = {}
for name, scenario, arguments in json.loads(sys.argv[1]):
    results[name] = getattr(scenarios, scenario)(device, **arguments)
if dist.get_rank() == 0:
    print(json.dumps(results), flush=True)
engine.close()
