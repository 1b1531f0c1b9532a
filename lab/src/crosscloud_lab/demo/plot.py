"""A picture of the run: loss by step, and WAN use beside what dense fp32 would have cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosscloud_lab.demo.follow import Sample, Story, megabytes

BLUE, ORANGE, RED, GREY = "#2f5d9b", "#e08214", "#c23b4e", "#8c8c8c"


def draw(story: Story, path: Path) -> Path:
    """Writes a PNG of two plots: losses over inner steps, and bytes over the seconds since the job was applied."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (loss, wan) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    every = int(story.job["spec"]["sync"]["innerSteps"])
    _losses(loss, story, every)
    _bytes(wan, story, every)
    for axes in (loss, wan):
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def rounds(samples: list[Sample], every: int) -> list[Sample]:
    """The sample that first saw each round's last inner step; the status tells of a round only once it is settled."""
    found: list[Sample] = []
    for item in samples:
        if item.progress.step >= (len(found) + 1) * every:
            found.append(item)
    return found


def counted(samples: list[Sample]) -> list[tuple[float, int]]:
    """Seconds and bytes in fp32, where each number was first seen: replicas count at rounds, between which the last one
    only repeats itself.
    """
    found: dict[int, float] = {}
    for item in samples:
        if item.progress.dense_bytes:
            found.setdefault(item.progress.dense_bytes, item.seconds)
    return [(seconds, size) for size, seconds in found.items()]


def validations(samples: list[Sample], every: int) -> list[tuple[int, float]]:
    """Step and value of each evaluation. The mean is seen to change with each replica that has evaluated; the last
    value before the next evaluation has them all.
    """
    found: dict[int, float] = {}
    for item in samples:
        value = item.progress.validation_loss
        if value is not None and item.progress.step >= every:
            found[item.progress.step // every * every] = value
    return sorted(found.items())


def _losses(axes: Any, story: Story, every: int) -> None:
    for item in rounds(story.samples, every):
        axes.axvline(item.progress.step, color=GREY, linewidth=0.7, alpha=0.4)
    points = [(row.progress.step, row.progress.loss) for row in story.trained]
    axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.8, label="training, mean of 10 steps")
    if evaluated := validations(story.samples, int(story.job["spec"]["training"]["evaluateEvery"])):
        axes.plot(
            *zip(*evaluated, strict=True), "o", color=ORANGE, markersize=6, label="validation, on text kept apart"
        )
    axes.plot([], [], color=GREY, linewidth=0.7, label="a round: the replicas exchange")
    axes.set(xlabel="inner step", ylabel="nats per byte")
    axes.legend(frameon=False)
    axes.set_title("Loss, mean of the replicas", loc="left", fontweight="bold")


def _bytes(axes: Any, story: Story, every: int) -> None:
    last = story.samples[-1]
    low, high = last.wan_bytes / 1e6, last.progress.dense_bytes / 1e6
    for item in rounds(story.samples, every):
        axes.axvline(item.seconds, color=GREY, linewidth=0.7, alpha=0.4)
    dense = [(seconds, size / 1e6) for seconds, size in counted(story.samples)]
    sent = [(row.seconds, row.wan_bytes / 1e6) for row in story.samples if row.wan_bytes >= 1e5]
    label = f"in fp32 at every step, computed: {megabytes(last.progress.dense_bytes)}"
    axes.plot(*zip(*dense, strict=True), color="#606060", linewidth=1.8, linestyle="--", label=label)
    label = f"sent, counted at the interface: {megabytes(last.wan_bytes)}"
    axes.plot(*zip(*sent, strict=True), color=RED, linewidth=1.8, label=label)
    ends = (last.seconds, low), (last.seconds, high)
    axes.annotate("", *ends, arrowprops={"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0})
    axes.annotate(
        f"{high / max(low, 1e-6):.0f} times less", (last.seconds, (low * high) ** 0.5), xytext=(-8, 0),
        textcoords="offset points", ha="right", va="center", fontweight="bold",
    )  # fmt: skip
    axes.set(xlabel="seconds since `kubectl apply`", ylabel="MB", yscale="log")
    axes.set_ylim(bottom=0.1)  # room for the legend below the curves
    axes.legend(frameon=False, loc="lower right")
    axes.set_title("Bytes over the WAN, both ways", loc="left", fontweight="bold")
