"""What an image is made of, read from the Dockerfile: pure, so that an unchanged tree builds nothing."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from crosscloud_lab.errors import LabError

TARGETS = ("operator", "trainer", "gateway")
_REGISTRY = "crosscloud.dev"
_IGNORED_FOLDERS = {"__pycache__", "build", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


@dataclass
class Stage:
    """A stage of a Dockerfile: the stages it stands on or copies from, and the paths of its context."""

    name: str
    stages: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def parse_stages(dockerfile: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    stages: dict[str, Stage] = {}
    current = Stage("")
    for line in re.sub(r"\\\n", " ", dockerfile).splitlines():
        words = line.split()
        instruction = words[0].upper() if words else ""
        if instruction == "FROM":
            arguments = [word for word in words[1:] if not word.startswith("--")]
            current = Stage(arguments[2] if len(arguments) == 3 else f"#{len(stages)}", [arguments[0]])
            stages[current.name] = current
        elif instruction in ("COPY", "ADD"):
            origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
            arguments = [word for word in words[1:] if not word.startswith("--")]
            if origin:
                current.stages.append(origin)
            else:
                current.paths += arguments[:-1]
    return stages


def context_paths(stages: dict[str, Stage], target: str) -> list[str]:
    """Paths of the build context that go into a target, its earlier stages included."""
    seen: set[str] = set()
    paths: set[str] = set()
    waiting = [target]
    while waiting:
        name = waiting.pop()
        if name in stages and name not in seen:
            seen.add(name)
            waiting += stages[name].stages
            paths.update(stages[name].paths)
    return sorted(paths)


def image_names(root: Path) -> dict[str, str]:
    """Name of each target's image for the tree at `root`; the tag is a digest of all that goes in."""
    dockerfile = root / "Dockerfile"
    try:
        text = dockerfile.read_text()
    except OSError as error:
        raise LabError(f"{dockerfile} can't be read: {error.strerror}; run this in a checkout") from error
    stages = parse_stages(text)
    missing = [target for target in TARGETS if target not in stages]
    if missing:
        raise LabError(f"{dockerfile} has no stage {', '.join(missing)}; it has {', '.join(stages)}")
    names = {}
    for target in TARGETS:
        digest = hashlib.sha256(text.encode())
        for path in context_paths(stages, target):
            for file in _files(root / path):
                digest.update(f"\0{file.relative_to(root)}\0{file.stat().st_mode & 0o111}\0".encode())
                digest.update(file.read_bytes())
        names[target] = f"{_REGISTRY}/{target}:{digest.hexdigest()[:12]}"
    return names


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise LabError(f"the Dockerfile copies {path}, which doesn't exist")
    return sorted(file for file in path.rglob("*") if file.is_file() and not _ignored(file.relative_to(path)))


def _ignored(path: Path) -> bool:
    return any(part in _IGNORED_FOLDERS or part.endswith(".egg-info") for part in path.parts)
