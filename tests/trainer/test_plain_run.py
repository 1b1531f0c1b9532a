"""What a newcomer does: the first example, as an ordinary user, with words for a person instead of JSON."""

from __future__ import annotations

import email
import os
import pty
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ordinary_user import OrdinaryUser, ordinary_user
from trainer.jobs import DEADLINE_SECONDS, TRAINER, manifest, written

TINY = (Path(__file__).parents[2] / "examples" / "tiny.yaml").read_text()
BYTES = r"[\d.]+ [kM]B"


@pytest.fixture
def user() -> Iterator[OrdinaryUser]:
    with ordinary_user() as found:
        yield found


def test_the_first_example_runs_without_rights_and_tells_its_story_in_plain_lines(user: OrdinaryUser) -> None:
    # Python's own library may lie where this user may not look by name.
    shutil.copytree(Path(email.__file__).parent, user.home / "data")
    text = re.sub(r"train: \[.*\]", f'train: ["{user.home}/data/*.py"]', TINY)
    (user.home / "tiny.yaml").write_text(re.sub(r"tokens: 327680 .*", "tokens: 40960", text))
    # A run that hangs is ended with all its processes.
    command = [*user.prefix, "timeout", str(DEADLINE_SECONDS), *TRAINER, "local", "tiny.yaml"]
    done = subprocess.run(command, env=user.environ, cwd=user.home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first == "tiny: attempt 1, 2 replica(s); logs in crosscloud-runs/tiny/logs"
    assert second.startswith("replica 0: starting")
    for line in (
        r"tiny: 20 steps, 40,960 tokens, \d:\d\d",  # 2 copies of 8 sequences of 128 tokens
        r"loss        [\d.]+ → [\d.]+ \(.*",
        rf"WAN         {BYTES} sent; dense fp32 at every step: {BYTES}, \d+ times as much",
        r"digests     equal in all replicas after 2 rounds",  # of 10 steps
        r"result      crosscloud-runs/tiny/result",
        r"try         crosscloud-trainer generate crosscloud-runs/tiny/result --prompt 'def ' --tokens 200",
    ):
        assert re.search(rf"^{line}$", done.stdout, re.MULTILINE), (line, done.stdout)
    assert "\x1b" not in done.stdout, "codes of a terminal in a pipe"
    assert (user.home / "crosscloud-runs" / "tiny" / "result" / "config.json").stat().st_uid == user.home.stat().st_uid


def test_on_a_terminal_the_picture_shows_loss_and_bytes_and_the_summary_follows(tmp_path: Path) -> None:
    path = written(tmp_path, manifest())
    command = ["timeout", str(DEADLINE_SECONDS), *TRAINER, "local", str(path), "--out", str(tmp_path / "out")]
    code, screen = on_a_terminal(command, tmp_path)
    assert code == 0, screen
    assert "\x1b[?25l" in screen, "the live picture hides the cursor"
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen)
    picture, summary = text[: text.rindex("╯")], text[text.rindex("╯") :]
    assert re.search(r"replica 1 +1 rank .* 12/12 +loss [\d.]+", picture)
    assert re.search(rf"WAN +{BYTES} sent; dense fp32: {BYTES} \(\d+x\)", picture)
    assert "digests equal (round 3)" in picture
    assert re.search(r"loss +[\d.]+ → [\d.]+ \(", summary)
    assert re.search(rf"WAN +{BYTES} sent; dense fp32 at every step: {BYTES}, \d+ times as much", summary)


def on_a_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit code, and all that was written to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(command, env=env, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    parts: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # Linux' word for a terminal that nobody holds any more
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait()
    reader.join()
    os.close(ours)
    return code, b"".join(parts).decode()
