"""One rank as a process of its own: a round over the link, told on standard output as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from membership.field import INDEX, codec, holders, run_document, update

from crosscloud_trainer.compress import EncodedCells, Reducer
from crosscloud_trainer.exchange import RoundRequest
from crosscloud_trainer.link import Authority, Link
from crosscloud_trainer.membership.exchange import LinkExchange
from crosscloud_trainer.topology import own_cells

BODIES = ("payload", "result")  # handshakes, heartbeats and acknowledgements are on their way at any moment


def main(folder: Path, replica: int) -> None:
    run, used = run_document([1, 1]), codec("Int8")
    mine = holders(1)
    owned = own_cells(INDEX, (0, 1), mine, replica, 0)
    with Link(
        0, folder / f"tls-{replica}", folder / "peers.json", {"run document": run.digest()}, Authority(1, 0, 0)
    ) as link:
        reducer = Reducer(used, INDEX, owned, error_feedback=True)
        exchange = LinkExchange(link, run, INDEX, used, mine, replica, 0, reducer)
        exchange.connect(200)
        digests = []
        for number in (1, 2, 3):
            ids = mine.held(0)
            lengths = INDEX.lengths(ids)
            payload = EncodedCells(used, ids, lengths, used.encode(update(replica, number), lengths))
            answer = exchange.exchange(RoundRequest(number, 100 + replica, payload, digest=7))
            exchange.prepared(number)
            assert answer.result is not None
            digests.append(hashlib.sha256(answer.result.buffer()).hexdigest())
        exchange.settle(200)
        [peer] = link.traffic()
        bodies = {way: [count[kind] for kind in BODIES] for way, count in (("out", peer.sent), ("in", peer.received))}
        print(json.dumps({"results": digests, "settled": exchange.settled_round, "bytes": bodies}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
