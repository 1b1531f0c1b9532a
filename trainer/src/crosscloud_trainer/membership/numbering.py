"""Ranks as the rounds count them: by (replica, number), the stages of a replica one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from crosscloud_trainer.contract import ReplicaPlan
from crosscloud_trainer.link import RankId

Peer = tuple[int, int]
"""(replica, number of the rank in it)"""


class Numbering:
    """Of all replicas of a run."""

    def __init__(self, plans: Iterable[ReplicaPlan]) -> None:
        self._plans = {plan.index: plan for plan in plans}
        self._firsts = {
            plan.index: list(accumulate((stage.ranks for stage in plan.stages), initial=0))
            for plan in self._plans.values()
        }

    def ranks(self, replica: int) -> int:
        """How many there are in all stages."""
        return self._firsts[replica][-1]

    def stages(self, replica: int) -> int:
        return len(self._plans[replica].stages)

    def stage_ranks(self, peer: Peer) -> range:
        """Numbers of the ranks in the stage of `peer`."""
        firsts = self._firsts[peer[0]]
        stage = bisect_right(firsts, peer[1]) - 1
        return range(firsts[stage], firsts[stage + 1])

    def leads(self, peer: Peer) -> bool:
        """Whether it is the first of its stage, which speaks for the stage."""
        return peer[1] == self.stage_ranks(peer)[0]

    def leaders(self, replica: int) -> list[Peer]:
        """The first rank of each stage."""
        return [(replica, first) for first in self._firsts[replica][:-1]]

    def number(self, replica: int, stage: int, rank: int) -> int:
        """Of the rank that its stage counts as `rank`."""
        return self._firsts[replica][stage] + rank

    def peer(self, address: RankId) -> Peer:
        gpus = self._plans[address.replica].stages[address.stage].gpus_per_node
        return (address.replica, self.number(address.replica, address.stage, address.node * gpus + address.local))

    def address(self, peer: Peer) -> RankId:
        replica, number = peer
        stage = bisect_right(self._firsts[replica], number) - 1
        node, local = divmod(number - self._firsts[replica][stage], self._plans[replica].stages[stage].gpus_per_node)
        return RankId(replica, stage, node, local)
