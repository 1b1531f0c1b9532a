"""One replica of one rank with a large shard: a round over the link, and what it took of memory, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from membership.field import run_document
from trainer_core.local_exchange import ThreadGroup

from crosscloud_trainer.compress import Codec, ErrorFeedback, Reducer, codec_of
from crosscloud_trainer.diloco import DiLoCo
from crosscloud_trainer.layout import Index, Interval, ReplicaLayout, contiguous_shard
from crosscloud_trainer.link import Authority, Link
from crosscloud_trainer.membership.exchange import LinkExchange
from crosscloud_trainer.shard import Shard, digest
from crosscloud_trainer.sizes import CELL_ELEMENTS
from crosscloud_trainer.topology import own_cells

LAYERS = 20


def resident(what: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most so far, as the kernel counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def main(folder: Path, replica: int, elements: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = run_document([1, 1])
    codec = codec_of(run.sync.codec_spec)
    index = Index.of({f"layer-{number:02}.weight": elements // LAYERS for number in range(LAYERS)})
    intervals = contiguous_shard(index, [parameter.name for parameter in index.parameters], index.elements, 0)
    layout = ReplicaLayout(index, (intervals,))
    shard = Shard(index, intervals, [torch.rand(interval.elements) for interval in intervals])
    owned = own_cells(index, (0, 1), layout.holders, replica, 0)
    agreement = {"run document": run.digest()}
    with Link(0, folder / f"tls-{replica}", folder / "peers.json", agreement, Authority(1, 0, 0)) as link:
        use_all_code(codec)
        before = resident("VmRSS")
        reducer = Reducer(codec, index, owned, error_feedback=True)
        exchange = LinkExchange(link, run, index, codec, layout.holders, replica, 0, reducer)
        exchange.connect(200)
        [group] = ThreadGroup.of(1)
        algorithm = DiLoCo(layout, shard, group, group, exchange, codec, inner_steps=1, settings=run.sync.outer)
        torch.manual_seed(1 + replica)
        for start, stop in shard.pieces():
            shard.elements_at(start, stop).add_(torch.rand(stop - start), alpha=1e-3)
        report = algorithm.on_step(1)
        assert report is not None
        assert report.applied
        told = {"bytes": resident("VmHWM") - before, "digest": report.digest}
        exchange.settle(200)
        print(json.dumps(told))


def use_all_code(codec: Codec) -> None:
    """What the kernel loads of torch when it is first used isn't memory of a round."""
    lengths = np.array([CELL_ELEMENTS, 1])
    feedback = ErrorFeedback(codec, lengths, torch.device("cpu"))
    values = torch.rand(CELL_ELEMENTS + 1)
    codec.decode(feedback.encode(lambda _: values), lengths)
    digest(Index.of({"a": len(values)}), (Interval(0, 0, len(values), 0),), [values])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
