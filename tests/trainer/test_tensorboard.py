"""TensorBoard files of a local run, read back by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer.jobs import manifest, written
from trainer.test_display import report

from crosscloud_trainer.contract.report import PeerBytes
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.state import RunState
from crosscloud_trainer.launcher.tensorboard import event_files


def test_each_replica_has_its_scalars_by_step(tmp_path: Path) -> None:
    state = RunState(read_manifest(written(tmp_path, manifest())), tmp_path)
    state.next_attempt()
    with event_files(tmp_path / "tensorboard") as files:
        for step in (1, 2, 3):
            for replica in (0, 1):
                more = {"wan_bytes_sent": 10, "dense_bytes": 50, "wan": (PeerBytes(1 - replica, "payload", 10, step),)}
                more |= {"digest_mismatches": 1, "saved_at": "2025-12-31T23:59:30.5Z", "saved_step": 1}
                state.see(replica, report(replica, step, loss=5.0 - step - replica, **more))
            files.follow(state)
            files.follow(state)  # nothing new: nothing written
    for replica in (0, 1):
        events = EventAccumulator(str(tmp_path / "tensorboard" / "attempt-1" / f"replica-{replica}"))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(s, 5.0 - s - replica) for s in (1, 2, 3)]
        for tag, values in {
            "wan/compression ratio": [5.0] * 3,
            f"wan sent to replica {1 - replica}/payload": [10.0] * 3,
            f"wan received from replica {1 - replica}/payload": [1.0, 2.0, 3.0],
            "rounds/skipped": [0.0] * 3,
            "rounds/digest mismatches": [1.0] * 3,
            "checkpoint/age in seconds": [29.5] * 3,  # the report is of midnight
            "checkpoint/unsaved steps": [0.0, 1.0, 2.0],
        }.items():
            assert [e.value for e in events.Scalars(tag)] == values
        assert "loss/validation" not in events.Tags()["scalars"]


def test_without_the_package_the_option_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(Failure, match=r"--tensorboard: .*pip install 'crosscloud-trainer\[tensorboard\]'"),
        event_files(tmp_path),
    ):
        pass
