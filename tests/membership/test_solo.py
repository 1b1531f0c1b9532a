from __future__ import annotations

import torch
from membership.field import INDEX, codec, holders, update

from crosscloud_trainer.compress import EncodedCells
from crosscloud_trainer.exchange import RoundExchange, RoundRequest
from crosscloud_trainer.link import Authority
from crosscloud_trainer.membership.solo import SoloExchange


def test_a_replica_that_is_alone_gets_its_own_update_back() -> None:
    alone: RoundExchange = SoloExchange(3, Authority(1, 1, 1))
    ids, none = holders(1).held(0), codec("None")
    lengths = INDEX.lengths(ids)
    payload = EncodedCells(none, ids, lengths, none.encode(update(3, 1), lengths))
    answer = alone.exchange(RoundRequest(1, 9, payload, digest=4))
    assert answer.result is not None
    assert torch.equal(answer.result.decode(), update(3, 1))
    assert (answer.weights, answer.digests) == ({3: 9}, {3: 4})
    alone.prepared(1)
    assert isinstance(alone, SoloExchange)
    assert alone.settled_round == 1
    assert alone.waiting() is None
