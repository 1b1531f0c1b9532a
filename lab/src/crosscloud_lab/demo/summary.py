"""What the demo tells at its end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from crosscloud_lab.demo.follow import Story, megabytes, where
from crosscloud_lab.demo.steps import Written
from crosscloud_lab.lab import Lab


def summarise(console: Console, story: Story, written: Written, picture: Path) -> bool:
    """Facts of the run: places, loss, speed, bytes at the interface against dense fp32, digests, what it writes.

    False where the replicas' weights are not the same.
    """
    status, last = story.status, story.samples[-1]
    progress = status["progress"]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in status["replicaStatuses"]:
        table.add_row(f"replica {row['index']} ran in", where(status, row["index"]))
    table.add_row("training loss", f"{progress['firstLoss']} at the start, {progress['loss']} at the end")
    table.add_row("validation loss", str(progress.get("validationLoss", "-")))
    table.add_row("speed", f"{mean_speed(story):.0f} tokens/s on this machine's processors")
    dense = last.progress.dense_bytes
    ratio = dense / max(last.wan_bytes, 1)
    table.add_row("WAN, counted at the interface", megabytes(last.wan_bytes))
    table.add_row("in fp32, exchanged at every step", f"{megabytes(dense)}: {ratio:.0f} times as much")
    digests = {row["index"]: row.get("digest") for row in status["replicaStatuses"]}
    same = len(set(digests.values())) == 1 and None not in digests.values()
    word = "equal" if same else "[bold red]DIFFERENT[/]"
    table.add_row("weights of the replicas", f"{word}: digest {', '.join(map(str, digests.values()))}")
    table.add_row("picture", str(picture))
    table.add_row("result", status["result"]["uri"])
    console.print(Panel(table, title="One model, trained in two clusters", title_align="left", expand=False))
    text = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    text.add_row("we wrote", Text(written.prompt, style="bold"))
    text.add_row("it went on", Text(written.continuation))
    title = f"What it writes after {last.progress.tokens:,} tokens: the shape of Python, not yet its sense"
    console.print(Panel(text, title=title, title_align="left", expand=False))
    return same


def mean_speed(story: Story) -> float:
    """Tokens per second of the whole job, from the first report of a step to the last."""
    first, last = story.trained[0], story.trained[-1]
    return (last.progress.tokens - first.progress.tokens) / max(last.seconds - first.seconds, 1e-9)


def goodbye(console: Console, lab: Lab) -> None:
    """The lab stays up: how to look around, cut the link, and clean up."""
    kubectl, hub = lab.binary("kubectl"), lab.kubeconfig("hub")
    console.print(
        f"""
The clusters are still up. Look around:
  export KUBECONFIG={hub}
  alias kubectl={kubectl}
  kubectl get cctj,mcl -A
  kubectl describe cctj tiny-llama -n ml

Cut the link while a longer job trains: both replicas end their window, pause at the round and
say so; after `heal` they go on, and their digests are equal. Watch in a second terminal.
  kubectl apply -f examples/long.yaml
  kubectl get cctj -n ml -w                    # in the second terminal; wait for Training
  .venv/bin/crosscloud-lab cut east west       # Status becomes WaitingForPeers
  .venv/bin/crosscloud-lab heal

Clean up:
  make down
""",
        markup=False,
    )
