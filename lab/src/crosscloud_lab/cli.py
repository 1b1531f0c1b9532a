"""The command `crosscloud-lab`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from crosscloud_lab import preflight
from crosscloud_lab.binaries import Binaries
from crosscloud_lab.builds import build_all
from crosscloud_lab.errors import LabError, in_words
from crosscloud_lab.images import build_images, load_archive
from crosscloud_lab.lab import Lab, LabStatus, remove_lab
from crosscloud_lab.labfile import DEFAULT_NAME, check_lab_name, read_lab_file
from crosscloud_lab.packages import CLUSTER_TOOLS, IMAGE_TOOLS, TEST_TOOLS, ensure_packages
from crosscloud_lab.paths import cache_dir
from crosscloud_lab.progress import default_progress
from crosscloud_lab.shell import interrupt_when_asked_to_end


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Shows what the user can mend as one message and exits with 1."""

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        interrupt_when_asked_to_end()
        try:
            command(*args, **kwargs)
        except (LabError, OSError) as error:
            click.echo(f"crosscloud-lab: {in_words(error)}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("crosscloud-lab: interrupted; run the same command again to go on", err=True)
            sys.exit(130)

    return wrapper


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lab", "name", default=DEFAULT_NAME, show_default=True, metavar="NAME", help="Which lab is meant.")
@click.pass_context
@_told
def main(context: click.Context, name: str) -> None:
    """Several real Kubernetes clusters on this machine, joined by links that can be slowed and cut."""
    check_lab_name("--lab", name)
    context.obj = name


@main.command()
@click.option("-f", "--file", "path", type=click.Path(path_type=Path), help="Lab file; the default lab without it.")
@click.pass_obj
@_told
def up(name: str, path: Path | None) -> None:
    """Bring the lab up, or repair it; a healthy lab is left as it is."""
    preflight.require_root()
    progress = default_progress()
    lab = Lab(read_lab_file(path), progress) if path or name == DEFAULT_NAME else Lab.open(name, progress)
    if path and name not in (DEFAULT_NAME, lab.spec.name):
        raise LabError(f"--lab: {name!r} is not the name in {path}, which is {lab.spec.name!r}; leave --lab out")
    lab.up()
    first = lab.plan.clusters[0].name
    click.echo(f"lab {lab.spec.name} is up; try:")
    click.echo(f"  {lab.binary('kubectl')} --kubeconfig {lab.kubeconfig(first)} get nodes")


@main.command()
@click.pass_obj
@_told
def down(name: str) -> None:
    """Remove the lab and all that it made; only the cache stays."""
    remove_lab(name, default_progress())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
@_told
def status(name: str, as_json: bool) -> None:
    """Show clusters, nodes, links; exit with 1 if something is not ready."""
    found = Lab.open(name).status()
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(found)
    if not found.ready:
        sys.exit(1)


@main.command()
@click.argument("cluster")
@click.pass_obj
@_told
def kubeconfig(name: str, cluster: str) -> None:
    """Print the path of the administrator's kubeconfig of CLUSTER."""
    click.echo(str(Lab.open(name).kubeconfig(cluster)))


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--rate", required=True, help="Rate of each direction: 20mbit, 1gbit, unlimited.")
@click.pass_obj
@_told
def link(name: str, a: str, b: str, rate: str) -> None:
    """Set the rate of the link between clusters A and B."""
    _open(name).set_rate(a, b, rate)
    click.echo(f"link {a} - {b}: {rate}")


@main.command()
@click.argument("a")
@click.argument("b")
@click.pass_obj
@_told
def cut(name: str, a: str, b: str) -> None:
    """Cut the link between clusters A and B: packets vanish, nobody is told."""
    _open(name).cut(a, b)
    click.echo(f"link {a} - {b}: cut; `crosscloud-lab heal` restores it")


@main.command()
@click.argument("clusters", nargs=-1, metavar="[A B]")
@click.pass_obj
@_told
def heal(name: str, clusters: tuple[str, ...]) -> None:
    """End the cut between clusters A and B, or every cut."""
    if len(clusters) not in (0, 2):
        raise LabError("heal: name both clusters of the link, or none to heal every link")
    healed = _open(name).heal(*clusters)
    for pair in healed:
        click.echo(f"link {' - '.join(pair)}: restored")
    if not healed:
        click.echo(f"link {' - '.join(clusters)}: was not cut" if clusters else "no link was cut")


@main.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="NODE_OR_CLUSTER")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
@_told
def execute(name: str, target: str, command: tuple[str, ...]) -> None:
    """Run COMMAND in the network, mounts and processes of a cluster: exec east -- ss -tn."""
    line = _open(name).enter(target, command)
    os.execvp(line[0], line)  # noqa: S606 - the command becomes what it was asked to run


@main.command("load-image")
@click.argument("source", metavar="FILE|NAME")
@click.option("--cluster", "clusters", multiple=True, help="Only this cluster; may be given again.")
@click.pass_obj
@_told
def load_image(name: str, source: str, clusters: tuple[str, ...]) -> None:
    """Bring an image to the nodes: an archive file, or an image of docker or of our own builds."""
    load_archive(_open(name), source, clusters)


@main.command()
@click.option("--root", type=click.Path(path_type=Path), default=Path(), help="Checkout to build images from; here.")
@_told
def build(root: Path) -> None:
    """Build all that clusters and jobs need and the cache lacks: programs and images, side by side."""
    preflight.require_root()
    build_all(root.absolute(), default_progress())


@main.command("build-images")
@click.option("--root", type=click.Path(path_type=Path), default=Path(), help="Checkout to build from; here.")
@_told
def build_images_only(root: Path) -> None:
    """Build the operator's, the trainer's and the gateway's image, if the tree has changed."""
    preflight.require_root()
    for name, archive in build_images(root.absolute()).items():
        click.echo(f"{name}  {archive}")


@main.command("build-binaries")
@_told
def build_binaries() -> None:
    """Build the Kubernetes binaries into the cache, if they aren't there."""
    Binaries(cache_dir()).ensure(default_progress())


@main.command("install-packages")
@_told
def install_packages() -> None:
    """Install the system packages that clusters, images and the tests need, where there is apt."""
    preflight.require_root()
    for tools in (CLUSTER_TOOLS, IMAGE_TOOLS, TEST_TOOLS):
        ensure_packages(tools, default_progress())


@main.command()
@click.argument("program")
@_told
def binary(program: str) -> None:
    """Print the path of a program that the lab built, such as kubectl or helm."""
    click.echo(str(Binaries(cache_dir()).path(program)))


def _open(name: str) -> Lab:
    preflight.require_root()
    return Lab.open(name)


def _show(status: LabStatus) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(title=f"lab {status.name}", title_justify="left")
    for column in ("cluster", "node", "address", "state", "GPUs"):
        table.add_column(column)
    for cluster in status.clusters:
        for node in cluster.nodes:
            gpus = f"{node.gpus} x {node.gpu}" if node.gpu else "-"
            table.add_row(cluster.name, node.name, node.address, "ready" if node.ready else "not ready", gpus)
    console.print(table)
    links = Table()
    for column in ("link", "rate", "state", "sent there", "sent back"):
        links.add_column(column)
    for link in status.links:
        sent = ["-" if count is None else f"{count / 1e6:.1f} MB" for count in link.sent]
        links.add_row(" - ".join(link.between), link.rate, "cut" if link.cut else "open", *sent)
    if status.links:
        console.print(links)
    console.print(f"S3 server: {status.s3}" + ("" if status.s3_ready else " (down)"))
    for cluster in status.clusters:
        if cluster.down:
            console.print(f"{cluster.name}: down: {', '.join(cluster.down)}", soft_wrap=True)
    if not status.ready:
        console.print("`crosscloud-lab up` brings up what is down")
