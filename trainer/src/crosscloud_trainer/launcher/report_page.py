"""A finished local run as one HTML file: plots as inline SVG, no script, nothing loaded from anywhere. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosscloud_trainer.launcher.state import RunState, Sample, Summary
from crosscloud_trainer.sizes import bytes_text

_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 40
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
_ACTIVITIES = {"compute": "#2ca02c", "exchange": "#1f77b4", "waiting": "#e0a100", "bubble": "#a05fc0"}

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem} h2{font-size:1.05rem;margin:.2rem 0}
.plots{display:flex;flex-wrap:wrap;gap:1.2rem} figure{margin:0}
table{border-collapse:collapse;margin:1rem 0} td{padding:.15rem 1.2rem .15rem 0;vertical-align:top}
td:first-child{opacity:.7}
svg text{font:12px system-ui,sans-serif;fill:currentColor} svg .axis{stroke:currentColor;opacity:.25}
svg .line{fill:none;stroke-width:1.8} svg{max-width:100%;height:auto}
"""


@dataclass(frozen=True)
class Line:
    """One curve; `points` are (x, y) in the units of the axes."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def report_page(state: RunState, summary: Summary) -> str:
    """The page of the last attempt of `state`."""
    loss = _losses(state)
    plots = [
        ("Loss by step", chart(loss["step"], "inner step", "loss")),
        ("Loss by time", chart(loss["time"], "seconds", "loss")),
        ("Bytes sent over the WAN", chart(_bytes(state), "inner step", "bytes", log=True)),
        ("Where the time went", shares_chart(state)),
    ]
    figures = "".join(f"<figure><h2>{html.escape(title)}</h2>{svg}</figure>" for title, svg in plots)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in facts(summary)
    )
    name = html.escape(summary.name)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>'
        f'<body><h1>{name}</h1><table>{rows}</table><div class="plots">{figures}</div></body></html>\n'
    )


def facts(summary: Summary) -> list[tuple[str, str]]:
    """The summary in words."""
    found = [("steps", f"{summary.steps:,}"), ("tokens", f"{summary.tokens:,}"), ("seconds", f"{summary.seconds:,.1f}")]
    if summary.first_loss is not None and summary.last_loss is not None:
        found.append(("training loss", f"{summary.first_loss:.4f} → {summary.last_loss:.4f}"))
    if summary.validation_loss is not None:
        found.append(("validation loss", f"{summary.validation_loss:.4f}"))
    if summary.best_validation_loss is not None:
        found.append(("lowest validation loss", f"{summary.best_validation_loss:.4f}, after step {summary.best_step}"))
    if summary.ratio is not None:
        sent, dense = bytes_text(summary.wan_bytes), bytes_text(summary.dense_bytes)
        found.append(("WAN", f"{sent} sent; in fp32 at every step: {dense}, {times(summary.ratio)} times as much"))
    if summary.digests_equal is not None:
        word = "equal in all replicas" if summary.digests_equal else "DIFFERENT"
        found.append(("digests", f"{word} after {summary.rounds} rounds"))
    found.append(("attempts", str(summary.attempts)))
    if summary.result is not None:
        found.append(("result", summary.result))
    return found


def _losses(state: RunState) -> dict[str, list[Line]]:
    lines: dict[str, list[Line]] = {"step": [], "time": []}
    for replica, samples in sorted(state.samples.items()):
        colour = _COLOURS[replica % len(_COLOURS)]
        for axis, made in lines.items():
            trained = [(_at(sample, axis), sample.loss) for sample in samples if sample.loss is not None]
            made.append(Line(f"replica {replica}", trained, colour))
            measured = _validations(samples, axis)
            if measured:
                made.append(Line(f"replica {replica}, validation", measured, colour, dashed=True))
    return lines


def _at(sample: Sample, axis: str) -> float:
    return float(sample.step) if axis == "step" else sample.seconds


def _validations(samples: Sequence[Sample], axis: str) -> list[tuple[float, float]]:
    """A point for each measurement: reports repeat the last one."""
    found: list[tuple[float, float]] = []
    last = None
    for sample in samples:
        if sample.validation_loss is not None and sample.validation_loss != last:
            last = sample.validation_loss
            found.append((_at(sample, axis), last))
    return found


def _bytes(state: RunState) -> list[Line]:
    """What each replica has sent, and what one of them would have."""
    lines = []
    for replica, samples in sorted(state.samples.items()):
        colour = _COLOURS[replica % len(_COLOURS)]
        sent = [(float(sample.step), float(sample.wan_bytes)) for sample in samples if sample.wan_bytes]
        lines.append(Line(f"replica {replica}", sent, colour))
    if any(line.points for line in lines):
        dense = [(float(s.step), float(s.dense_bytes)) for s in state.samples.get(0, []) if s.dense_bytes]
        lines.append(Line("in fp32 at every step", dense, "#888888", dashed=True))
    return lines


def chart(lines: Sequence[Line], x_name: str, y_name: str, *, log: bool = False) -> str:
    """An SVG of curves over common axes, a logarithmic y axis if asked for; a sentence where there is nothing."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return "<p>nothing was measured</p>"
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    x_marks, y_marks = _marks(min(xs), max(xs)), (_log_marks if log else _marks)(min(ys), max(ys))
    height = _HEIGHT + 18 * len(drawn)

    def across(x: float) -> float:
        return _LEFT + (x - x_marks[0]) / (x_marks[-1] - x_marks[0]) * _plot_width()

    def down(y: float) -> float:
        value, first, last = (math.log10(v) if log else v for v in (y, y_marks[0], y_marks[-1]))
        return _TOP + (last - value) / (last - first) * _plot_height()

    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">']
    text = (lambda value: bytes_text(round(value))) if y_name == "bytes" else number_text
    parts += _grid([(across(x), number_text(x)) for x in x_marks], [(down(y), text(y)) for y in y_marks], x_name)
    for line in drawn:
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line" stroke="{line.colour}"{dash} points="{points}"/>')
        if len(line.points) == 1:
            x, y = line.points[0]
            parts.append(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{line.colour}"/>')
    for number, line in enumerate(drawn):
        top = _HEIGHT + 12 + 18 * number
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<path class="line" stroke="{line.colour}"{dash} d="M{_LEFT} {top - 4}h28"/>')
        parts.append(f'<text x="{_LEFT + 36}" y="{top}">{html.escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def _plot_width() -> int:
    return _WIDTH - _LEFT - _RIGHT


def _plot_height() -> int:
    return _HEIGHT - _TOP - _BOTTOM


def _marks(low: float, high: float) -> list[float]:
    """Four to eight round numbers that enclose the values."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span))
    unit = next(size * part for part in (0.2, 0.5, 1.0, 2.0) if span / (size * part) <= 6)
    first, last = math.floor(low / unit), max(math.ceil(high / unit), math.floor(low / unit) + 1)
    return [number * unit for number in range(first, last + 1)]


def _log_marks(low: float, high: float) -> list[float]:
    """The same on a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone where those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    marks = [part * 10.0**power for power in powers for part in (1, 2, 5)]
    within = _enclosing(marks, low, high)
    return within if len(within) <= 7 else _enclosing([10.0**power for power in powers], low, high)


def _enclosing(marks: Sequence[float], low: float, high: float) -> list[float]:
    first = max(number for number, mark in enumerate(marks) if mark <= low)
    last = min(number for number, mark in enumerate(marks) if mark >= high and number > first)
    return list(marks[first : last + 1])


def _grid(xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], x_name: str) -> list[str]:
    """Lines at these places, and what stands at them."""
    bottom = _TOP + _plot_height()
    parts = []
    for x, shown in xs:
        parts.append(f'<path class="axis" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{shown}</text>')
    for y, shown in ys:
        parts.append(f'<path class="axis" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    middle = _LEFT + _plot_width() / 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{html.escape(x_name)}</text>')
    return parts


def times(ratio: float) -> str:
    """With a decimal where the number is small."""
    return f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"


def number_text(value: float) -> str:
    """Short, without noise of the binary form."""
    return f"{round(value, 9):,.6g}"


def shares_chart(state: RunState) -> str:
    """One bar for each replica, of the activities that took any time."""
    bars: list[tuple[str, Mapping[str, float]]] = []
    for replica in state.replicas:
        progress = state.progress(replica)
        if progress is None:
            continue
        known = {activity: seconds for activity, seconds in progress.seconds.items() if seconds}
        if known:
            bars.append((f"replica {replica}", known))
    if not bars:
        return "<p>nothing was measured</p>"
    height = 44 * len(bars) + 34
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">']
    for number, (name, spent) in enumerate(bars):
        top, x = 44 * number, float(_LEFT + 14)
        parts.append(f'<text x="0" y="{top + 20}">{html.escape(name)}</text>')
        for activity, seconds in spent.items():
            share = seconds / sum(spent.values())
            width = share * (_WIDTH - _LEFT - 14 - _RIGHT)
            label = f"{activity}: {seconds:,.1f} s, {share:.0%}"
            colour = _ACTIVITIES[activity]
            parts.append(f'<rect x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="26" fill="{colour}">')
            parts.append(f"<title>{label}</title></rect>")
            if width > 44:
                parts.append(f'<text x="{x + 6:.1f}" y="{top + 21}" style="fill:#fff">{share:.0%}</text>')
            x += width
    shown = [activity for activity in _ACTIVITIES if any(activity in spent for _, spent in bars)]
    for number, activity in enumerate(shown):
        x = _LEFT + 14 + 110 * number
        parts.append(f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{_ACTIVITIES[activity]}"/>')
        parts.append(f'<text x="{x + 18}" y="{height - 11}">{activity}</text>')
    return "".join([*parts, "</svg>"])
