"""Stages of one replica over real links: activations, gradients and sums arrive as they were sent, over cuts too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from link.yard import DEADLINE, Yard, until
from membership.field import run_document

from crosscloud_trainer.compress import Codec, codec_named
from crosscloud_trainer.contract import ActivationCodec, Activations, Activity, ReplicaPlan, StagePlan
from crosscloud_trainer.journal import Journal
from crosscloud_trainer.link import Authority, Link, Message, MessageType, RankId
from crosscloud_trainer.link.mail import Mail
from crosscloud_trainer.meeting import Meeting, Place, Watch, meet_stages
from crosscloud_trainer.membership.solo import SoloExchange
from crosscloud_trainer.reporting import Status
from crosscloud_trainer.stage_link import Boundary, StageFault, StageLeaders, StageLink

PEERS = [RankId(0, stage, 0, 0) for stage in range(3)]


class Stage:
    """One rank of one stage."""

    def __init__(self, link: Link, stage: int, count: int, codec: Codec | None = None) -> None:
        self.link, self.mail = link, Mail(link)
        before = Boundary(PEERS[stage - 1], codec) if stage else None
        after = Boundary(PEERS[stage + 1], codec) if stage + 1 < count else None
        self.neighbours = StageLink(link, self.mail, before, after)
        self.leaders = StageLeaders(link, self.mail, PEERS[:count])


@contextmanager
def stages(yard: Yard, count: int, codec: Codec | None = None) -> Iterator[list[Stage]]:
    with ExitStack() as stack:
        links = [stack.enter_context(yard.link(stage)) for stage in range(count)]
        yield [Stage(link, number, count, codec) for number, link in enumerate(links)]


def together(works: list[Callable[[], object]]) -> list[object]:
    outcomes: list[object] = [None] * len(works)

    def run(number: int) -> None:
        try:
            outcomes[number] = works[number]()
        except Exception as fault:  # noqa: BLE001 - handed to the test
            outcomes[number] = fault

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return outcomes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_without_a_codec_arrive_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = [torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(4)]
    values[1][0, 0, 0] = torch.nan
    with stages(Yard.of_stages(tmp_path, 2), 2) as (first, second):
        for number, sent in enumerate(values):
            first.neighbours.send_activation(number, sent)
        for number, sent in enumerate(values):
            found = second.neighbours.receive_activation(number)
            assert found.dtype is dtype
            assert torch.equal(found.view(torch.uint8), sent.view(torch.uint8))
            second.neighbours.send_gradient(number, -found)
            assert torch.equal(first.neighbours.receive_gradient(number).nan_to_num(), -sent.nan_to_num())


@pytest.mark.parametrize(("name", "error", "bytes_per_value"), [("BF16", 2**-8, 2.0), ("Int8", 1 / 127, 1.02)])
def test_a_codec_saves_bytes_within_its_error(tmp_path: Path, name: str, error: float, bytes_per_value: float) -> None:
    values = torch.randn(3, 41, 100, generator=torch.Generator().manual_seed(1))
    with stages(Yard.of_stages(tmp_path, 2), 2, codec_named(name)) as (first, second):
        first.neighbours.send_activation(0, values)
        found = second.neighbours.receive_activation(0)
        assert found.shape == values.shape
        assert float((found - values).abs().max()) <= error * float(values.abs().max())
        (traffic,) = first.link.traffic()
        assert sum(traffic.sent.values()) < bytes_per_value * values.numel() + 4000


class Post:
    """Link and mail of both ends in one: what is sent comes `seconds` after it is asked for, by its own clock."""

    def __init__(self, seconds: float, me: RankId = PEERS[0]) -> None:
        self.now, self._seconds, self.me = 100.0, seconds, SimpleNamespace(rank=me)
        self.sent: list[tuple[RankId, Message]] = []
        self.allowed = 0

    def allow(self, message_bytes: int) -> None:
        self.allowed = message_bytes

    def connect(self, _peer: RankId) -> None: ...

    def send(self, peer: RankId, message: Message) -> None:
        self.sent.append((peer, message))

    def from_stage(self, _peer: RankId, _kind: MessageType) -> Message:
        self.now += self._seconds
        return self.sent.pop(0)[1]


def test_a_stage_counts_the_time_that_it_waits_for_its_neighbours() -> None:
    post: Any = Post(2.5)
    first = StageLink(post, post, None, Boundary(PEERS[1]), lambda: post.now)
    second = StageLink(post, post, Boundary(PEERS[0]), None, lambda: post.now)
    for number in range(3):
        first.send_activation(number, torch.ones(4))
        second.receive_activation(number)
    second.send_gradient(0, torch.ones(4))
    post.now += 60  # of work
    first.receive_gradient(0)
    assert (first.waited, second.waited) == (2.5, 7.5)


@pytest.mark.parametrize(
    ("activations", "size"),
    [(None, 16_384), (ActivationCodec.NONE, 16_384), (ActivationCodec.BF16, 8_192), (ActivationCodec.INT8, 4_160)],
)
def test_only_what_leaves_the_member_is_encoded(activations: ActivationCodec | None, size: int) -> None:
    members = ("east", "east", "west")
    plan = ReplicaPlan(0, 1, 1, tuple(StagePlan(stage, member, 1, 1) for stage, member in enumerate(members)))
    codec = None if activations is None else Activations(activations)
    run = replace(run_document([1]), replicas=(plan,), activations=codec)
    pod: Any = SimpleNamespace(replica=0, stage=1)
    attempt: Any = SimpleNamespace(run=run, plan=plan)
    post: Any = Post(0, PEERS[1])
    middle, _ = meet_stages(Place(pod, attempt, rank=0, ranks=1, local=0), post, post, 128)
    values = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(2))
    middle.send_gradient(0, values)
    middle.send_activation(0, values)
    assert [(peer, len(message.body)) for peer, message in post.sent] == [(PEERS[0], 16_384), (PEERS[2], size)]
    assert post.allowed == 2 * 256 * 128 * 4  # of 8 sequences, 2 at a time for 3 stages; 256 tokens each


def test_values_that_are_not_finite_arrive_as_such_through_any_codec(tmp_path: Path) -> None:
    values = torch.ones(5, 4)
    values[2, 2] = torch.inf
    with stages(Yard.of_stages(tmp_path, 2), 2, codec_named("Int8")) as (first, second):
        first.neighbours.send_activation(0, values)
        assert bool(second.neighbours.receive_activation(0).isnan().all())


def test_sums_are_added_in_the_order_of_stages_and_equal_everywhere(tmp_path: Path) -> None:
    parts = [torch.tensor([1e16, 0.1]), torch.tensor([1.0, 0.2]), torch.tensor([-1e16, 0.3])]
    parts = [part.double() for part in parts]
    expected = [(1e16 + 1.0) - 1e16, (0.1 + 0.2) + 0.3]
    with stages(Yard.of_stages(tmp_path, 3), 3) as ranks:
        for _ in range(3):
            sums = together([lambda r=rank, p=part: r.leaders.sums(p) for rank, part in zip(ranks, parts, strict=True)])
            expected_sums = torch.tensor([0.0 + expected[0], expected[1]], dtype=torch.float32).double()
            for found in sums:
                assert isinstance(found, torch.Tensor), found
                torch.testing.assert_close(found, expected_sums, rtol=1e-6, atol=1e-6)
            assert len({tuple(found.tolist()) for found in sums if isinstance(found, torch.Tensor)}) == 1


def test_activations_go_on_over_a_link_that_was_cut(tmp_path: Path) -> None:
    yard = Yard.of_stages(tmp_path, 2)
    with yard.behind_wan(1) as road, stages(yard, 2) as (first, second):
        values = torch.randn(64, 1000)
        first.neighbours.send_activation(0, values)
        assert torch.equal(second.neighbours.receive_activation(0), values)
        road.cut_after(50_000)
        first.neighbours.send_activation(1, values + 1)
        until(lambda: not any(state.connected for state in first.link.states().values()), "the cut is noticed")
        road.heal()
        assert torch.equal(second.neighbours.receive_activation(1), values + 1)


def test_a_step_that_waits_for_a_stage_out_of_reach_says_so_until_the_link_returns(tmp_path: Path) -> None:
    yard = Yard.of_stages(tmp_path, 2)
    with yard.behind_wan(1) as road, stages(yard, 2) as (first, second):
        meeting = Meeting(SoloExchange(0, Authority(1, 0, 0)), second.link, stages=second.neighbours)
        watch = Watch(meeting, Journal(10, 0.0))
        training = Status(home=1, activity=Activity.TRAINING)
        values = torch.randn(64, 1000)
        first.neighbours.send_activation(0, values)
        assert torch.equal(second.neighbours.receive_activation(0), values)
        road.cut_after(50_000)
        first.neighbours.send_activation(1, values)
        until(lambda: not any(state.connected for state in second.link.states().values()), "the cut is noticed")
        assert watch.live(training).activity is Activity.TRAINING, "nothing waits for the link yet"
        waits = threading.Thread(target=second.neighbours.receive_activation, args=(1,), daemon=True)
        waits.start()
        until(lambda: watch.live(training).activity is Activity.WAITING, "the wait is told")
        assert watch.live(training).progress.waiting_for_stages == (0,)
        assert watch.live(training).progress.waiting_since is not None
        road.heal()
        waits.join(DEADLINE)
        assert watch.live(training) == replace(training, progress=watch.live(training).progress, term=0, view=0)
        assert watch.live(training).progress.waiting_for_stages == ()


def test_what_can_not_be_expected_is_an_error_that_names_the_peer(tmp_path: Path) -> None:
    with stages(Yard.of_stages(tmp_path, 2), 2) as (first, second):
        for head, body in ((b"", b""), (b"\0" * 14, b"1234567"), (b"\xff" * 14, b""), (b"\0" * 40, b"")):
            first.link.send(PEERS[1], Message(MessageType.ACTIVATION, head, body))
            with pytest.raises(StageFault, match="replica 0 stage 0"):
                second.neighbours.receive_activation(0)
        first.neighbours.send_activation(3, torch.zeros(2))
        with pytest.raises(StageFault, match=r"of micro-batch 3; expected .* of micro-batch 0"):
            second.neighbours.receive_activation(0)
        first.link.send(PEERS[1], Message(MessageType.TOTALS, b"\0" * 8, b"\0" * 24))
        with pytest.raises(StageFault, match="sums of 24 bytes; expected 16"):
            second.leaders.sums(torch.zeros(2, dtype=torch.float64))
