"""Torch's DistributedDataParallel on one rank, without DeepSpeed and without any of our code.

Run by torchrun with [[name, seeds of the ranks' data, steps, clip norm], ...]; rank 0 prints the losses of all ranks by
name as one JSON line.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainer_core.tiny_llama import batches, loss_of, model, optimizer_and_schedule


def losses(seeds: list[int], steps: int, clip_norm: float) -> list[list[str]]:
    """Of the first ranks, one for each seed; the others only watch."""
    group = dist.new_group(list(range(len(seeds))))
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    own = trained(seeds[dist.get_rank()], steps, clip_norm, group) if dist.get_rank() < len(seeds) else []
    dist.all_gather_object(everyone, own)
    return everyone[: len(seeds)]


def trained(seed: int, steps: int, clip_norm: float, group: dist.ProcessGroup) -> list[str]:
    llama = model()
    optimizer, schedule = optimizer_and_schedule(llama)
    wrapped = DistributedDataParallel(llama, process_group=group)
    own = []
    for tokens in batches(seed, steps):
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        own.append(loss_of(loss))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return own


dist.init_process_group("gloo")
results = {name: losses(*rest) for name, *rest in json.loads(sys.argv[1])}
if dist.get_rank() == 0:
    print(json.dumps(results), flush=True)
dist.barrier()
dist.destroy_process_group()
