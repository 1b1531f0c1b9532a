"""Who is at the other end, and whether we may talk. Pure.

Both sides say who they are, what they run and what they know of the stream; each judges the other against the verified
certificate and the peer table, and says what differs where it refuses.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from crosscloud_trainer.contract import InvalidDocument, dump_json, read, read_json
from crosscloud_trainer.contract.reading import parse_json, rule
from crosscloud_trainer.link.errors import FrameError
from crosscloud_trainer.link.frames import PROTOCOL_VERSION
from crosscloud_trainer.link.session import Greeting
from crosscloud_trainer.pki import PodIdentity

_U64 = 2**64 - 1


@dataclass(frozen=True, order=True)
class RankId:
    """One rank of the attempt; `local` is its number in its pod."""

    replica: int
    stage: int
    node: int
    local: int

    def __str__(self) -> str:
        return f"replica {self.replica} stage {self.stage} node {self.node} rank {self.local}"


@dataclass(frozen=True, order=True)
class Authority:
    """Whose word counts: ranks obey the highest (home, term); `view` is the number of the view in force."""

    home: int
    term: int
    view: int


class Reason(enum.Enum):
    """Why a peer is refused."""

    PROTOCOL = "protocol"
    JOB = "job"
    IDENTITY = "identity"
    OLD_ATTEMPT = "old attempt"
    NEW_ATTEMPT = "new attempt"
    OLD_INCARNATION = "old incarnation"
    NEW_INCARNATION = "new incarnation"
    AGREEMENT = "agreement"


@dataclass(frozen=True)
class Refusal:
    """Sent to the one who is refused."""

    reason: Reason = rule()
    message: str = rule(max_length=4096)


@dataclass(frozen=True)
class Hello:
    """The first message of each side. `to` is the rank that is meant: a gateway may lead to another one."""

    protocol: int = rule(minimum=1)
    job: str = rule(max_length=63)
    attempt: int = rule(minimum=1)
    replica: int = rule(minimum=0)
    stage: int = rule(minimum=0)
    node: int = rule(minimum=0)
    local_rank: int = rule(minimum=0)
    incarnation: int = rule(minimum=1)
    to: str = rule(max_length=200)
    home: int = rule(minimum=1, maximum=_U64)
    term: int = rule(minimum=0, maximum=_U64)
    view: int = rule(minimum=0, maximum=_U64)
    agreement: dict[str, str] = rule()
    session: int = rule(minimum=1, maximum=_U64)
    peer_session: int = rule(minimum=0, maximum=_U64)
    received: int = rule(minimum=0, maximum=_U64)

    @property
    def rank(self) -> RankId:
        return RankId(self.replica, self.stage, self.node, self.local_rank)

    @property
    def authority(self) -> Authority:
        return Authority(self.home, self.term, self.view)

    @property
    def greeting(self) -> Greeting:
        return Greeting(self.session, self.peer_session, self.received)


@dataclass(frozen=True)
class Self:
    """What this rank is and must have in common with its peers (`agreement`: value or digest by name)."""

    pod: PodIdentity
    local: int
    agreement: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> RankId:
        return RankId(self.pod.replica, self.pod.stage, self.pod.node, self.local)

    def hello(self, to: RankId, authority: Authority, greeting: Greeting) -> bytes:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            job=self.pod.job_uid,
            attempt=self.pod.attempt,
            replica=self.pod.replica,
            stage=self.pod.stage,
            node=self.pod.node,
            local_rank=self.local,
            incarnation=self.pod.incarnation,
            to=str(to),
            home=authority.home,
            term=authority.term,
            view=authority.view,
            agreement=dict(self.agreement),
            session=greeting.session,
            peer_session=greeting.peer_session,
            received=greeting.received,
        )
        return dump_json(hello).encode()


def read_hello(body: bytes) -> Hello | Refusal:
    """The peer's words; a refusal where it speaks another version of the protocol. Raises FrameError for garbage."""
    try:
        data = parse_json(body)
    except InvalidDocument as fault:
        raise FrameError("garbage", "the handshake is no JSON") from fault
    version = data.get("protocol") if isinstance(data, dict) else None
    if isinstance(version, int) and version != PROTOCOL_VERSION:
        return Refusal(Reason.PROTOCOL, f"protocol: found version {version}, must be {PROTOCOL_VERSION}")
    try:
        return read(Hello, data)
    except InvalidDocument as fault:
        raise FrameError("garbage", f"the handshake is not ours: {fault}".replace("\n", "; ")) from fault


def read_refusal(body: bytes) -> Refusal:
    try:
        return read_json(Refusal, body)
    except InvalidDocument as fault:
        raise FrameError("garbage", "a refusal that can't be read") from fault


def judge_certificate(certified: PodIdentity, ours: PodIdentity) -> Refusal | None:
    """Judges the certificate alone, before a word is exchanged."""
    if certified.job_uid != ours.job_uid:
        return Refusal(Reason.JOB, f"job: found {certified.job_uid}, must be {ours.job_uid}")
    if certified.attempt < ours.attempt:
        return Refusal(Reason.OLD_ATTEMPT, f"attempt: found {certified.attempt}, now is {ours.attempt}")
    if certified.attempt > ours.attempt:
        return Refusal(Reason.NEW_ATTEMPT, f"attempt: found {certified.attempt}, this is {ours.attempt}")
    return None


def judge(hello: Hello, certified: PodIdentity, me: Self, incarnation: int | None) -> Refusal | None:
    """Whether to refuse a peer whose certificate was judged already; None is yes to it.

    `incarnation` is what the peer table says of the peer's pod, None if it isn't there.
    """
    said = PodIdentity(hello.job, hello.attempt, hello.replica, hello.stage, hello.node, hello.incarnation)
    if said != certified:
        return Refusal(Reason.IDENTITY, f"the peer says {said.uri}, its certificate says {certified.uri}")
    if hello.to != str(me.rank):
        return Refusal(Reason.IDENTITY, f"{hello.rank} wants {hello.to}, this is {me.rank}")
    if incarnation is None:
        return Refusal(Reason.IDENTITY, f"{hello.rank} is not in the peer table")
    if hello.incarnation < incarnation:
        found = f"incarnation of replica {hello.replica}: found {hello.incarnation}, now is {incarnation}"
        return Refusal(Reason.OLD_INCARNATION, found)
    if hello.incarnation > incarnation:
        found = f"incarnation of replica {hello.replica}: found {hello.incarnation}, known is {incarnation}"
        return Refusal(Reason.NEW_INCARNATION, found)
    unlike = differences(me.agreement, hello.agreement)
    if unlike:
        return Refusal(Reason.AGREEMENT, f"{me.rank} and {hello.rank} differ in {unlike}")
    return None


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What must be alike and isn't, with both values; empty if all is alike."""
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return "; ".join(f"{name}: {ours.get(name)!s:.80} and {theirs.get(name)!s:.80}" for name in names)
