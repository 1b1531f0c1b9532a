"""Runs other programs and turns their failures into LabErrors."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from crosscloud_lab.errors import LabError


def run(
    command: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> str:
    """Output of a program; LabError with its words when it fails or takes longer than `timeout` seconds."""
    words = [str(word) for word in command]
    shown = " ".join(words[:12]) + (" ..." if len(words) > 12 else "")
    try:
        answer = subprocess.run(
            words,
            input=stdin,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise LabError(f"program {words[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{shown}` did not end within {timeout:.0f} s") from error
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip()
        raise LabError(f"`{shown}` failed with exit status {answer.returncode}: {said[-2000:]}")
    return answer.stdout


def succeeds(command: Sequence[str | Path]) -> bool:
    """Whether a program exits with 0."""
    try:
        run(command)
    except LabError:
        return False
    return True
