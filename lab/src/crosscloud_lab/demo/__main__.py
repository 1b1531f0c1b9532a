"""`python -m crosscloud_lab.demo`: the story, top to bottom."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from crosscloud_lab import preflight
from crosscloud_lab.builds import build_all
from crosscloud_lab.demo import steps
from crosscloud_lab.demo.follow import JobEndedBadly, follow
from crosscloud_lab.demo.plot import draw
from crosscloud_lab.demo.summary import goodbye, summarise
from crosscloud_lab.errors import LabError, PreflightError, in_words
from crosscloud_lab.images import load_images
from crosscloud_lab.lab import Lab
from crosscloud_lab.labfile import read_lab_file
from crosscloud_lab.progress import default_progress
from crosscloud_lab.shell import interrupt_when_asked_to_end

MANIFEST = Path("examples/demo.yaml")
OUT = Path("demo")


def main() -> int:
    """Exit code 0 when the job succeeded and its replicas' weights are equal. What is there already is used again."""
    interrupt_when_asked_to_end()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    try:
        return _run(console)
    except PreflightError as fault:
        console.print(f"demo: {fault}", markup=False)
        return 1
    except (LabError, JobEndedBadly, OSError) as fault:
        console.print(f"\n[bold red]demo: {escape(in_words(fault))}[/]")
        console.print("The lab stays up for a look; run `make demo` again to go on, or `make down` to clean up.")
        return 1
    except KeyboardInterrupt:
        console.print("\ndemo: interrupted. Run `make demo` again to go on, or `make down` to clean up.")
        return 130


def _run(console: Console) -> int:
    preflight.require_root()
    OUT.mkdir(exist_ok=True)
    phases = steps.Phases(console, total=7)
    progress = default_progress()
    lab = Lab(read_lab_file(None), progress)
    with phases("builds: Kubernetes from its Go modules, and the images from the Dockerfile; what the cache lacks"):
        lab.check()
        images = build_all(Path.cwd(), progress)
    with phases("clusters: hub, east and west, each a whole Kubernetes"):
        lab.up()
        load_images(lab, images, progress)
    with phases("operator: helm install on the hub"):
        steps.install_operator(lab, images)
    with phases("members: crosscloud member add east, west"):
        steps.add_members(lab, ["east", "west"])
    with phases(f"job: kubectl apply -f {MANIFEST}"):
        steps.prepare_namespace(lab, ["hub", "east", "west"])
        steps.apply_job(lab, MANIFEST)
    with phases(
        "training: two replicas of two stages, one inside east, one over both; compressed exchange between clusters"
    ):
        story = follow(lab, "ml", "tiny-llama", console)
    with phases("result: crosscloud fetch, and a few lines from the model"):
        written = steps.fetch_and_generate(lab, "ml", "tiny-llama", OUT / "model")
        picture = draw(story, OUT / "loss-and-wan.png")
    same = summarise(console, story, written, picture)
    goodbye(console, lab)
    return 0 if same else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
