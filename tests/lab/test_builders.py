"""How docker and buildah are asked to build: programs in their place note what they are asked and talk as they do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crosscloud_lab.builder import Buildah, BuildRequest
from crosscloud_lab.images import build_images
from crosscloud_lab.progress import Note

DOCKERFILE = (Path(__file__).parents[2] / "Dockerfile").read_text()
DOCKER = """\
#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/called"
case "$1 $2" in
  "image inspect") exit 1 ;;
  "image list") printf 'crosscloud.dev/trainer:of-an-earlier-tree\\nregistry.example/trainer:1\\n' ;;
  "buildx build")
    for word in "$@"; do case "$word" in --secret=id=pip,*) cat "${word#*src=}" > "$here/pip.conf" ;; esac; done
    echo '#5 [internal] load build definition from Dockerfile'
    echo '#11 [trainer 3/6] RUN --mount=type=secret,id=pip,target=/etc/pip.conf     mkdir trainer/src && pip install'
    echo '#11 4.072 Collecting torch==2.13.0'
    echo '#11 DONE 61.9s' ;;
  "save "*) touch "${2#--output=}" ;;
esac
"""
UNSHARE = '#!/bin/sh\nshift; exec "$@"\n'  # without `--mount`
BUILDAH = """\
#!/bin/sh
echo "$*" >> "$(dirname "$0")/called"
case "$*" in *bud*)
  echo '[1/5] STEP 1/1: FROM scratch AS local-wheels'
  echo '--> bb16ed4862e'
  echo '[5/5] STEP 3/6: RUN --mount=type=secret,id=pip,target=/etc/pip.conf     pip install ./trainer' ;;
esac
"""


class Notes:
    """Keeps what phases say they are doing."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def phase(self, _: str) -> Iterator[Note]:
        yield self.told.append


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree for the real Dockerfile with wheels beside it, and our programs before everything else on the path."""
    for name in ("trainer/pyproject.toml", "operator/pyproject.toml", "requirements/constraints.txt", "Dockerfile"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).write_text(DOCKERFILE)
    for folder in ("shared/wheels", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name, script in (("docker", DOCKER), ("buildah", BUILDAH), ("unshare", UNSHARE)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    return tmp_path / "checkout"


def test_docker_gets_what_the_machine_knows_of_indexes_and_certificates_and_its_steps_are_told(checkout: Path) -> None:
    notes = Notes()
    archives = build_images(checkout, notes)
    assert all(archive.exists() for archive in archives.values())
    steps = ["[internal] load build definition from Dockerfile", "[trainer 3/6] RUN mkdir trainer/src && pip install"]
    assert notes.told == [*steps, "export"] * 3

    called = (checkout.parent / "bin" / "called").read_text().splitlines()
    builds = [line for line in called if line.startswith("buildx build")]
    wheels = checkout.parent / "shared" / "wheels"
    for name, line in zip(archives, builds, strict=True):
        target = name.rpartition("/")[2].partition(":")[0]
        assert line.endswith(
            f" --build-context=local-wheels={wheels} --build-arg=PIP_FIND_LINKS=/mnt/wheels"
            f" --target={target} --tag={name} {checkout}"
        )
    secrets = dict(re.findall(r"--secret=id=(\w+),src=(\S+)", builds[0]))
    configuration = (checkout.parent / "bin" / "pip.conf").read_text()
    assert "index-url = https://index.example/simple" in configuration
    # What is passed is what the Dockerfile takes, at the place that pip is told.
    taken = dict(re.findall(r"--mount=type=secret,id=(\w+),target=(\S+)", DOCKERFILE))
    assert taken["pip"] == "/etc/pip.conf"
    assert set(secrets) <= set(taken)
    assert ("ca" in secrets) == (f"cert = {taken['ca']}" in configuration)
    assert "FROM scratch AS local-wheels" in DOCKERFILE
    assert "--mount=type=bind,from=local-wheels,target=/mnt/wheels" in DOCKERFILE
    assert [line for line in called if line.startswith("image rm")] == [
        "image rm crosscloud.dev/trainer:of-an-earlier-tree"
    ]


def test_buildah_gets_them_as_mounts_and_its_steps_are_told(checkout: Path) -> None:
    notes = Notes()
    request = BuildRequest(checkout.with_name("without-base"), "trainer", "crosscloud.dev/trainer:1")
    checkout.rename(request.root)
    (request.root / "Dockerfile").write_text(DOCKERFILE.replace("${BASE}", "debian"))
    folder = checkout.parent / "images"
    Buildah(folder, notes).build(request, notes.told.append)
    assert notes.told == ["[1/5] STEP 1/1: FROM scratch AS local-wheels", "[5/5] STEP 3/6: RUN pip install ./trainer"]
    *_, build = (checkout.parent / "bin" / "called").read_text().splitlines()
    wheels = checkout.parent / "shared" / "wheels"
    for mount in (f"{folder / 'pip.conf'}:/etc/pip.conf", f"{wheels}:/mnt/wheels"):
        assert f"--volume={mount}:ro" in build
    assert "index-url = https://index.example/simple" in (folder / "pip.conf").read_text()
    assert build.endswith(
        f"--build-arg=PIP_FIND_LINKS=/mnt/wheels --target=trainer --tag={request.name} {request.root}"
    )


def test_every_command_of_the_dockerfile_that_asks_an_index_has_what_the_machine_knows() -> None:
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    asking = [line for line in commands if re.search(r"pip (install|wheel)", line) and "--no-index" not in line]
    assert len(asking) == 3
    for line in asking:
        assert re.findall(r"id=(\w+)|from=([\w-]+)", line) == [("pip", ""), ("ca", ""), ("", "local-wheels")]
