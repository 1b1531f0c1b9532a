"""`crosscloud init`: a first manifest, from a DeepSpeed configuration that one has."""

from __future__ import annotations

from pathlib import Path

import click

from crosscloud_operator.cli.common import Failed, checked_name
from crosscloud_operator.cli.dsconfig import BadConfig, check, converted, parse, refused, render


@click.command()
@click.option(
    "--deepspeed-config",
    "source",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The DeepSpeed configuration, JSON or YAML.",
)
@click.option("--name", metavar="NAME", default="my-job", show_default=True, callback=checked_name, help="Of the job.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Full copies of the model; one a cluster.",
)
@click.option("--gpus", type=click.IntRange(1, 1024), default=1, show_default=True, help="GPUs of each replica.")
@click.option(
    "--script", metavar="FILE", help="Run this training script, which reads the configuration itself, as the job."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("job.yaml"),
    show_default=True,
    metavar="FILE",
    help="Where the manifest goes.",
)
@click.option("--force", is_flag=True, help="Overwrite the output where it exists.")
def init(source: Path, name: str, replicas: int, gpus: int, script: str | None, output: Path, force: bool) -> None:
    """Write a commented manifest from a DeepSpeed configuration.

    It tells what could not be taken over, or with --script what a job refuses.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as fault:
        raise Failed(f"--deepspeed-config: {source} can't be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise Failed(f"--deepspeed-config: {source} is not UTF-8 text") from fault
    try:
        config = parse(text)
        taken = converted(config, gpus)
        what, found = ("refused in a job", refused(config)) if script else ("not taken over", taken.notes)
        notes = [f"{what}: {' '.join(note.split())}" for note in found]
        manifest = render(taken, notes, name, replicas, gpus, script)
        check(manifest)
    except BadConfig as fault:
        raise Failed(f"--deepspeed-config: {source}: {fault}") from fault
    try:
        with output.open("w" if force else "x", encoding="utf-8") as out:
            out.write(manifest)
    except FileExistsError as fault:
        raise Failed(f"--output: {output} exists; name another file, or overwrite it with --force") from fault
    except OSError as fault:
        raise Failed(f"--output: {output} can't be written: {fault.strerror}") from fault
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"{output} is written: look through it, set storage.uri{'' if script else ', model and data'}, then")
    click.echo(f"  crosscloud-trainer local {output}     on this machine")
    click.echo(f"  kubectl apply -n NAMESPACE -f {output}     on your clusters")
