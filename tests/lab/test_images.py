"""What goes into an image decides its name, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crosscloud_lab.archives import Archives
from crosscloud_lab.builder import pip_configuration
from crosscloud_lab.errors import LabError
from crosscloud_lab.recipe import TARGETS, context_paths, image_names, parse_stages

ROOT = Path(__file__).parents[2]
DOCKERFILE = """\
ARG BASE=python
FROM ${BASE} AS base
FROM base AS wheels
COPY trainer trainer
FROM base AS operator
COPY operator/pyproject.toml \\
     operator/
COPY --from=wheels /wheels wheels
FROM base AS trainer
COPY --chown=1:1 trainer/pyproject.toml trainer/src /build/
FROM base AS gateway
RUN true
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("trainer/pyproject.toml", "trainer/src/a.py", "operator/pyproject.toml", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def test_a_target_is_made_of_what_its_stages_copy() -> None:
    stages = parse_stages(DOCKERFILE)
    assert context_paths(stages, "operator") == ["operator/pyproject.toml", "trainer"]
    assert context_paths(stages, "trainer") == ["trainer/pyproject.toml", "trainer/src"]
    assert context_paths(stages, "gateway") == []


def test_a_change_renames_exactly_the_images_it_goes_into(tree: Path) -> None:
    before = image_names(tree)
    (tree / "docs/page.md").write_text("changed")
    (tree / "trainer/__pycache__").mkdir()
    (tree / "trainer/__pycache__/a.pyc").write_text("changed")
    assert image_names(tree) == before
    (tree / "operator/pyproject.toml").write_text("changed")
    after = image_names(tree)
    assert [target for target in before if before[target] != after[target]] == ["operator"]
    (tree / "trainer/src/a.py").rename(tree / "trainer/src/b.py")
    assert image_names(tree)["trainer"] != after["trainer"]
    assert image_names(tree)["gateway"] == before["gateway"]


def test_each_image_runs_as_a_user_without_rights_where_no_pod_says_so() -> None:
    users: dict[str, str] = {}
    stage = ""
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        match line.split():
            case ["FROM", parent, "AS", stage]:
                users[stage] = users.get(parent, "root")
            case ["USER", user]:
                users[stage] = user
    assert {target: users[target] for target in TARGETS} == dict.fromkeys(TARGETS, "65532:65532")


def test_a_tree_without_what_is_needed_is_told_in_words(tree: Path) -> None:
    (tree / "operator/pyproject.toml").unlink()
    with pytest.raises(LabError, match=r"copies .*operator/pyproject.toml, which doesn't exist"):
        image_names(tree)
    (tree / "Dockerfile").write_text("FROM scratch AS trainer\n")
    with pytest.raises(LabError, match="no stage operator, gateway"):
        image_names(tree)
    (tree / "Dockerfile").unlink()
    with pytest.raises(LabError, match="can't be read"):
        image_names(tree)


def test_builds_get_the_machines_package_index_but_no_local_paths() -> None:
    listed = (
        ":env:.find-links='/opt/wheels'\n:env:.index-url='https://env.example/simple'\n"
        "global.cert='/home/me/ca.pem'\nglobal.default-timeout='180'\nglobal.index-url='https://file.example/simple'\n"
    )
    assert pip_configuration(listed, "/etc/ssl/certs/ca.crt") == (
        "[global]\ncert = /etc/ssl/certs/ca.crt\nindex-url = https://env.example/simple\ntimeout = 180\n"
    )


def test_the_archives_used_last_stay_so_that_two_checkouts_can_share_the_cache(tmp_path: Path) -> None:
    archives = Archives(tmp_path / "archives")
    for second, tag in enumerate(("mine", "b", "c", "d", "yours")):
        path = archives.path(f"registry.example/trainer:{tag}")
        path.touch()
        os.utime(path, (second, second))
    assert archives.use("registry.example/trainer:mine")
    archives.path("registry.example/operator:mine").touch()
    archives.path("registry.example/trainer:cut-short").with_suffix(".tar.part").touch()
    assert not archives.use("registry.example/trainer:nobody's")
    kept = archives.prune("registry.example/trainer", keep=3)
    assert set(kept) == {f"registry.example/trainer:{tag}" for tag in ("mine", "yours", "d")}
    left = {path.name for path in (tmp_path / "archives").iterdir()}
    assert left == {"trainer-mine.tar", "trainer-yours.tar", "trainer-d.tar", "operator-mine.tar"}
