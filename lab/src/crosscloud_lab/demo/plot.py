"""A picture of the run: loss, and WAN use beside what dense fp32 would have cost."""

from __future__ import annotations

from pathlib import Path

from crosscloud_lab.demo.follow import Story


def draw(story: Story, path: Path) -> Path:
    """Writes a PNG of two plots over the seconds since the job was applied."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = story.reported
    seconds = [sample.seconds for sample in rows]
    figure, (loss, wan) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    loss.plot(seconds, [sample.loss for sample in rows], color="#3b6fb6", marker="o", markersize=3)
    loss.set(title="Training loss", xlabel="seconds since `kubectl apply`", ylabel="nats per byte")
    wan.plot(
        seconds,
        [sample.dense_bytes / 1e6 for sample in rows],
        color="#b0b0b0",
        label="fp32 all-reduce at every step (computed)",
    )
    wan.plot(seconds, [sample.wan_bytes / 1e6 for sample in rows], color="#d1495b", label="sent (at the interface)")
    wan.set(
        title="Bytes over the WAN, both ways",
        xlabel="seconds since `kubectl apply`",
        ylabel="MB",
        yscale="log",
    )
    wan.legend()
    for axes in (loss, wan):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
