"""What the stages of one replica send each other over the link: activations, their gradients, and sums.

    ACTIVATION, GRADIENT   head: pass u64 | micro-batch u32 | kind of values u8 | dimensions u8 | each dimension u32
                           body: the values, encoded; empty where one of them isn't finite
    TOTALS                 head: call u64; body: fp64 values, little endian

Big-endian heads. A link brings messages of one kind in the order in which they were sent, over broken connections too,
so pass and call only prove that both ends count alike.
"""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from crosscloud_trainer.compress import Codec
from crosscloud_trainer.compress.codec import Lengths, PayloadError, check_payload, encodable
from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.link import Link, LinkError, Message, MessageType, RankId
from crosscloud_trainer.link.mail import Mail
from crosscloud_trainer.sizes import CELL_ELEMENTS

_HEAD = struct.Struct("!QIBB")
_CALL = struct.Struct("!Q")
_KINDS = (torch.float32, torch.bfloat16)
_MOST_DIMENSIONS = 4


class StageFault(LinkError):
    """What a rank of another stage sent can't be what is expected."""

    exit_code = ExitCode.DIVERGED


@dataclass(frozen=True)
class Boundary:
    """The rank on the other side of a stage boundary, and how values cross it: None sends them as they are."""

    peer: RankId
    codec: Codec | None = None


class StageLink:
    """This rank's ends of the boundaries before and after its stage; `waited` is the seconds it has waited there."""

    def __init__(
        self,
        link: Link,
        mail: Mail,
        before: Boundary | None,
        after: Boundary | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._mail, self._clock = link, mail, clock
        self._before, self._after = before, after
        self._passes: Counter[MessageType] = Counter()
        self._taken: Counter[tuple[MessageType, RankId]] = Counter()
        self.waited = 0.0
        for boundary in (before, after):
            if boundary is not None:
                link.connect(boundary.peer)

    @property
    def awaited_since(self) -> float | None:
        """Since when, in seconds since 1970, this rank waits for a word of another stage; any thread may ask."""
        return self._mail.stage_awaited_since

    def send_activation(self, micro_batch: int, values: torch.Tensor) -> None:
        self._send(_given(self._after), MessageType.ACTIVATION, micro_batch, values)

    def receive_activation(self, micro_batch: int) -> torch.Tensor:
        return self._receive(_given(self._before), MessageType.ACTIVATION, micro_batch)

    def send_gradient(self, micro_batch: int, values: torch.Tensor) -> None:
        self._send(_given(self._before), MessageType.GRADIENT, micro_batch, values)

    def receive_gradient(self, micro_batch: int) -> torch.Tensor:
        return self._receive(_given(self._after), MessageType.GRADIENT, micro_batch)

    def _send(self, boundary: Boundary, kind: MessageType, micro_batch: int, values: torch.Tensor) -> None:
        self._passes[kind] += 1
        dimensions = struct.pack(f"!{values.dim()}I", *values.shape)
        head = _HEAD.pack(self._passes[kind], micro_batch, _KINDS.index(values.dtype), values.dim()) + dimensions
        self._link.send(boundary.peer, Message(kind, head, _encoded(values, boundary.codec)))

    def _receive(self, boundary: Boundary, kind: MessageType, micro_batch: int) -> torch.Tensor:
        began = self._clock()
        message = self._mail.from_stage(boundary.peer, kind)
        self.waited += self._clock() - began
        place = (kind, boundary.peer)
        self._taken[place] += 1
        values, number, told = _decoded(message, boundary)
        if (number, told) != (self._taken[place], micro_batch):
            expected = f"{self._taken[place]} of micro-batch {micro_batch}"
            raise StageFault(f"{boundary.peer}: {kind.name} {number} of micro-batch {told}; expected {expected}")
        return values


class StageLeaders:
    """The first ranks of all stages of a replica add up what concerns the whole replica."""

    def __init__(self, link: Link, mail: Mail, leaders: Sequence[RankId]) -> None:
        """`leaders` are those of all stages, in order; this rank is one of them."""
        self._link, self._mail, self._leaders = link, mail, leaders
        self._calls = 0
        for leader in leaders:
            if leader != link.me.rank:
                link.connect(leader)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sums over the stages, added in their order, so that all get the same bits."""
        self._calls += 1
        mine = values.detach().cpu().numpy().astype("<f8")
        for leader in self._leaders:
            if leader != self._link.me.rank:
                self._link.send(leader, Message(MessageType.TOTALS, _CALL.pack(self._calls), mine.tobytes()))
        total = np.zeros(len(mine))
        for leader in self._leaders:
            total += mine if leader == self._link.me.rank else self._from(leader, len(mine))
        return torch.from_numpy(total).to(values.device)

    def _from(self, leader: RankId, count: int) -> NDArray[np.float64]:
        message = self._mail.from_stage(leader, MessageType.TOTALS)
        if len(message.head) != _CALL.size or len(message.body) != 8 * count:
            raise StageFault(f"{leader}: sums of {len(message.body)} bytes; expected {8 * count}")
        (call,) = _CALL.unpack(message.head)
        if call != self._calls:
            raise StageFault(f"{leader}: sums of call {call}; expected call {self._calls}")
        return np.frombuffer(message.body, dtype="<f8")


def _given(boundary: Boundary | None) -> Boundary:
    assert boundary is not None, "the first stage has none before it, the last none after it"
    return boundary


def _lengths(count: int) -> Lengths:
    """Values as cells, end to end."""
    whole, rest = divmod(count, CELL_ELEMENTS)
    return np.array([CELL_ELEMENTS] * whole + [rest] * bool(rest), dtype=np.int64)


def _encoded(values: torch.Tensor, codec: Codec | None) -> memoryview:
    flat = values.detach().cpu().contiguous().view(-1)
    if codec is None:
        return flat.view(torch.uint8).numpy().data
    if not encodable(flat):
        return memoryview(b"")
    return codec.encode(flat.float(), _lengths(flat.numel())).numpy().data


def _decoded(message: Message, boundary: Boundary) -> tuple[torch.Tensor, int, int]:
    """(values, pass, micro-batch)."""
    try:
        number, micro_batch, kind, dimensions = _HEAD.unpack_from(message.head)
        if kind >= len(_KINDS) or dimensions > _MOST_DIMENSIONS:
            raise StageFault(f"{boundary.peer}: values of kind {kind} in {dimensions} dimensions")
        shape = struct.unpack(f"!{dimensions}I", message.head[_HEAD.size :])
    except struct.error as fault:
        raise StageFault(f"{boundary.peer}: a head of {len(message.head)} bytes") from fault
    dtype, count = _KINDS[kind], math.prod(shape)
    data = torch.empty(len(message.body), dtype=torch.uint8)
    data.numpy()[:] = np.frombuffer(message.body, dtype=np.uint8)
    if boundary.codec is None:
        if len(data) != count * dtype.itemsize:
            raise StageFault(f"{boundary.peer}: {len(data)} bytes of values of shape {shape}")
        return data.view(dtype).view(shape), number, micro_batch
    if not len(data) and count:
        return torch.full(shape, torch.nan, dtype=dtype), number, micro_batch
    try:
        check_payload(boundary.codec, data, _lengths(count))
    except PayloadError as fault:
        raise StageFault(f"{boundary.peer}: {fault}") from fault
    return boundary.codec.decode(data, _lengths(count)).to(dtype).view(shape), number, micro_batch
