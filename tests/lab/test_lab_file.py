"""The lab file: what is accepted, and how mistakes are told."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscloud_lab.errors import LabError, LabFileError
from crosscloud_lab.labfile import parse_lab, read_lab_file
from crosscloud_lab.spec import ClusterSpec, LabSpec, LinkSpec, PoolSpec, rate_bits
from crosscloud_lab.state import lab_document

A100 = "NVIDIA-A100-SXM4-80GB"


def findings(text: str) -> tuple[str, ...]:
    with pytest.raises(LabFileError) as caught:
        parse_lab(text)
    return caught.value.findings


def test_the_default_lab_is_a_hub_and_two_members_joined_by_a_slow_link() -> None:
    assert read_lab_file(None) == LabSpec(
        name="crosscloud",
        network=IPv4Network("10.77.0.0/16"),
        clusters=(
            ClusterSpec("hub", (PoolSpec(1, 0, ""),)),
            ClusterSpec("east", (PoolSpec(1, 4, A100),)),
            ClusterSpec("west", (PoolSpec(2, 2, A100),)),
        ),
        links=(LinkSpec(("east", "west"), "20mbit"),),
    )


def test_a_cluster_needs_a_name_and_one_node_only() -> None:
    lab = parse_lab("clusters: [{name: solo, nodes: [{}]}]")
    assert lab.clusters == (ClusterSpec("solo", (PoolSpec(1, 0, ""),)),)


def test_all_mistakes_are_told_at_once_with_path_value_and_what_is_allowed() -> None:
    found = findings(
        """
        name: Bad_Name
        network: 10.244.7.0/24
        colour: red
        clusters:
        - name: east
          nodes: [{count: 0, gpus: 2}, {gpus: -1, gpu: 'not a product!'}]
        - name: east
          nodes: []
        links:
        - {between: [east, north], rate: 20mbit}
        - {between: [east, east], rate: fast}
        """
    )
    expected = [
        ("colour", "unknown field", "name, network, clusters, links"),
        ("name", "'Bad_Name'", "lower-case"),
        ("network", "'10.244.7.0/24'", "10.244.0.0/16"),
        ("clusters[0].nodes[0].count", "0", "from 1 to 16"),
        ("clusters[0].nodes[0].gpu", "''", "NVIDIA-A100-SXM4-80GB"),
        ("clusters[0].nodes[1].gpus", "-1", "from 0 to 64"),
        ("clusters[0].nodes[1].gpu", "'not a product!'", "NVIDIA-A100-SXM4-80GB"),
        ("clusters[1].nodes", "0 entries", "1 to 16"),
        ("clusters", "east twice", "each one once"),
        ("links[0].between", "'north'", "two different clusters out of east"),
        ("links[1].between", "'east', 'east'", "two different clusters"),
        ("links[1].rate", "'fast'", "20mbit"),
    ]
    for path, value, allowed in expected:
        assert any(f.startswith(f"{path}:") and value in f and allowed in f for f in found), (path, found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a mapping with name, network, clusters, links"),
        ("[1, 2]", "a mapping with"),
        ("clusters: 7", "a list of 1 to 16 entries"),
        ("clusters: [{name: a, nodes: [{count: yes}]}]", "a whole number"),
        ("clusters: [{name: a, nodes: [{count: true}]}]", "a whole number"),
        ("{network: 10.9.0.0/24, clusters: [{name: a, nodes: [{}]}]}", "256 addresses"),
        ("{network: 10.9.0.1/16, clusters: [{name: a, nodes: [{}]}]}", "an IPv4 range"),
        ("{network: 7, clusters: [{name: a, nodes: [{}]}]}", "an IPv4 range"),
        ("clusters: [{name: a-name-too-long, nodes: [{}]}]", "at most 12"),
        ("clusters: [{name: a, nodes: [{count: 9}, {count: 9}]}]", "at most 16 nodes"),
        ("clusters: [{name: a, nodes: [{gpu: A100}]}]", "at least 1"),
        ("clusters: [", "while parsing"),
        ("{name: a, name: b}", "duplicate key"),
        ("[" * 5000, "recursion"),
        ("name: 2026-13-41", "month"),
        ("name: " + "9" * 5000, "digits"),
    ],
)
def test_a_mistake_is_told_in_words_not_by_a_traceback(text: str, said: str) -> None:
    assert any(said in finding for finding in findings(text)), findings(text)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"nowhere.yaml can't be read: No such file"):
        read_lab_file(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LabError, match="not UTF-8"):
        read_lab_file(tmp_path / "binary.yaml")


def test_rates_are_decimal_bits_per_second() -> None:
    assert [rate_bits(text) for text in ("20mbit", "1.5gbit", "300kbit", "unlimited")] == [
        20_000_000,
        1_500_000_000,
        300_000,
        None,
    ]


@pytest.mark.parametrize("text", ["", "20", "20Mbit", "-1mbit", "0mbit", "1e3mbit", "20 mbit", "101gbit", "20mbit\n"])
def test_a_wrong_rate_names_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="at most 100gbit, or unlimited"):
        rate_bits(text)


names = st.from_regex(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True)
pools = st.one_of(
    st.builds(PoolSpec, st.integers(1, 8), st.just(0), st.just("")),
    st.builds(PoolSpec, st.integers(1, 8), st.integers(1, 64), st.just(A100)),
)


@st.composite
def labs(draw: st.DrawFn) -> LabSpec:
    cluster_names = draw(st.lists(names, min_size=2, max_size=5, unique=True))
    clusters = tuple(ClusterSpec(name, tuple(draw(st.lists(pools, min_size=1, max_size=2)))) for name in cluster_names)
    rate = draw(st.sampled_from(["20mbit", "1gbit", "unlimited"]))
    links = (LinkSpec((cluster_names[0], cluster_names[1]), rate),)
    return LabSpec(draw(names), IPv4Network("10.9.0.0/16"), clusters, links)


@given(labs())
def test_what_is_written_down_is_read_back_as_the_same_lab(lab: LabSpec) -> None:
    import json

    assert parse_lab(json.dumps(lab_document(lab))) == lab
