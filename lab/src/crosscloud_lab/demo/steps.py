"""The commands of the demo, as a user would type them."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from crosscloud_lab import shell
from crosscloud_lab.lab import Lab

NAMESPACE = "crosscloud-system"
# The longest is `fetch` on a slow machine, minutes at most.
COMMAND_SECONDS = 1800.0


class Phases:
    """One line for each phase, with its time."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.number = console, total, 0
        self.begin = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, title: str) -> Iterator[None]:
        self.number += 1
        start = time.monotonic()
        self.console.print(f"\n[bold cyan][{self.number}/{self.total}][/] [bold]{title}[/]")
        yield
        now = time.monotonic()
        self.console.print(f"[green]      done in {now - start:.0f} s[/] ({now - self.begin:.0f} s in all)")


def run(*command: str | Path, stdin: str | None = None) -> str:
    """Standard output of a command. Raises LabError with all that it printed."""
    return shell.run(command, stdin=stdin, timeout=COMMAND_SECONDS)


def tool(name: str) -> Path:
    """A console script beside the running Python."""
    return Path(sys.executable).with_name(name)


def install_operator(lab: Lab, images: Iterable[str]) -> None:
    """`helm upgrade --install` with images that `load_images` brought, waiting until the operator is ready."""
    helm = (lab.binary("helm"), "--kubeconfig", lab.kubeconfig("hub"))
    run(
        *(*helm, "upgrade", "--install", "crosscloud", "charts/crosscloud"),
        *("--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "5m"),
        *(part for name, value in image_values(images).items() for part in ("--set", f"{name}={value}")),
    )


def image_values(images: Iterable[str]) -> dict[str, str]:
    """Helm values for images named `REGISTRY/TARGET:TAG`, where TARGET is operator, trainer or gateway."""
    values: dict[str, str] = {}
    for image in images:
        repository, _, tag = image.rpartition(":")
        target = repository.rpartition("/")[2]
        values |= {f"{target}.image.repository": repository, f"{target}.image.tag": tag}
    return values


def add_members(lab: Lab, names: list[str]) -> None:
    """`crosscloud member add` for each; adding one that is there changes nothing."""
    for name in names:
        run(
            *(tool("crosscloud"), "--kubeconfig", lab.kubeconfig("hub"), "member", "add", name),
            *("--kubeconfig", lab.kubeconfig(name), "--allow-namespace", "ml"),
        )


def prepare_namespace(lab: Lab, clusters: list[str]) -> None:
    """The job's namespace everywhere, and the storage Secret on the hub: the operator brings it to the members."""
    for cluster in clusters:
        apply(lab, cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}})
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3", "namespace": "ml"}}
    apply(lab, "hub", secret | {"stringData": lab.s3_environment()})


def apply(lab: Lab, cluster: str, obj: dict[str, Any]) -> None:
    lab.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(obj))


def apply_job(lab: Lab, manifest: Path) -> None:
    """A job of an earlier demo is deleted first: its spec can't be changed, and it has ended."""
    delete = ("delete", "-f", str(manifest), "--ignore-not-found", "--timeout", "180s")
    lab.kubectl("hub", *delete, timeout=COMMAND_SECONDS)
    lab.kubectl("hub", "apply", "-f", str(manifest))


@dataclass(frozen=True)
class Written:
    """A text that a model went on with."""

    prompt: str
    continuation: str


def fetch_and_generate(lab: Lab, namespace: str, name: str, target: Path) -> Written:
    """Brings the model by `crosscloud fetch` and lets it go on from the start of a function."""
    shutil.rmtree(target, ignore_errors=True)
    hub = lab.kubeconfig("hub")
    run(tool("crosscloud"), "--kubeconfig", hub, "fetch", name, target, "--namespace", namespace)
    prompt = "def read_file(path):"
    text = run(tool("crosscloud-trainer"), "generate", target, "--prompt", prompt, "--tokens", "160")
    return Written(prompt, text.removeprefix(prompt).rstrip())
