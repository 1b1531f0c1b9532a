"""Whether a model fits into the memory that is there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from trainer.jobs import TINY_MODEL, finished, manifest, record, start_local, written

from crosscloud_trainer.contract import Algorithm, CodecName, ExitCode, Model, Precision, RunDocument, Sync
from crosscloud_trainer.environment import MEMORY, Memory
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.attempt import LocalJob
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.memory import free_memory
from crosscloud_trainer.models.memory import check_memory, needed

CPU = torch.device("cpu")


def run_document(folder: Path, **spec: object) -> RunDocument:
    found = read_manifest(written(folder, manifest(**spec)))
    return LocalJob(found, record(folder), folder, folder, "/x")._run_document(1)


@pytest.mark.parametrize(
    ("precision", "ranks", "zero", "per_parameter"),
    [  # working weights + gradients + (fp32 weights, two moments, outer weights, outer momentum, residual) / ranks
        (Precision.FP32, 1, 1, 4 + 4 + 24),
        (Precision.BF16, 1, 1, 2 + 2 + 24),
        (Precision.FP32, 4, 1, 4 + 4 + 6),
        (Precision.BF16, 4, 2, 2 + 0.5 + 6),
    ],
)
def test_a_rank_needs_the_bytes_of_zero_and_of_the_outer_state(
    tmp_path: Path, precision: Precision, ranks: int, zero: int, per_parameter: float
) -> None:
    run = run_document(tmp_path, replica={"gpusPerStage": ranks, "zeroStage": zero})
    run = replace(run, training=replace(run.training, precision=precision))
    need, shard = needed(4_000_000, run, 0), 4_000_000 // ranks
    assert need.on_device == 4_000_000 * per_parameter
    assert need.exchange == 2 * shard + 3.5 * int8_bytes(shard)  # half of an fp32 copy is owned


@pytest.mark.parametrize(
    ("sync", "outer", "exchange"),
    [
        (Sync(codec=CodecName.NONE), 8, 3.5 * 4),
        (Sync(codec=CodecName.BF16), 12, 2 + 3.5 * 2),
        (Sync(codec=CodecName.BF16, error_feedback=False), 8, 3.5 * 2),
        (Sync(codec=CodecName.TOP_K), 12, 2 + 3.5 * 84 / 4096),
        (Sync(Algorithm.ALL_REDUCE, codec=CodecName.BF16), 4, 2 + 3.5 * 2),
    ],
)
def test_what_rounds_need_depends_on_algorithm_and_codec(
    tmp_path: Path, sync: Sync, outer: float, exchange: float
) -> None:
    run = replace(run_document(tmp_path), sync=sync)
    need = needed(4096 * 1000, run, 0)
    assert need.outer == 4096 * 1000 * outer
    assert need.exchange == 4096 * 1000 * exchange
    alone = needed(4096 * 1000, replace(run, replicas=run.replicas[:1]), 0)
    assert alone.exchange == 0
    assert alone.outer == 4096 * 1000 * (8 if sync.algorithm is Algorithm.DILOCO else 0)


def int8_bytes(elements: int) -> int:
    return elements + 4 * -(-elements // 256)


def test_a_model_is_refused_when_the_ranks_of_a_pod_need_one_byte_more_than_is_there(tmp_path: Path) -> None:
    run = run_document(tmp_path, replica={"gpusPerStage": 2, "zeroStage": 1})
    run = replace(run, training=replace(run.training, model=Model(config=TINY_MODEL)))
    parameters = 2 * 259 * 32 + 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)  # as LLaMA has them
    exchange = parameters + 3 * int8_bytes(parameters // 2) + int8_bytes(parameters // 2) // 2
    least = 2 * (8 * parameters + 24 * parameters // 2 + exchange)
    check_memory(run, 0, CPU, Memory(least, "here"))
    with pytest.raises(Failure) as caught:
        check_memory(run, 0, CPU, Memory(least - 1, "left in this box"))
    assert caught.value.code == ExitCode.INVALID_INPUT
    told = str(caught.value)
    assert told.startswith("training.model.config: found ")
    assert f"the {parameters:,} parameters need {least:,} bytes or more, 2 x " in told
    assert f"weights {parameters * 4 / 1000:.1f} kB, gradients {parameters * 4 / 1000:.1f} kB" in told
    assert f"optimizer {parameters * 6 / 1000:.1f} kB, outer state {parameters * 6 / 1000:.1f} kB, " in told
    assert f"exchange {exchange / 1000:.1f} kB" in told
    assert "left in this box" in told


def test_a_local_run_of_a_model_that_no_machine_here_can_hold_ends_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    model = {**TINY_MODEL, "hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 200}
    process = start_local(written(tmp_path, manifest(training={"model": {"config": model}})), tmp_path / "out")
    code, events, _ = finished(process)
    assert code == ExitCode.INVALID_INPUT
    assert events[-1]["last"] is True
    assert "training.model.config: found" in events[-1]["message"]
    assert re.search(r"for replica [01], its share of", events[-1]["message"])


def test_the_free_memory_of_this_host_is_not_more_than_it_has() -> None:
    found = free_memory()
    assert found is not None
    assert 0 < found.size < psutil.virtual_memory().total
    assert Memory.read({MEMORY: str(found)}) == found
    assert Memory.read({}) is None


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n"}


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    group = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    assert free_memory(tree(tmp_path, MEMINFO)) == Memory(4_096_000, "available on this machine")
    assert free_memory(tree(tmp_path, group)) == Memory(4_096_000, "available on this machine")
    assert free_memory(tmp_path / "none") is None


def test_the_narrowest_limit_of_all_groups_counts_less_what_is_used_but_not_what_is_cached(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods"
    files = {
        "proc/self/cgroup": "0::/kubepods/pod7\n",
        f"{group}/memory.max": "1000000\n",
        f"{group}/memory.current": "300000\n",
        f"{group}/memory.stat": "anon 250000\ninactive_file 50000\n",
        f"{group}/pod7/memory.max": "max\n",
        f"{group}/pod7/memory.current": "1\n",
        f"{group}/pod7/memory.stat": "inactive_file 0\n",
    }
    found = free_memory(tree(tmp_path, MEMINFO | files))
    assert found == Memory(750_000, "left below the memory limit of this container")


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "700000\n",
        "sys/fs/cgroup/memory/memory.stat": "cache 9\ninactive_file 1\ntotal_inactive_file 200000\n",
    }
    assert free_memory(tree(tmp_path, MEMINFO | files)).size == 1_500_000  # type: ignore[union-attr]
