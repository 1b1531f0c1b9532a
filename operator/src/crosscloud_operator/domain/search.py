"""The search behind placement: all stages of all replicas onto nodes, or nothing.

Stage after stage, depth first: a choice that leaves no room for a later stage is taken back and the next one tried. The
first pass only asks whether there is room; if its plan has neighbouring stages in different members, later passes look
for one with fewer such boundaries. Each pass is deterministic, and complete up to MAX_TRIES choices, which only
contrived shapes reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from crosscloud_operator.domain.inventory import Node
from crosscloud_operator.domain.record import PlacedNode, PlacedStage

MAX_TRIES = 2000  # choices of the first pass beyond one for each stage; the same again for all later ones together

Usable = Mapping[str, Sequence[Node]]  # by member
State = tuple[int, int, tuple[str, ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class ReplicaNeed:
    """One replica: `stages` stages of `gpus` GPUs each.

    `members` narrows the choice, `stage_members` names the member of each stage, `together` are sets of members, within
    one of which all stages must lie; empty leaves it open.
    """

    replica: int
    gpus: int
    stages: int = 1
    zero_stage: int = 1
    members: tuple[str, ...] = ()
    together: tuple[frozenset[str], ...] = ()
    stage_members: tuple[str, ...] = ()

    def may_use(self, member: str) -> bool:
        """Whether any of its stages may lie there."""
        allowed = self.stage_members or self.members
        return not allowed or member in allowed


def search(needs: Sequence[ReplicaNeed], usable: Usable) -> list[PlacedStage] | None:
    """A place for every stage; None where there is no room for all of them."""
    if sum(need.gpus * need.stages for need in needs) > sum(node.free for nodes in usable.values() for node in nodes):
        return None
    order = sorted(
        needs, key=lambda need: (-need.gpus * need.stages, -need.gpus, len(need.members) or len(usable), need.replica)
    )
    steps = [(need, stage) for need in order for stage in range(need.stages)]
    tries = MAX_TRIES + len(steps)
    found = _Pass(steps, usable, len(steps), tries).run()
    if found is None:
        return None
    for most in range(_least_boundaries(needs, usable), boundaries(found)):
        if tries <= 0:
            break
        attempt = _Pass(steps, usable, most, tries)
        if (better := attempt.run()) is not None:
            return better
        tries = attempt.tries
    return found


def boundaries(stages: Sequence[PlacedStage]) -> int:
    """How many neighbouring stages of one replica lie in different members."""
    members = {(stage.replica, stage.stage): stage.member for stage in stages}
    return sum(members.get((replica, stage + 1), member) != member for (replica, stage), member in members.items())


def _least_boundaries(needs: Sequence[ReplicaNeed], usable: Usable) -> int:
    """How many there must be at least: one in each replica that finds no member with room for all of it, were all of
    the size of the smallest.
    """
    smallest = min(need.gpus * need.stages for need in needs)
    whole = sum(sum(node.free for node in nodes) // smallest for nodes in usable.values())
    return max(0, len(needs) - whole)


def room_for(gpus: int, stages: int, rooms: Iterable[tuple[str, int]]) -> tuple[int, int]:
    """How many of `stages` equal stages fit, each on as few nodes as it can, and how many nodes they take.

    `rooms`: pool and free GPUs of each node. Stage after stage without looking ahead, so that now and then one more
    would fit in another order.
    """
    pools: dict[str, Counter[int]] = {}
    for pool, free in rooms:
        pools.setdefault(pool, Counter())[free] += 1
    fit = taken = 0
    while fit < stages and (count := _take(gpus, pools)):
        fit, taken = fit + 1, taken + count
    return fit, taken


def _take(gpus: int, pools: Mapping[str, Counter[int]]) -> int:
    """Takes a stage's GPUs from the fewest nodes, the tightest first; how many nodes, 0 where it doesn't fit."""
    for count in _divisors(gpus):
        each = gpus // count
        for _, rooms in sorted(pools.items()):
            if sum(number for room, number in rooms.items() if room >= each) < count:
                continue
            wanted = count
            for room in sorted(room for room in rooms if room >= each):
                used = min(wanted, rooms[room])
                rooms[room] -= used
                rooms[room - each] += used
                wanted -= used
            return count
    return 0


class _Pass:
    """One depth-first pass that allows `most` boundaries between members. `tries` left are counted down."""

    def __init__(self, steps: Sequence[tuple[ReplicaNeed, int]], usable: Usable, most: int, tries: int) -> None:
        self._steps = steps
        self._usable = {name: tuple(nodes) for name, nodes in sorted(usable.items())}
        self._free = {name: {node.name: node.free for node in nodes} for name, nodes in self._usable.items()}
        self._room = {name: sum(free.values()) for name, free in self._free.items()}
        pools: dict[tuple[str, str], list[str]] = {}
        for name, nodes in self._usable.items():
            for node in nodes:
                pools.setdefault((name, node.pool), []).append(node.name)
        self._pools = pools
        self._left = most
        self._placed: list[PlacedStage] = []
        self.tries = tries

    def run(self) -> list[PlacedStage] | None:
        failed: set[State] = set()  # a state that failed once isn't entered again
        open_ = [self._choices()]
        while open_:
            choice = next(open_[-1], None)
            if choice is None:
                failed.add(self._state())
                open_.pop()
                if self._placed:
                    self._give_back()
                continue
            self._put(choice)
            self.tries -= 1
            if len(self._placed) == len(self._steps):
                return self._placed
            if self.tries <= 0:
                return None
            if failed and self._state() in failed:
                self._give_back()
            else:
                open_.append(self._choices())
        return None

    def _before(self) -> str | None:
        """The member of the stage before the next one, if that is of the same replica."""
        _, stage = self._steps[len(self._placed)]
        return self._placed[-1].member if stage else None

    def _state(self) -> State:
        """All that the rest depends on: what is free, node names apart, and where boundaries are counted, on which."""
        rest = len(self._steps) - len(self._placed)
        counts = self._left < rest
        rooms = tuple(
            tuple(sorted(self._free[member][name] for name in nodes)) for (member, _), nodes in self._pools.items()
        )
        need, stage = self._steps[len(self._placed)]
        where = ((self._before() or "",) if counts else ()) + (
            tuple(sorted(self._used(stage))) if need.together else ()
        )
        return rest, min(self._left, rest), where, rooms

    def _used(self, stage: int) -> set[str]:
        """The members of the replica's stages before this one."""
        return {item.member for item in self._placed[len(self._placed) - stage :]}

    def _allowed(self, need: ReplicaNeed, stage: int) -> list[str]:
        allowed = need.stage_members[stage : stage + 1] or need.members
        names = [name for name in self._usable if not allowed or name in allowed]
        if not need.together:
            return names
        used = self._used(stage)
        return [name for name in names if any(used | {name} <= group for group in need.together)]

    def _put(self, stage: PlacedStage) -> None:
        before = self._before()
        self._left -= before is not None and before != stage.member
        self._placed.append(stage)
        for node in stage.nodes:
            self._free[stage.member][node.name] -= node.gpus
            self._room[stage.member] -= node.gpus

    def _give_back(self) -> None:
        stage = self._placed.pop()
        before = self._before()
        self._left += before is not None and before != stage.member
        for node in stage.nodes:
            self._free[stage.member][node.name] += node.gpus
            self._room[stage.member] += node.gpus

    def _choices(self) -> Iterator[PlacedStage]:
        """Every way to place the next stage, the best first: in the member of the stage before it, then where most of
        the stages to come have room, on the fewest nodes.
        """
        need, stage = self._steps[len(self._placed)]
        before, rest = self._before(), need.stages - stage
        room = {name: self._room[name] for name in self._allowed(need, stage)}
        if before in room and (self._left or room[before] >= rest * need.gpus):
            for count in _divisors(need.gpus):
                yield from self._in(before, need, stage, count)
        if before is not None and not self._left:
            return
        wanted = need.gpus * (1 if self._left - (before is not None) > 0 else rest)
        others = sorted(
            (self._rank(name, need, rest), name) for name in room if room[name] >= wanted and name != before
        )
        for count in _divisors(need.gpus):
            for _, name in others:
                yield from self._in(name, need, stage, count)

    def _rank(self, member: str, need: ReplicaNeed, rest: int) -> tuple[int, int, int]:
        free = self._free[member]
        fit, taken = room_for(need.gpus, rest, ((node.pool, free[node.name]) for node in self._usable[member]))
        return -fit, taken, -self._room[member]

    def _in(self, member: str, need: ReplicaNeed, stage: int, count: int) -> Iterator[PlacedStage]:
        """Every way to place the stage on `count` nodes of one pool of the member."""
        each = need.gpus // count
        pools: dict[str, list[str]] = {}
        for node in self._usable[member]:
            if self._free[member][node.name] >= each:
                pools.setdefault(node.pool, []).append(node.name)
        for pool in sorted(pools):
            for names in _node_sets(pools[pool], self._free[member], count):
                nodes = tuple(PlacedNode(node, each) for node in names)
                yield PlacedStage(need.replica, 1, stage, member, pool, need.zero_stage, nodes)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _node_sets(nodes: Sequence[str], free: Mapping[str, int], count: int) -> Iterator[tuple[str, ...]]:
    """Sets of `count` nodes, tightest fit first; of nodes with equal room the first by name stand for all."""
    by_room: dict[int, list[str]] = {}
    for name in nodes:
        by_room.setdefault(free[name], []).append(name)
    rooms = [by_room[room] for room in sorted(by_room)]

    def take(index: int, wanted: int) -> Iterator[tuple[str, ...]]:
        if wanted == 0:
            yield ()
        elif sum(len(names) for names in rooms[index:]) >= wanted:
            for number in range(min(wanted, len(rooms[index])), -1, -1):
                for rest in take(index + 1, wanted - number):
                    yield (*rooms[index][:number], *rest)

    for names in take(0, count):
        yield tuple(sorted(names))
