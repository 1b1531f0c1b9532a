"""The protocol of rounds under a network that reorders, doubles and loses: seeded schedules, no sockets, no clock."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from crosscloud_trainer.link import Authority, Message, MessageType
from crosscloud_trainer.membership.errors import RoundFailed
from crosscloud_trainer.membership.rounds import HEAD, Head, Peer, Rounds, Share, divergence

SIZE = 8
ATTEMPT = 3
OLD, NEW = Authority(1, 1, 1), Authority(1, 2, 1)


def shares(ranks: list[int], me: Peer) -> dict[Peer, Share]:
    """One cell per (rank, rank) pair; a third of the pairs share none, but rank 0s always hear each other."""
    found = {}
    for replica, count in enumerate(ranks):
        for rank in range(count):
            peer = (replica, rank)
            if replica == me[0]:
                continue

            def has(holder: Peer, owner: Peer) -> int:
                return SIZE if zlib.crc32(repr((holder, owner)).encode()) % 3 else 0

            share = Share(has(me, peer), has(peer, me))
            if share != Share() or 0 in (rank, me[1]):
                found[peer] = share
    return found


def words(kind: str, number: int, sender: Peer, receiver: Peer, content: str = "") -> bytes:
    """Eight bytes that nobody but this sender would send to this receiver in this round."""
    return f"{zlib.crc32(repr((kind, number, sender, receiver, content)).encode()):08x}".encode()


@dataclass
class Actor:
    """One rank: the training thread's part, as steps that are taken when nothing is awaited any more."""

    me: Peer
    rounds: Rounds
    weights: list[int]
    total: int
    steps: Iterator[None] = field(init=False)
    results: dict[int, dict[Peer, bytes]] = field(default_factory=dict)
    agreed: dict[int, dict[int, int]] = field(default_factory=dict)
    finished: bool = False
    replica: list[Actor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = self._live()

    def _live(self) -> Iterator[None]:
        rounds = self.rounds
        for number in range(1, self.total + 1):
            weight = self.weights[number]
            out = {p: words("payload", number, self.me, p) for p, s in self._shares() if s.outgoing}
            rounds.begin(number, weight, number * 11, out if weight else {})
            while rounds.awaited_payloads():
                yield
            self.agreed[number] = rounds.weights
            if any(rounds.weights.values()):
                content = repr(sorted((p, bytes(body)) for p, body in rounds.payloads.items()))
                rounds.reduced(
                    {p: words("result", number, self.me, p, content) for p, s in self._shares() if s.incoming}
                )
                while rounds.awaited_results():
                    yield
            self.results[number] = {p: bytes(body) for p, body in rounds.take_results().items()}
            while any(number not in other.results for other in self.replica):  # the collective of its ranks
                yield
            rounds.prepared(number)
        rounds.settle()
        while rounds.unsettled():
            yield
        self.finished = True

    def _shares(self) -> list[tuple[Peer, Share]]:
        return sorted(shares_of[self.me].items())

    def step(self) -> None:
        next(self.steps, None)


shares_of: dict[Peer, dict[Peer, Share]] = {}


class Simulation:
    """Messages lie in one bag; what happens next is drawn by the seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ranks = [self.chance.choice([1, 1, 2, 3]) for _ in range(self.chance.choice([2, 2, 3, 4]))]
        self.total = 4
        view = tuple(range(len(self.ranks)))
        weights = {r: [0, *(self.chance.choice([0, 1, 5, 7]) for _ in range(self.total))] for r in view}
        self.actors: dict[Peer, Actor] = {}
        shares_of.clear()
        for replica, count in enumerate(self.ranks):
            for rank in range(count):
                me = (replica, rank)
                shares_of[me] = shares(self.ranks, me)
                rounds = Rounds(me, view, shares_of[me], ATTEMPT, self.chance.choice([OLD, OLD, NEW]))
                self.actors[me] = Actor(me, rounds, weights[replica], self.total)
        for actor in self.actors.values():
            actor.replica = [other for other in self.actors.values() if other.me[0] == actor.me[0]]
        self.weights = weights
        self.bag: list[tuple[Peer, Peer, Message]] = []
        self.lost: set[tuple[Peer, Peer]] = set()

    def run(self) -> None:
        for _ in range(20_000):
            if all(actor.finished for actor in self.actors.values()):
                return
            self._happen()
            self._collect()
        states = {me: a.rounds.number for me, a in self.actors.items() if not a.finished}
        raise AssertionError(f"no end: {states}, {len(self.bag)} messages on their way")

    def _collect(self) -> None:
        for me, actor in self.actors.items():
            self.bag.extend((me, send.peer, send.message) for send in actor.rounds.take())

    def _happen(self) -> None:
        draw = self.chance.random()
        if self.bag and draw < 0.6:
            position = self.chance.randrange(len(self.bag))
            sender, receiver, message = self.bag[position]
            if self.chance.random() > 0.1:  # else it stays in the bag: it arrives twice
                self.bag[position] = self.bag[-1]
                self.bag.pop()
            self.actors[receiver].rounds.received(sender, message)
        elif self.bag and draw < 0.65:  # a connection breaks and its peer has lost what was on its way
            sender, receiver, _ = self.chance.choice(self.bag)
            self.bag = [one for one in self.bag if one[:2] != (sender, receiver)]
            self.lost.add((sender, receiver))
        elif self.lost and (draw < 0.7 or not self.bag):
            sender, receiver = self.lost.pop()
            self.actors[sender].rounds.resend(receiver)
        elif draw < 0.702:
            self.chance.choice(list(self.actors.values())).rounds.obey(NEW)
        else:
            self.chance.choice(list(self.actors.values())).step()


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_every_schedule_ends_with_the_result_bytes_of_the_one_without_faults(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        simulation = Simulation(seed)
        simulation.run()
        for me, actor in simulation.actors.items():
            for number in range(1, simulation.total + 1):
                said = {replica: of[number] for replica, of in simulation.weights.items()}
                assert actor.agreed[number] == said, seed
                expected = {}
                for peer, share in shares_of[me].items():
                    if share.outgoing and any(said.values()):
                        came = [
                            (p, words("payload", number, p, peer))
                            for p, s in shares_of[peer].items()
                            if s.incoming and said[p[0]]
                        ]
                        expected[peer] = words("result", number, peer, me, repr(sorted(came)))
                assert actor.results[number] == expected, seed
            assert actor.rounds.settled == simulation.total
            assert not actor.rounds._rounds, "what all have prepared is let go"


def pair(authority: Authority = OLD) -> Rounds:
    return Rounds((0, 0), (0, 1), {(1, 0): Share(SIZE, SIZE), (1, 1): Share()}, ATTEMPT, authority)


def message(
    kind: MessageType,
    number: int,
    body: bytes = b"",
    *,
    attempt: int = ATTEMPT,
    authority: Authority = OLD,
    weight: int = 5,
    digest: int = 11,
    prepared: int = 0,
) -> Message:
    return Message(kind, Head(attempt, authority, number, weight, digest, prepared).pack(), body)


def begun() -> Rounds:
    rounds = pair()
    rounds.begin(1, 5, 11, {(1, 0): bytes(SIZE)})
    rounds.take()
    return rounds


def test_messages_of_another_attempt_or_an_older_authority_are_dropped() -> None:
    rounds = pair(NEW)
    rounds.begin(1, 5, 11, {(1, 0): bytes(SIZE)})
    rounds.take()
    rounds.received((1, 0), message(MessageType.ANNOUNCE, 1, attempt=ATTEMPT - 1, authority=NEW))
    rounds.received((1, 0), message(MessageType.ANNOUNCE, 1, authority=OLD))
    rounds.received((9, 0), message(MessageType.ANNOUNCE, 1, authority=NEW))
    assert rounds.awaited_payloads() == {1}
    assert rounds.take() == []


def test_a_higher_authority_is_obeyed_and_all_is_said_again_under_it() -> None:
    rounds = begun()
    rounds.received((1, 0), message(MessageType.VIEW, 0, authority=NEW))
    assert rounds.authority == NEW
    sent = rounds.take()
    assert {Head.unpack(one.message.head).authority for one in sent} == {NEW}
    assert [one.message.type for one in sent if one.peer == (1, 0)] == [
        MessageType.VIEW,
        MessageType.ANNOUNCE,
        MessageType.PAYLOAD,
    ]


def test_payloads_and_results_of_another_size_than_their_cells_end_the_attempt_with_the_names() -> None:
    for kind in (MessageType.PAYLOAD, MessageType.RESULT):
        with pytest.raises(RoundFailed, match=rf"round 1: {kind.name} of 9 bytes from replica 1 rank 0; .* have 8"):
            begun().received((1, 0), message(kind, 1, bytes(9)))
        with pytest.raises(RoundFailed, match="have 0"):
            begun().received((1, 1), message(kind, 1, b""))


def test_rounds_that_can_t_belong_together_end_the_attempt() -> None:
    with pytest.raises(RoundFailed, match="replica 1 rank 0 is in round 4"):
        begun().received((1, 0), message(MessageType.ANNOUNCE, 4))
    late = pair()
    late.received((1, 0), message(MessageType.ANNOUNCE, 4))
    with pytest.raises(RoundFailed, match="a peer is in round 4, this replica begins round 9"):
        late.begin(9, 5, 11, {(1, 0): bytes(SIZE)})
    ahead = pair()
    ahead.begin(9, 5, 11, {(1, 0): bytes(SIZE)})
    with pytest.raises(RoundFailed, match="is in round 8"):
        ahead.received((1, 0), message(MessageType.ANNOUNCE, 8))


def test_ranks_of_a_replica_that_say_unlike_things_end_the_attempt() -> None:
    rounds = begun()
    rounds.received((1, 0), message(MessageType.ANNOUNCE, 1, weight=5, digest=1))
    with pytest.raises(RoundFailed, match="all ranks of a replica must say the same"):
        rounds.received((1, 1), message(MessageType.ANNOUNCE, 1, weight=5, digest=2))


def test_a_head_of_another_size_is_refused() -> None:
    with pytest.raises(RoundFailed, match=f"must be {HEAD.size}"):
        begun().received((1, 0), Message(MessageType.ANNOUNCE, b"short"))


def test_what_was_sent_is_kept_until_the_whole_view_has_prepared_the_round() -> None:
    rounds = begun()
    rounds.received((1, 0), message(MessageType.ANNOUNCE, 1))
    rounds.received((1, 0), message(MessageType.PAYLOAD, 1, bytes(SIZE)))
    rounds.reduced({(1, 0): b"result__"})
    rounds.received((1, 0), message(MessageType.RESULT, 1, bytes(SIZE)))
    assert not rounds.awaited_results()
    rounds.prepared(1)
    rounds.take()
    rounds.resend((1, 0))
    again = {one.message.type: bytes(one.message.body) for one in rounds.take()}
    assert again[MessageType.RESULT] == b"result__"
    assert again[MessageType.PAYLOAD] == bytes(SIZE)
    rounds.received((1, 0), message(MessageType.ANNOUNCE, 2, prepared=1))
    assert rounds.settled == 1
    rounds.resend((1, 0))
    assert [one.message.type for one in rounds.take()] == [MessageType.VIEW]


def test_who_differs_is_told_where_a_majority_can_tell() -> None:
    assert divergence(4, {0: 7, 1: 7}) is None
    two = divergence(4, {0: 7, 1: 8})
    assert two is not None
    assert "before round 4" in two
    assert "replica 0 has 0000000000000007" in two
    assert "no majority" in two
    three = divergence(4, {0: 7, 1: 8, 2: 7})
    assert three is not None
    assert three.endswith("replica 1 differs from the majority")


def test_a_replica_that_was_told_to_end_says_so_in_its_round_and_all_hear_it_in_that_round() -> None:
    rounds = begun()
    assert rounds.leaving == ()
    said = Head(ATTEMPT, OLD, 1, 5, 11, 0, leaves=True, state=2**64 - 1)
    assert Head.unpack(said.pack()) == said
    rounds.received((1, 0), Message(MessageType.ANNOUNCE, said.pack(), b""))
    assert rounds.leaving == (1,)
    rounds.begin(2, 5, 11, {(1, 0): bytes(SIZE)}, leaves=True)
    assert rounds.leaving == (0,)
    heads = [Head.unpack(send.message.head) for send in rounds.take()]
    assert {head.leaves for head in heads} == {True}
