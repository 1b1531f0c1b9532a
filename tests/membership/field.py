"""A small model, its layouts and updates, and replicas whose ranks are threads with links of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from link.yard import QUICK, Yard

from crosscloud_trainer.compress import Codec, EncodedCells, Reducer, codec_named
from crosscloud_trainer.contract import (
    RUN_VERSION,
    Data,
    Home,
    JobRef,
    Model,
    ModelPreset,
    ReplicaPlan,
    RunDocument,
    StagePlan,
    Sync,
    Training,
)
from crosscloud_trainer.exchange import RoundRequest, RoundResult
from crosscloud_trainer.layout import HolderMap, Index
from crosscloud_trainer.link import Link, LinkSettings
from crosscloud_trainer.membership.exchange import LinkExchange
from crosscloud_trainer.topology import own_cells

INDEX = Index.of({"a.weight": 3 * 4096 + 17, "b.weight": 20 * 4096, "c.bias": 1, "d.bias": 4095})


def codec(name: str) -> Codec:
    return codec_named(name)


def holders(ranks: int) -> HolderMap:
    """Cells dealt to the ranks in runs of unlike lengths."""
    return HolderMap(np.sort(np.arange(INDEX.cells) * 7 % ranks).astype(np.int64))


def update(replica: int, number: int) -> torch.Tensor:
    """The flat update of a replica in a round, in canonical order."""
    generator = torch.Generator().manual_seed(1000 * number + replica)
    return torch.randn(INDEX.elements, generator=generator)


def run_document(ranks: Sequence[int], attempt: int = 1) -> RunDocument:
    return RunDocument(
        api_version=RUN_VERSION,
        job=JobRef("ml", "tiny", "uid"),
        attempt=attempt,
        home=Home(1, "member-0"),
        replicas=tuple(
            ReplicaPlan(replica, 1, 1, (StagePlan(0, f"member-{replica}", 1, count),))
            for replica, count in enumerate(ranks)
        ),
        sync=Sync(),
        training=Training(model=Model(preset=ModelPreset.TINY_LLAMA), data=Data(train=("stdlib:*.py",)), tokens=1000),
        storage_uri="file:///nowhere",
    )


class Rank:
    """One rank with its link and exchange."""

    def __init__(
        self, yard: Yard, ranks: Sequence[int], replica: int, rank: int, name: str, settings: LinkSettings = QUICK
    ) -> None:
        self.replica, self.rank, self.codec = replica, rank, codec(name)
        self.holders = holders(ranks[replica])
        self.run = run_document(ranks, yard.attempt)
        self.link: Link = yard.link(replica, rank, agreement={"run document": self.run.digest()}, settings=settings)
        owned = own_cells(INDEX, tuple(range(len(ranks))), self.holders, replica, rank)
        reducer = Reducer(self.codec, INDEX, owned, error_feedback=True)
        self.exchange = LinkExchange(self.link, self.run, INDEX, self.codec, self.holders, replica, rank, reducer)

    def payload(self, values: torch.Tensor) -> EncodedCells:
        """The encoding of this rank's cells of a flat update."""
        return self._encoded(values, self.codec)

    def exact_payload(self, values: torch.Tensor) -> EncodedCells:
        """The same cells as fp32."""
        return self._encoded(values, codec("None"))

    def _encoded(self, values: torch.Tensor, codec: Codec) -> EncodedCells:
        ids = self.holders.held(self.rank)
        parts = [values[first:stop] for first, stop in map(span, ids.tolist())]
        lengths = INDEX.lengths(ids)
        flat = torch.cat(parts) if parts else torch.empty(0)
        return EncodedCells(codec, ids, lengths, codec.encode(flat, lengths))

    def round(self, number: int, weight: int, digest: int = 7) -> RoundResult:
        payload = self.payload(update(self.replica, number)) if weight else None
        result = self.exchange.exchange(RoundRequest(number, weight, payload, digest))
        self.exchange.prepared(number)
        return result


def span(cell: int) -> tuple[int, int]:
    """A cell's first and end element in the canonical order of the whole model."""
    lengths = INDEX.lengths(np.arange(INDEX.cells))
    first = int(lengths[:cell].sum())
    return first, first + int(lengths[cell])


def field(folder: Path, ranks: Sequence[int], name: str = "Int8", settings: LinkSettings = QUICK) -> list[Rank]:
    """All ranks of all replicas, not started."""
    yard = Yard(folder, replicas=len(ranks), ranks=max(ranks))
    return ranks_of(yard, ranks, name, settings)


def ranks_of(yard: Yard, ranks: Sequence[int], name: str = "Int8", settings: LinkSettings = QUICK) -> list[Rank]:
    return [
        Rank(yard, ranks, replica, rank, name, settings) for replica, count in enumerate(ranks) for rank in range(count)
    ]


def together(ranks: Sequence[Rank], work: Callable[[Rank], object]) -> list[object]:
    """Runs `work` for every rank in a thread of its own; what each returned or raised, in order."""
    outcomes: list[object] = [None] * len(ranks)

    def one(number: int) -> None:
        try:
            outcomes[number] = work(ranks[number])
        except Exception as fault:  # noqa: BLE001 - told to the test
            outcomes[number] = fault

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def whole(ranks: Sequence[Rank], results: Sequence[RoundResult]) -> dict[int, bytes]:
    """By replica, the result bytes of all cells in canonical order."""
    merged: dict[int, list[EncodedCells]] = {}
    for rank, result in zip(ranks, results, strict=True):
        assert result.result is not None
        merged.setdefault(rank.replica, []).append(result.result)
    return {replica: bytes(EncodedCells.merged(parts).buffer()) for replica, parts in merged.items()}
