"""Images on their way from a tree into the nodes, with real builds and a real containerd on two nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.pods import pod

from crosscloud_lab.errors import LabError
from crosscloud_lab.images import build_images, load_archive, load_images
from crosscloud_lab.lab import Lab
from crosscloud_lab.labfile import parse_lab
from crosscloud_lab.packages import find_tool
from crosscloud_lab.recipe import image_names

DOCKERFILE = """\
FROM scratch AS base
COPY busybox /bin/busybox
FROM base AS operator
COPY operator /operator
FROM base AS trainer
COPY trainer /trainer
FROM base AS gateway
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "Dockerfile").write_text(DOCKERFILE)
    for target in ("operator", "trainer"):
        (folder / target).write_text(f"{target} 1\n")
    shutil.copy2(str(find_tool("busybox")), folder / "busybox")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins")


@pytest.fixture(scope="module")
def twins(folder: Path) -> Iterator[Lab]:
    """A cluster of two nodes; its images and seeds have a cache of their own."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("CROSSCLOUD_LAB_STATE", str(folder / "state"))
    lab = Lab(parse_lab("{name: twins, network: 10.80.0.0/16, clusters: [{name: pair, nodes: [{count: 2}]}]}"))
    lab.down()
    try:
        lab.up()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield lab
    finally:
        monkeypatch.undo()
        lab.down()


def test_an_image_is_built_once_and_runs_on_every_node(twins: Lab, tree: Path, folder: Path) -> None:
    archives = build_images(tree)
    assert list(archives) == list(image_names(tree).values())
    written = {path: path.stat().st_ino for path in archives.values()}
    assert build_images(tree) == archives
    assert {path: path.stat().st_ino for path in archives.values()} == written

    load_images(twins, archives)
    assert len(list((folder / "cache/crosscloud/images/seeds").iterdir())) == 1
    for node in ("pair-0", "pair-1"):
        assert says(twins, "first", node, image_names(tree)["trainer"], "/trainer") == "trainer 1\n"

    (tree / "trainer").write_text("trainer 2\n")
    changed = build_images(tree)
    assert len(set(changed) - set(archives)) == 1
    load_images(twins, changed)
    for node in ("pair-0", "pair-1"):
        assert says(twins, "second", node, image_names(tree)["trainer"], "/trainer") == "trainer 2\n"


def test_an_image_is_loaded_by_name_or_file_into_the_clusters_that_are_named(twins: Lab, tree: Path) -> None:
    archives = build_images(tree)
    name = image_names(tree)["operator"]
    load_archive(twins, name, ["pair"])
    assert says(twins, "named", "pair-1", name, "/operator") == "operator 1\n"
    load_archive(twins, str(archives[image_names(tree)["trainer"]]))
    assert says(twins, "filed", "pair-0", image_names(tree)["trainer"], "/trainer") == "trainer 1\n"
    with pytest.raises(LabError, match="'nowhere:1' is no file and no image"):
        load_archive(twins, "nowhere:1")
    with pytest.raises(LabError, match="cluster 'north' is not in lab twins"):
        load_archive(twins, name, ["north"])


def test_a_build_that_fails_shows_its_last_words(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tree / "Dockerfile").write_text(DOCKERFILE.replace("COPY trainer /trainer", "ADD --bad=1 trainer /trainer"))
    with pytest.raises(LabError, match=r"(?s)build of (image )?trainer failed with exit status \d+:.*bad"):
        build_images(tree)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def says(lab: Lab, name: str, node: str, image: str, file: str) -> str:
    """What a file of an image holds, read by a pod on a node."""
    reads = pod(f"{name}-{node}", "", node=node, restartPolicy="Never")
    reads["spec"]["containers"] = [{"name": "main", "image": image, "command": ["/bin/busybox", "cat", file]}]
    lab.kubectl("pair", "apply", "-f", "-", stdin=json.dumps(reads))
    done = "--for=jsonpath={.status.phase}=Succeeded"
    lab.kubectl("pair", "wait", done, f"pod/{name}-{node}", "--timeout=120s")
    return lab.kubectl("pair", "logs", f"{name}-{node}")
