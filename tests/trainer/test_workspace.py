"""The private folder of a local run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from crosscloud_trainer.launcher.workspace import remove_stale, work_folder


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def begun(folder: Path, attempt: int = 1) -> Path:
    (folder / f"attempt-{attempt}" / "tls-0").mkdir(parents=True)
    (folder / f"attempt-{attempt}" / "tls-0" / "tls.key").write_text("secret")
    return folder


def test_a_run_removes_what_dead_ones_left_and_leaves_the_living_alone(parent: Path) -> None:
    dead, older = begun(parent / "crosscloud-small-dead"), begun(parent / "crosscloud-other-job-x")
    resumed = begun(parent / "crosscloud-small-resumed", attempt=3)  # a run that goes on counts on
    (dead / ".lock").touch()
    with work_folder("small", keep=False) as living:
        begun(living)
        with work_folder("small", keep=False) as second:
            assert not dead.exists()
            assert not resumed.exists()
            assert not older.exists()  # without a lock: of a version that made none
            assert (living / "attempt-1" / "tls-0" / "tls.key").exists()
            assert second != living
            assert second.stat().st_mode & 0o777 == 0o700
    assert list(parent.iterdir()) == []


def test_what_no_run_has_made_is_left_alone(parent: Path) -> None:
    (parent / "crosscloud-notes").mkdir()
    (parent / "crosscloud-notes" / "mine.txt").touch()
    (parent / "crosscloud-new").mkdir()  # as between the making of a folder and of its lock
    begun(parent / "elsewhere")
    (parent / "crosscloud-link").symlink_to(parent / "elsewhere")
    before = sorted(parent.iterdir())
    remove_stale(parent)
    assert sorted(parent.iterdir()) == before


def test_a_folder_that_was_asked_for_stays(parent: Path) -> None:
    with work_folder("small", keep=True) as kept:
        begun(kept)
    remove_stale(parent)
    assert (kept / "attempt-1").is_dir()
