"""The page of a finished run: what is drawn follows from the reports, and nothing is loaded from elsewhere."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from trainer.jobs import manifest, written
from trainer.test_display import report

from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.report_page import Line, chart, report_page, shares_chart
from crosscloud_trainer.launcher.state import RunState, Summary


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    """Two replicas, 8 steps of two seconds each; replica 1 waits for the other."""
    now = [100.0]
    made = RunState(read_manifest(written(tmp_path, manifest())), tmp_path, clock=lambda: now[0])
    made.next_attempt()
    for step in range(1, 9):
        now[0] += 2
        for replica in (0, 1):
            sent = {"wan_bytes_sent": 1000 * step, "dense_bytes": 100_000 * step}
            spent = {"compute_seconds": 1.5 * step, "exchange_seconds": 0.5 * step, "waiting_seconds": 2.0 * replica}
            loss = {"loss": 5.0 - step / 4, "first_loss": 4.75, "validation_loss": 4.5 if step < 5 else 3.5}
            made.see(replica, report(replica, step, **sent, **spent, **loss))
    return made


def test_the_page_is_whole_and_asks_no_network_for_anything(state: RunState) -> None:
    page = report_page(state, Summary.of(state))
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n").replace('<meta charset="utf-8">', ""))
    assert [heading.text for heading in root.iter("h2")] == [
        "Loss by step",
        "Loss by time",
        "Bytes sent over the WAN",
        "Where the time went",
    ]
    assert not re.search(r"https?:|<script|<link|<img|url\(", page)
    assert "4.7500 → 3.0000" in page
    assert "16.0 kB sent; in fp32 at every step: 1.6 MB, 100 times as much" in page


def test_a_name_can_not_bring_markup_into_the_page(state: RunState) -> None:
    state.manifest = type(state.manifest)("<b>&", "default", state.manifest.spec)
    assert "<h1>&lt;b&gt;&amp;</h1>" in report_page(state, Summary.of(state))


def points(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in found]  # type: ignore[misc]


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_where_their_values_are_on_the_axes(log: bool) -> None:
    values = [(0.0, 1.0), (5.0, 10.0), (10.0, 1000.0)]
    svg = chart([Line("a", values, "#000")], "x", "y", log=log)
    (line,) = points(svg)
    heights = [math.log10(y) if log else y for _, y in values]
    share = (line[1][1] - line[0][1]) / (line[2][1] - line[0][1])
    assert share == pytest.approx((heights[1] - heights[0]) / (heights[2] - heights[0]), abs=0.01)
    assert (line[1][0] - line[0][0]) / (line[2][0] - line[0][0]) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("values", [[], [(3.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, 2.0), (1.0, 2.0)]])
def test_few_and_equal_values_are_drawn_too(values: list[tuple[float, float]]) -> None:
    svg = chart([Line("a", values, "#000")], "x", "y")
    assert ("nothing was measured" in svg) == (not values)
    assert all(math.isfinite(part) for line in points(svg) for point in line for part in point)


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ((150e3, 18e6), ["100.0 kB", "1.0 MB", "10.0 MB", "100.0 MB"]),
        ((1.5e6, 9e6), ["1.0 MB", "2.0 MB", "5.0 MB", "10.0 MB"]),
        ((1e6, 1e6), ["1.0 MB", "2.0 MB"]),
    ],
)
def test_a_logarithmic_axis_has_round_numbers_that_enclose_the_values(
    values: tuple[float, float], marks: list[str]
) -> None:
    svg = chart([Line("a", list(enumerate(values)), "#000")], "x", "bytes", log=True)
    shown = re.findall(r'<text x="56" y="[0-9.]+" text-anchor="end">([^<]*)</text>', svg)
    assert shown == marks


def test_the_bars_of_time_have_the_replicas_shares(state: RunState) -> None:
    svg = shares_chart(state)
    assert "compute: 12.0 s, 75%" in svg
    assert "waiting: 2.0 s, 11%" in svg


def test_the_time_left_follows_the_slowest_replica(state: RunState) -> None:
    assert state.seconds_left() == 0
    state.see(0, report(0, 9, step=4))
    assert state.seconds_left() == pytest.approx((16 - 2) / (4 - 1) * 4)
