"""Builds container images: by docker where an engine and its BuildKit answer, else by buildah, without a daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crosscloud_lab.packages import IMAGE_TOOLS, ensure_packages
from crosscloud_lab.progress import Note, Progress
from crosscloud_lab.shell import run, stream, succeeds

_SUITE = "bookworm"
_BASE = f"crosscloud.dev/base:{_SUITE}-1"
_BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WHEELS_MOUNT = "/mnt/wheels"
_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem")
# Where a build finds the machine's files, as the Dockerfile has it too.
_IN_IMAGE = {"pip": "/etc/pip.conf", "ca": "/etc/ssl/certs/ca-certificates.crt"}
# buildah leaves mounts behind when it fails or is killed; in a namespace of their own they end with it.
_PRIVATE_MOUNTS = ("unshare", "--mount")
_BASE_SCRIPT = """
container=$($TOOL from $SIGNATURES scratch)
folder=$($TOOL mount "$container")
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$folder"
rm -f "$folder"/var/cache/apt/archives/*.deb
$TOOL umount "$container"
$TOOL config --env "PATH=$BASE_PATH" "$container"
$TOOL commit $SIGNATURES "$container" "$BASE"
$TOOL rm "$container"
"""
# What of the machine's pip configuration makes sense in a build: where packages come from, and how.
_PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")


@dataclass(frozen=True)
class BuildRequest:
    """One target to build from the tree at `root` into the image `name`."""

    root: Path
    target: str
    name: str

    @property
    def wheels(self) -> Path | None:
        """A folder of wheels beside the checkout, for wheels that the index doesn't have."""
        folder = self.root.parent / "shared" / "wheels"
        return folder if folder.is_dir() else None


class Builder(Protocol):
    def has(self, name: str) -> bool:
        """Whether the image is built."""

    def build(self, request: BuildRequest, note: Note) -> None:
        """Builds the image. Raises LabError with the last lines of the build."""

    def export(self, name: str, archive: Path) -> None:
        """Writes the image to a file that containerd imports."""

    def forget(self, keep: Sequence[str]) -> None:
        """Drops our earlier images of the same repositories as `keep`."""


def find_builder(folder: Path, progress: Progress) -> Builder:
    """Docker when an engine answers and there is buildx; buildah otherwise, installed where there is apt."""
    docker = (["docker", "version", "--format", "{{.Server.Version}}"], ["docker", "buildx", "version"])
    if shutil.which("docker") and all(map(succeeds, docker)):
        return Docker(folder)
    ensure_packages(IMAGE_TOOLS, progress)
    return Buildah(folder, progress)


class Docker:
    """Images live in docker's own store. The Dockerfile says where secrets and the context of wheels are mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return succeeds(["docker", "image", "inspect", name])

    def build(self, request: BuildRequest, note: Note) -> None:
        command = ["docker", "buildx", "build", "--load", "--progress=plain", "--network=host"]
        command += [f"--secret=id={name},src={source}" for name, source in _machine_files(self._folder).items()]
        if request.wheels:
            command.append(f"--build-context=local-wheels={request.wheels.resolve()}")
            command.append(f"--build-arg=PIP_FIND_LINKS={_WHEELS_MOUNT}")
        command += [f"--target={request.target}", f"--tag={request.name}", str(request.root)]
        stream(command, _steps(note), what=f"docker build of {request.target}")

    def export(self, name: str, archive: Path) -> None:
        run(["docker", "save", f"--output={archive}", name], timeout=1800)

    def forget(self, keep: Sequence[str]) -> None:
        for name in run(["docker", "image", "list", "--format", "{{.Repository}}:{{.Tag}}"]).split():
            if superseded(name, keep):
                run(["docker", "image", "rm", name])


class Buildah:
    """Images live in a store of our own in the cache; the base image is a minimal Debian."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        folder.mkdir(parents=True, exist_ok=True)
        self._policy = folder / "policy.json"
        self._policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        self._tool = [*_PRIVATE_MOUNTS, "buildah", f"--root={folder / 'storage'}", f"--runroot={folder / 'run'}"]

    def has(self, name: str) -> bool:
        return succeeds([*self._tool, "inspect", "--type=image", name])

    def build(self, request: BuildRequest, note: Note) -> None:
        # What an interrupted build left would keep its layers for ever.
        run([*self._tool, "rm", "--all"])
        command = [
            *self._tool,
            "bud",
            "--isolation=chroot",
            "--network=host",
            "--layers",
            "--force-rm",
            *self._signatures(),
        ]
        base = self._base() if "${BASE}" in (request.root / "Dockerfile").read_text() else None
        if base:
            command += [f"--build-arg=BASE={base}", "--pull-never"]
        command += [f"--volume={source}:{target}:ro" for source, target in self._mounts(request)]
        if request.wheels:
            command.append(f"--build-arg=PIP_FIND_LINKS={_WHEELS_MOUNT}")
        command += [f"--target={request.target}", f"--tag={request.name}", str(request.root)]
        stream(command, _steps(note), what=f"build of image {request.target}")

    def export(self, name: str, archive: Path) -> None:
        run([*self._tool, "push", *self._signatures(), name, f"docker-archive:{archive}:{name}"], timeout=1800)

    def forget(self, keep: Sequence[str]) -> None:
        for image in json.loads(run([*self._tool, "images", "--json"]) or "[]"):
            for name in image.get("names") or []:
                if superseded(name, keep):
                    run([*self._tool, "rmi", name])

    def _signatures(self) -> list[str]:
        return [f"--signature-policy={self._policy}"]

    def _mounts(self, request: BuildRequest) -> list[tuple[Path, str]]:
        """The machine's files and the wheels beside the checkout, with where they lie in the build."""
        mounts = [(source, _IN_IMAGE[name]) for name, source in _machine_files(self._folder).items()]
        if request.wheels:
            mounts.append((request.wheels.resolve(), _WHEELS_MOUNT))
        return mounts

    def _base(self) -> str | None:
        """A minimal Debian with Python; None, for the Dockerfile's own base, where debootstrap is missing."""
        if self.has(_BASE):
            return _BASE
        if shutil.which("debootstrap") is None:
            return None
        with self._progress.phase("base image by debootstrap"):
            tool = shlex.join(self._tool[len(_PRIVATE_MOUNTS) :])
            names = {"TOOL": tool, "SIGNATURES": shlex.join(self._signatures()), "SUITE": _SUITE, "BASE": _BASE}
            environment = {**os.environ, **names, "BASE_PATH": _BASE_PATH}
            run([*_PRIVATE_MOUNTS, "sh", "-ec", _BASE_SCRIPT], env=environment, timeout=3600)
        return _BASE


def _machine_files(folder: Path) -> dict[str, Path]:
    """What the machine knows about package indexes and certificates, for the time of a build: files by name."""
    bundle = next((Path(path) for path in _CA_BUNDLES if Path(path).exists()), None)
    listed = run([sys.executable, "-m", "pip", "config", "list"])
    configuration = folder / "pip.conf"
    configuration.write_text(pip_configuration(listed, _IN_IMAGE["ca"] if bundle else None))
    return {"pip": configuration, **({"ca": bundle.resolve()} if bundle else {})}


def pip_configuration(listed: str, bundle: str | None) -> str:
    """A pip.conf for builds from what `pip config list` printed; the environment's words come last and win."""
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in _PIP_KEYS and len(value) > 1:
            found["timeout" if key == "default-timeout" else key] = value[1:-1].replace("\\n", "\n    ")
    if bundle:
        found["cert"] = bundle
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(found.items()))


def superseded(name: str, keep: Sequence[str]) -> bool:
    """Whether an image is an earlier build of one that is kept."""
    repositories = {kept.rpartition(":")[0] for kept in keep}
    return name not in keep and name.rpartition(":")[0] in repositories


def _steps(note: Note) -> Callable[[str], None]:
    """Notes each step that begins: `[3/4] STEP 3/6: RUN ...` (buildah), `#7 [operator 3/6] RUN ...` (BuildKit)."""

    def told(line: str) -> None:
        if found := re.match(r"#\d+ (?=\[)|(?=(\[\S+\] )?STEP )", line):
            note(re.sub(r"--mount=\S+\s*", "", line[found.end() :]).strip()[:80])

    return told
