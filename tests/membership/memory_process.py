"""One rank of a replica with a large shard: a round over the link, and what it took of memory, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from crosscloud_trainer.allreduce import AllReduce
from crosscloud_trainer.compress import Codec, ErrorFeedback, Reducer, codec_of
from crosscloud_trainer.contract import Algorithm, RunDocument, read_json
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.exchange import RoundReport
from crosscloud_trainer.group import TorchGroup
from crosscloud_trainer.layout import Index, Interval, ReplicaLayout, split_shard
from crosscloud_trainer.link import Authority, Link
from crosscloud_trainer.membership.exchange import LinkExchange
from crosscloud_trainer.shard import Shard, digest
from crosscloud_trainer.sizes import CELL_ELEMENTS
from crosscloud_trainer.topology import own_cells

CPU = torch.device("cpu")
LAYERS = 20


def resident(what: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most so far, as the kernel counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def main(folder: Path, replica: int, rank: int, elements: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = read_json(RunDocument, (folder / "run.json").read_bytes())
    ranks = run.replica(replica).stages[0].ranks
    store = dist.FileStore(str(folder / f"ranks-{replica}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = TorchGroup(CPU)
    codec = codec_of(run.sync.codec_spec)
    index = Index.of({f"layer-{number:02}.weight": elements // LAYERS for number in range(LAYERS)})
    order = [parameter.name for parameter in index.parameters]
    layout = ReplicaLayout(index, tuple(split_shard(index, order, ranks, number) for number in range(ranks)))
    intervals = layout.shards[rank]
    shard = Shard(index, intervals, [torch.rand(interval.elements) for interval in intervals])
    owned = own_cells(index, (0, 1), layout.holders, replica, rank)
    agreement = {"run document": run.digest()}
    with Link(rank, folder / f"tls-{replica}", folder / "peers.json", agreement, Authority(1, 0, 0)) as link:
        use_all_code(codec)
        before = resident("VmRSS")
        reducer = Reducer(codec, index, owned, error_feedback=True)
        exchange = LinkExchange(link, run, index, codec, layout.holders, replica, rank, reducer)
        exchange.connect(200)
        report = one_round(run, layout, shard, group, exchange, codec)
        assert report is not None
        assert report.applied
        told = {"bytes": resident("VmHWM") - before, "digest": report.digest}
        exchange.settle(200)
        print(json.dumps(told))
        dist.barrier()


def one_round(
    run: RunDocument, layout: ReplicaLayout, shard: Shard, group: TorchGroup, exchange: LinkExchange, codec: Codec
) -> RoundReport | None:
    """A window that has changed the weights a little, or a gradient of a step that lies where the weights do."""
    if run.sync.algorithm is Algorithm.ALL_REDUCE:
        step = AllReduce(layout, shard, group, group, exchange, codec, tokens=1)
        step.reduce(shard)
        return step.on_step(1)
    window = DiLoCo(layout, shard, group, group, exchange, codec, inner_steps=1, settings=run.sync.outer)
    torch.manual_seed(1 + exchange.replica)
    for start, stop in shard.pieces():
        shard.elements_at(start, stop).add_(torch.rand(stop - start), alpha=1e-3)
    return window.on_step(1)


def use_all_code(codec: Codec) -> None:
    """What the kernel loads of torch when it is first used isn't memory of a round."""
    lengths = np.array([CELL_ELEMENTS, 1])
    feedback = ErrorFeedback(codec, lengths, CPU)
    values = torch.rand(CELL_ELEMENTS + 1)
    codec.decode(feedback.encode(lambda _: values), lengths)
    digest(Index.of({"a": len(values)}), (Interval(0, 0, len(values), 0),), [values])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
