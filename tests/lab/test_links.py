"""WAN links: rate, cut, heal and byte counters, with real TCP connections between pods."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from lab.pods import Bench, pod, service
from waiting import eventually

from crosscloud_lab.errors import LabError
from crosscloud_lab.lab import Lab

RECEIVE = "touch /tmp/got; exec nc -ll -p 8080 -e sh -c 'cat >> /tmp/got'"
SLEEP = "sleep 100000"


@pytest.fixture
def wan(lab: Lab) -> Iterator[Bench]:
    """A pod `sends` in east, and `receives` in west behind a node port that writes what arrives to /tmp/got."""
    bench = Bench(lab)
    port = service("receives", "receives", 8080, type="NodePort")
    bench.create("west", port, pod("receives", RECEIVE, node="west-0"))
    bench.create("east", pod("sends", SLEEP))
    yield bench
    lab.heal()
    lab.set_rate("east", "west", "20mbit")
    lab.set_rate("hub", "west", "unlimited")
    bench.remove()


def received(bench: Bench) -> int:
    return int(bench.sh("west", "receives", "wc -c < /tmp/got"))


def target(bench: Bench) -> str:
    """Address and port in west, as seen from east."""
    return f"{bench.lab.plan.cluster('west').api_address} {bench.node_port('west', 'receives')}"


def send(bench: Bench, count: int) -> float:
    """Sends `count` bytes from east to west; seconds until all have arrived."""
    before, started = received(bench), time.monotonic()
    bench.sh("east", "sends", f"head -c {count} /dev/zero | nc {target(bench)}")
    eventually(lambda: received(bench) >= before + count, f"{count} bytes in west", seconds=240)
    return time.monotonic() - started


def test_a_link_carries_no_more_than_its_rate_and_its_interface_counts_the_bytes(wan: Bench, lab: Lab) -> None:
    eventually(lambda: send(wan, 1), "the node port to answer")
    lab.set_rate("east", "west", "4mbit")
    before = lab.wan_bytes()
    seconds = send(wan, 2_000_000)
    after = lab.wan_bytes()
    assert seconds > 2_000_000 * 8 / 4e6 * 0.9
    there, back = (after[pair] - before[pair] for pair in (("east", "west"), ("west", "east")))
    assert 2_000_000 < there < 2_600_000
    assert 0 < back < 400_000
    assert after["hub", "east"] - before["hub", "east"] < 200_000


def test_a_rate_holds_over_later_commands_on_links(lab: Lab, wan: Bench) -> None:
    lab.set_rate("west", "east", "5mbit")
    lab.set_rate("hub", "west", "50mbit")
    lab.cut("east", "west")
    lab.heal()
    lab.up()
    assert {link.between: link.rate for link in lab.status().links} == {
        ("hub", "east"): "unlimited",
        ("hub", "west"): "50mbit",
        ("east", "west"): "5mbit",
    }
    for cluster, interface in (("east", "to-west"), ("west", "to-east")):
        shown = lab.cluster(cluster).sandbox.run(["tc", "-json", "qdisc", "show", "dev", interface])
        # tc counts in bytes per second.
        assert json.loads(shown)[0]["options"]["rate"] == 5_000_000 // 8


def test_a_cut_makes_an_open_connection_hang_in_silence_and_heal_lets_it_go_on(wan: Bench, lab: Lab) -> None:
    beat = f"(while :; do echo tick; echo tick >> /tmp/sent; usleep 50000; done) | nc {target(wan)}"
    wan.sh("east", "sends", f"({beat}; echo ended > /tmp/ended) >/dev/null 2>&1 &")

    def sent() -> int:
        return int(wan.sh("east", "sends", "wc -c < /tmp/sent"))

    eventually(lambda: received(wan) > 0, "the first beat in west")
    lab.cut("east", "west")
    settled = sent()
    eventually(lambda: sent() > settled + 50, "ten beats into the cut")
    arrived = received(wan)
    during = sent()
    eventually(lambda: sent() > during + 100, "twenty beats more")
    assert received(wan) == arrived
    assert wan.sh("east", "sends", "ls /tmp") == "sent\n", "the connection must not end"
    assert wan.lab.status().links[2].cut
    # East still reaches the hub: only the one link is cut.
    hub = lab.plan.cluster("hub").api_address
    assert "open" in wan.sh("east", "sends", f"nc -w 5 {hub} 6443 </dev/null && echo open")
    assert lab.heal("west", "east") == [("east", "west")]
    assert lab.heal() == [], "no other link was cut"
    owed = sent()
    eventually(lambda: received(wan) >= owed, "all beats of the cut in west", seconds=180)
    assert wan.sh("east", "sends", "ls /tmp") == "sent\n", "it must be the same connection"


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [("east", "north", "cluster 'north' is not in lab"), ("east", "east", "are the same cluster")],
)
def test_a_link_that_does_not_exist_is_refused(lab: Lab, a: str, b: str, said: str) -> None:
    with pytest.raises(LabError, match=said):
        lab.cut(a, b)
    with pytest.raises(LabError, match=said):
        lab.set_rate(a, b, "20mbit")
    with pytest.raises(LabError, match="'fast' is not a rate"):
        lab.set_rate("east", "west", "fast")
    with pytest.raises(LabError, match="name both clusters"):
        lab.heal("east")
