"""The command `crosscloud-trainer`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.failures import Failure


def _explained(action: Callable[[], int | None]) -> None:
    """Run a command; a failure is its message on stderr and its exit code, never a traceback."""
    try:
        code = action() or ExitCode.SUCCEEDED
    except Failure as failure:
        click.echo(f"error: {failure}", err=True)
        code = failure.code
    except OSError as fault:  # a full disk, a folder that is a file, an output that nobody reads any more
        click.echo(f"error: {fault.filename or 'output'}: {fault.strerror or fault}", err=True)
        code = 1
        sys.stdout = None  # or its last flush would fail once more
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="crosscloud-trainer", prog_name="crosscloud-trainer")
def main() -> None:
    """Train one model over several clusters.

    In a cluster the operator starts `pod`; on one machine begin with `local`.
    """


@main.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines instead of a display.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for result and logs [default: ./crosscloud-runs/NAME]."
)
@click.option("--keep", is_flag=True, help="Keep the run's working folder: documents, certificates, reports.")
@click.option("--link", metavar="RATE", help="Shape the links between replicas, each way: 20mbit, 512kbit, 1gbit.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of an earlier run in the same folder.")
@click.option("--overwrite", is_flag=True, help="Begin anew where an earlier run in the same folder could go on.")
@click.option(
    "--storage",
    metavar="ADDRESS",
    help="Where checkpoints and result go, an fsspec address [default: the manifest's path, or the folder of --out].",
)
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard files to tensorboard/ in the run's folder.")
def local(
    manifest: Path,
    as_json: bool,
    out: Path | None,
    keep: bool,
    link: str | None,
    resume: bool,
    overwrite: bool,
    storage: str | None,
    tensorboard: bool,
) -> None:
    """Run the job of MANIFEST on this machine.

    It starts a group of processes for each replica, which exchange updates over mutual TLS on loopback.
    """
    from crosscloud_trainer.launcher.local import run_local

    def run() -> int:
        return run_local(
            manifest,
            as_json=as_json,
            out=out,
            keep=keep,
            link=link,
            storage=storage,
            tensorboard=tensorboard,
            resume=resume,
            overwrite=overwrite,
        )

    _explained(run)


@main.command()
def pod() -> None:
    """Run one pod of a job, as the operator asks.

    Its environment says which one.
    """
    from crosscloud_trainer.launcher.pod import run_pod

    _explained(lambda: run_pod(os.environ))


@main.command()
@click.argument("result", type=click.Path(path_type=Path))
@click.argument("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
def export(result: Path, checkpoint: str, out: Path) -> None:
    """Make a model folder OUT of a CHECKPOINT.

    RESULT is the job's result folder, CHECKPOINT the address of a manifest.json as `status.checkpoints[].uri` and the
    summary of a local run have it: that of the best one, for example.
    """
    from crosscloud_trainer.export import export as export_model

    def write() -> None:
        step = export_model(result, checkpoint, out)
        click.echo(f"{out}: the model after step {step}")

    _explained(write)


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="Text that the model goes on from.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=200, show_default=True, help="How many more.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Another one gives another text."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0, 2.0),
    default=0.7,
    show_default=True,
    help="How freely it draws: 0 takes the likeliest token each time, 1 draws as the model thinks.",
)
def generate(folder: Path, prompt: str, tokens: int, seed: int, temperature: float) -> None:
    """Write text with the model in DIR.

    DIR is the `result` folder of a run, or one that `export` or `crosscloud fetch` has made.
    """
    from crosscloud_trainer.generate import generate as generate_text

    def write() -> None:
        click.echo(generate_text(folder, prompt, tokens, seed, temperature))

    _explained(write)


if __name__ == "__main__":
    main()
