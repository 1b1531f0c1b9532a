"""The protocol of rounds in a fixed view, as seen by one rank. Pure: no sockets, no clock, no arithmetic.

In a round every rank announces its replica's weight and digest to the ranks that it has to do with, sends its
payload of the cells that they own, adds what it owns itself once everybody's payload is here, and sends the result.
A message carries attempt, home, term, view and round; older ones are dropped. What was sent is kept until the whole
view is known to have prepared the round, so that it can be sent again to a peer that has lost it.

A replica can't end a round without the word of every other, so it is at most one round ahead of them. A rank may lag
behind its own replica by one more, while the others needed no cell of it. So messages of the two rounds after the
present one may come early, and none of a later one.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from crosscloud_trainer.link import Authority, Message, MessageType
from crosscloud_trainer.membership.errors import RoundFailed
from crosscloud_trainer.membership.numbering import Peer

Buffer = bytes | bytearray | memoryview
HEAD = struct.Struct("!10Q")
_LEAVES, _EXACT = 1, 2  # flags of a head


@dataclass(frozen=True)
class Head:
    """What every message says first. `prepared` is the last round that the sender's replica has prepared; 0 is none.
    `leaves`: it was told to end, and after this round all stop. `state` is only told; `exact`: cells travel as fp32.
    """

    attempt: int
    authority: Authority
    round: int
    weight: int
    digest: int
    prepared: int
    leaves: bool = False
    state: int = 0
    exact: bool = False

    def pack(self) -> bytes:
        a = self.authority
        flags = _LEAVES * self.leaves | _EXACT * self.exact
        said = (self.round, self.weight, self.digest, self.prepared, flags, self.state)
        return HEAD.pack(self.attempt, a.home, a.term, a.view, *said)

    @staticmethod
    def unpack(data: bytes) -> Head:
        """Raises RoundFailed for a head of another size."""
        if len(data) != HEAD.size:
            raise RoundFailed(f"a message has a head of {len(data)} bytes, must be {HEAD.size}")
        attempt, home, term, view, number, weight, digest, prepared, flags, state = HEAD.unpack(data)
        said = (number, weight, digest, prepared, bool(flags & _LEAVES), state, bool(flags & _EXACT))
        return Head(attempt, Authority(home, term, view), *said)


@dataclass(frozen=True)
class Share:
    """Bytes of the cells that two ranks exchange: `outgoing` are owned by the peer, `incoming` by us.

    The payload goes one way, and a result of the same size comes back. Both are 0 for a peer that only hears
    announcements.
    """

    outgoing: int = 0
    incoming: int = 0
    exact_outgoing: int = 0
    exact_incoming: int = 0

    def sizes(self, exact: bool) -> tuple[int, int]:
        """(outgoing, incoming) in a round whose cells travel as fp32, or as the codec has them."""
        return (self.exact_outgoing, self.exact_incoming) if exact else (self.outgoing, self.incoming)


@dataclass(frozen=True)
class Send:
    peer: Peer
    message: Message


@dataclass(frozen=True)
class Announced:
    """What all ranks of a replica say alike of a round."""

    weight: int
    digest: int
    state: int = 0
    exact: bool = False


@dataclass
class _Round:
    """What is known of one round. `payloads` and `results` are as received; `sent_*` are our own, to send again."""

    begun: bool = False
    leaves: bool = False
    leaving: set[int] = field(default_factory=set)  # other replicas that leave after it
    weight: int = 0
    digest: int = 0
    state: int = 0
    exact: bool = False
    announced: dict[Peer, Announced] = field(default_factory=dict)
    payloads: dict[Peer, Buffer] = field(default_factory=dict)
    results: dict[Peer, Buffer] = field(default_factory=dict)
    sent_payloads: Mapping[Peer, Buffer] = field(default_factory=dict)
    sent_results: Mapping[Peer, Buffer] = field(default_factory=dict)


class Rounds:
    """`shares` has every rank of other replicas that this one talks to. Messages to send are taken with `take`."""

    def __init__(
        self, me: Peer, view: tuple[int, ...], shares: Mapping[Peer, Share], attempt: int, authority: Authority
    ) -> None:
        self.me = me
        self.view = view
        self.authority = authority
        self.number = 0  # the present round; the last one while none is going on
        self._first = 0  # the round that this rank began with
        self._shares = dict(shares)
        self._attempt = attempt
        self._rounds: dict[int, _Round] = {}
        self._prepared = dict.fromkeys(view, 0)
        self._ended: dict[int, int] = {}  # the last round of replicas that have no more
        self._outgoing: list[Send] = []

    # what goes out

    def take(self) -> list[Send]:
        """Messages to send, each once."""
        taken, self._outgoing = self._outgoing, []
        return taken

    def begin(
        self,
        number: int,
        weight: int,
        digest: int,
        payloads: Mapping[Peer, Buffer],
        *,
        leaves: bool = False,
        state: int = 0,
        exact: bool = False,
    ) -> None:
        """Enters a round. `payloads` has the bytes for each peer with a share, and is empty where the weight is 0.

        Raises RoundFailed if another replica can't take part any more.
        """
        if self.number and number != self.number + 1:
            raise ValueError(f"round {number} can't follow round {self.number}")
        self._first = self._first or number
        strays = [known for known in self._rounds if known < self._first or known > number + 1]
        if strays:
            raise RoundFailed(f"a peer is in round {max(strays)}, this replica begins round {number}")
        for peer, share in self._shares.items():
            outgoing, _ = share.sizes(exact)
            if weight and len(payloads.get(peer, b"")) != outgoing:
                found = f"{len(payloads.get(peer, b''))} bytes of payload for {peer}"
                raise ValueError(f"{found}; its cells have {outgoing}")
        self.number = number
        present = self._rounds.setdefault(number, _Round())
        present.begun, present.weight, present.digest, present.leaves = True, weight, digest, leaves
        present.state, present.exact = state, exact
        present.sent_payloads = payloads if weight else {}
        self._forget()
        self._check_ended()
        for peer in self._shares:
            self._tell(peer, number, present)

    def reduced(self, results: Mapping[Peer, Buffer]) -> None:
        """The cells that this rank owns are added: the bytes for each peer whose payload came in."""
        present = self._rounds[self.number]
        present.sent_results = results
        present.payloads.clear()  # one that is sent again after this is kept until the round is forgotten, to no use
        for peer, body in results.items():
            self._send(peer, MessageType.RESULT, self.number, present, body)

    def prepared(self, number: int) -> None:
        """All ranks of this replica have what they need of a round. Later messages say so."""
        self._prepared[self.me[0]] = max(self._prepared[self.me[0]], number)
        self._forget()

    def settle(self) -> None:
        """Says that the present round is the last one and prepared: no later one would."""
        for peer in self._shares:
            self._send(peer, MessageType.PREPARED, self.number, _Round())

    def resend(self, peer: Peer) -> None:
        """All that the peer may need and can't have: its process, or our authority, is a new one."""
        self._send(peer, MessageType.VIEW, self.number, _Round())
        for number in sorted(self._rounds):
            known = self._rounds[number]
            if not known.begun or peer not in self._shares:
                continue
            self._tell(peer, number, known)
            if peer in known.sent_results:
                self._send(peer, MessageType.RESULT, number, known, known.sent_results[peer])

    def obey(self, authority: Authority) -> None:
        """A higher authority is in force; what went out under the old one may have been dropped as old."""
        if authority > self.authority:
            self.authority = authority
            for peer in self._shares:
                self.resend(peer)

    def _tell(self, peer: Peer, number: int, known: _Round) -> None:
        self._send(peer, MessageType.ANNOUNCE, number, known)
        if known.weight and self._shares[peer].outgoing:
            self._send(peer, MessageType.PAYLOAD, number, known, known.sent_payloads[peer])

    def _send(self, peer: Peer, kind: MessageType, number: int, known: _Round, body: Buffer = b"") -> None:
        last = self._prepared[self.me[0]]
        said = (known.weight, known.digest, last, known.leaves, known.state, known.exact)
        head = Head(self._attempt, self.authority, number, *said)
        self._outgoing.append(Send(peer, Message(kind, head.pack(), body)))

    def _forget(self) -> None:
        for number in [n for n in self._rounds if n < self.number or (n == self.number and self._done(n))]:
            if number <= self.settled:
                del self._rounds[number]

    def _done(self, number: int) -> bool:
        return self._prepared[self.me[0]] >= number

    # what comes in

    def received(self, peer: Peer, message: Message) -> None:
        """Takes a message. Raises RoundFailed for one that shows that the view can't go on."""
        head = Head.unpack(message.head)
        if peer not in self._shares or head.attempt != self._attempt:
            return
        if head.authority < self.authority:
            return  # its sender says it again once our word has reached it
        self.obey(head.authority)
        self._prepared[peer[0]] = max(self._prepared[peer[0]], head.prepared)
        self._forget()
        if message.type in (MessageType.ANNOUNCE, MessageType.PAYLOAD, MessageType.RESULT):
            self._take_part(peer, head, message)
        elif message.type is MessageType.PREPARED:
            self._ended[peer[0]] = head.round
            self._check_ended()

    def _check_ended(self) -> None:
        for replica, last in self._ended.items():
            if last < self.number:
                found = f"replica {replica} has ended after round {last}, and this one is in round {self.number}"
                raise RoundFailed(f"{found}: all replicas must take equally many steps")

    def _take_part(self, peer: Peer, head: Head, message: Message) -> None:
        if self.number and not self._first <= head.round <= self.number + 2:
            began = f"this replica began with round {self._first} and is in round {self.number}"
            raise RoundFailed(f"{named(peer)} is in round {head.round}, {began}")
        if head.round < self.number or head.round <= self.settled:
            return
        if not self.number and len(self._rounds.keys() | {head.round}) > 2:
            raise RoundFailed(f"{named(peer)} is in round {head.round} before this replica has begun")
        known = self._rounds.setdefault(head.round, _Round())
        if message.type is MessageType.ANNOUNCE:
            self._announced(peer, head, known)
            return
        outgoing, incoming = self._shares[peer].sizes(head.exact)
        if message.type is MessageType.PAYLOAD:
            self._keep(known.payloads, peer, message, incoming, head)
        else:
            self._keep(known.results, peer, message, outgoing, head)

    def _announced(self, peer: Peer, head: Head, known: _Round) -> None:
        said = Announced(head.weight, head.digest, head.state, head.exact)
        for other, before in known.announced.items():
            if other[0] == peer[0] and before != said:
                found = f"{named(other)} says weight {before.weight} and digest {before.digest:016x}"
                this = f"{named(peer)} says {said.weight} and {said.digest:016x}"
                raise RoundFailed(f"round {head.round}: {found}, {this}; all ranks of a replica must say the same")
        known.announced[peer] = said
        if head.leaves:
            known.leaving.add(peer[0])

    def _keep(self, kept: dict[Peer, Buffer], peer: Peer, message: Message, size: int, head: Head) -> None:
        if len(message.body) != size or not size:
            found = f"{message.type.name} of {len(message.body)} bytes from {named(peer)}"
            raise RoundFailed(f"round {head.round}: {found}; its cells have {size}")
        kept.setdefault(peer, message.body)  # one that was sent again is the same

    # what is known of the present round

    @property
    def settled(self) -> int:
        """The last round that the whole view has prepared; 0 is none."""
        return min(self._prepared.values())

    @property
    def weights(self) -> dict[int, int]:
        """By replica, as far as announced."""
        return {replica: said.weight for replica, said in self.announced.items()}

    @property
    def digests(self) -> dict[int, int]:
        """By replica, as far as announced: its outer state before the round."""
        return {replica: said.digest for replica, said in self.announced.items()}

    @property
    def announced(self) -> dict[int, Announced]:
        """By replica, as far as announced."""
        present = self._rounds[self.number]
        said = {self.me[0]: Announced(present.weight, present.digest, present.state, present.exact)}
        said.update({peer[0]: words for peer, words in present.announced.items()})
        return dict(sorted(said.items()))

    @property
    def leaving(self) -> tuple[int, ...]:
        """Replicas that were told to end; the same everywhere once all weights are known."""
        present = self._rounds.get(self.number, _Round())
        return tuple(sorted(present.leaving | ({self.me[0]} if present.leaves else set())))

    @property
    def payloads(self) -> Mapping[Peer, Buffer]:
        return self._rounds[self.number].payloads

    def take_results(self) -> Mapping[Peer, Buffer]:
        """All that were awaited, once."""
        present = self._rounds[self.number]
        taken, present.results = present.results, {}
        return taken

    def awaited_payloads(self) -> set[int]:
        """Replicas whose announcement or payload is missing."""
        present, weights = self._rounds[self.number], self.weights
        missing = set(self.view) - set(weights)
        for peer, share in self._shares.items():
            if share.incoming and weights.get(peer[0]) and peer not in present.payloads:
                missing.add(peer[0])
        return missing

    def awaited_results(self) -> set[int]:
        """Replicas whose result is missing; of use once all weights are known."""
        present = self._rounds[self.number]
        if not any(self.weights.values()):
            return set()
        return {p[0] for p, share in self._shares.items() if share.outgoing and p not in present.results}

    def unsettled(self) -> set[int]:
        """Replicas that have not said that they have prepared the present round."""
        return {replica for replica, number in self._prepared.items() if number < self.number}


def named(peer: Peer) -> str:
    return f"replica {peer[0]} rank {peer[1]}"


def divergence(number: int, digests: Mapping[int, int]) -> str | None:
    """None if all replicas had the same outer state before a round; else who differs from whom, as text."""
    if len(set(digests.values())) <= 1:
        return None
    counts = Counter(digests.values())
    common, votes = counts.most_common(1)[0]
    states = ", ".join(f"replica {replica} has {value:016x}" for replica, value in sorted(digests.items()))
    text = f"outer states differ before round {number}: {states}"
    if votes * 2 > len(digests):
        wrong = [str(replica) for replica, value in sorted(digests.items()) if value != common]
        return f"{text}; replica {', '.join(wrong)} differs from the majority"
    return f"{text}; there is no majority that tells who is right"
