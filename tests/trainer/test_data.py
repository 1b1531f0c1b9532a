"""The data of a job: which files, which tokens, and which sequences a rank takes."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crosscloud_trainer.contract import Data, ExitCode, Model, ModelPreset, Problem, Training
from crosscloud_trainer.data.corpus import open_corpus, write_corpus
from crosscloud_trainer.data.files import find_files
from crosscloud_trainer.data.split import Split, evaluation_share
from crosscloud_trainer.failures import Failure

Splits = st.builds(
    Split,
    sequences=st.integers(1, 400),
    replicas=st.integers(1, 5),
    batch_size=st.sampled_from([1, 2, 4, 6, 12]),
    seed=st.integers(0, 2**31 - 1),
)


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@given(Splits, st.integers(0, 200))
def test_ranks_of_all_replicas_never_share_a_sequence_in_a_step(split: Split, step: int) -> None:
    assume(split.steps_per_epoch)
    ranks = {
        replica: divisors(split.batch_size)[replica % len(divisors(split.batch_size))]
        for replica in range(split.replicas)
    }
    taken = [
        int(number)
        for replica, count in ranks.items()
        for rank in range(count)
        for number in split.of_rank(step, replica, rank, count)
    ]
    assert len(taken) == split.per_step
    assert len(set(taken)) == split.per_step
    assert min(taken) >= 0
    assert max(taken) < split.sequences


@given(Splits, st.integers(0, 200), st.data())
def test_the_batch_of_a_replica_does_not_depend_on_its_number_of_ranks(
    split: Split, step: int, data: st.DataObject
) -> None:
    assume(split.steps_per_epoch)
    replica = data.draw(st.integers(0, split.replicas - 1))
    count = data.draw(st.sampled_from(divisors(split.batch_size)))
    parts = [split.of_rank(step, replica, rank, count) for rank in range(count)]
    assert np.array_equal(np.concatenate(parts), split.of_replica(step, replica))


@given(Splits)
def test_an_epoch_shows_each_sequence_at_most_once_and_leaves_out_less_than_a_step(split: Split) -> None:
    assume(split.steps_per_epoch)
    shown = [
        int(number)
        for step in range(split.steps_per_epoch)
        for replica in range(split.replicas)
        for number in split.of_replica(step, replica)
    ]
    assert len(set(shown)) == len(shown)
    assert split.sequences - len(shown) < split.per_step


def test_the_next_epoch_has_another_order_and_another_seed_too() -> None:
    split = Split(sequences=1000, replicas=1, batch_size=100, seed=7)
    first = np.concatenate([split.of_replica(step, 0) for step in range(10)])
    second = np.concatenate([split.of_replica(step, 0) for step in range(10, 20)])
    other = np.concatenate([replace(split, seed=8).of_replica(step, 0) for step in range(10)])
    assert sorted(first) == sorted(second) == list(range(1000))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 8))
def test_evaluation_deals_a_fixed_set_to_the_ranks(sequences: int, limit: int, ranks: int) -> None:
    taken = [int(number) for rank in range(ranks) for number in evaluation_share(sequences, limit, rank, ranks)]
    assert len(taken) == len(set(taken)) == min(sequences, limit)
    assert all(0 <= number < sequences for number in taken)


def folder_of(tmp_path: Path, count: int, text: bytes = b"x" * 40) -> Path:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number in range(count):
        place = tmp_path / ("deep/er" if number % 2 else "")
        (place / f"{number:03}.txt").write_bytes(text)
    return tmp_path


def training(pattern: str, **changes: object) -> Training:
    data = Data(train=(pattern,))
    made = Training(model=Model(preset=ModelPreset.TINY_LLAMA), data=data, tokens=1000, batch_size=1, sequence_length=8)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_fiftieth_file_is_held_out_and_the_order_is_that_of_the_names_bytes(tmp_path: Path) -> None:
    root = folder_of(tmp_path, 120)
    problems: list[Problem] = []
    files = find_files(Data(train=(f"{root}/**/*.txt",)), problems)
    names = [str(path.relative_to(root)) for path in sorted(root.rglob("*.txt"), key=lambda p: str(p).encode())]
    assert problems == []
    assert [str(path.relative_to(root)) for path in files.validation] == names[::50]
    assert len(files.train) == 117
    assert not set(files.train) & set(files.validation)


def test_given_validation_files_are_never_trained_on(tmp_path: Path) -> None:
    root = folder_of(tmp_path, 10)
    files = find_files(Data(train=(f"{root}/**/*.txt",), validation=(f"{root}/00[0-2].txt", f"{root}/002.txt")), [])
    assert [path.name for path in files.validation] == ["000.txt", "002.txt"]
    assert len(files.train) == 8


def test_stdlib_stands_for_the_library_of_this_python_without_installed_packages() -> None:
    problems: list[Problem] = []
    files = find_files(Data(train=("stdlib:**/*.py",)), problems)
    library = Path(sysconfig.get_path("stdlib"))
    assert problems == []
    assert library / "json" / "decoder.py" in files.train + files.validation
    assert not [path for path in files.train if "site-packages" in path.parts]


def test_documents_are_packed_with_their_start_and_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes("é".encode() + bytes(range(4)))
    spec = training(f"{tmp_path}/a.txt")
    spec = replace(
        spec,
        data=replace(spec.data, train=(f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"), validation=(f"{tmp_path}/v.txt",)),
    )
    (tmp_path / "v.txt").write_bytes(b"validate")
    out = tmp_path / "out"
    out.mkdir()
    write_corpus(spec, 1, out)
    corpus = open_corpus(out, 8)
    assert corpus.train.tolist() == [[256, 97, 98, 99, 257, 256, 0xC3, 0xA9]]
    assert corpus.validation.tolist() == [[256, *b"validat"]]


def summary_of(folder: Path, files: dict[str, bytes]) -> str:
    (folder / "text").mkdir(parents=True)
    for name, content in files.items():
        (folder / "text" / name).write_bytes(content)
    write_corpus(training(f"{folder}/text/*.txt"), 1, folder)
    return open_corpus(folder, 8).summary


def test_the_summary_of_the_files_is_the_same_in_another_folder_and_another_one_after_any_change(
    tmp_path: Path,
) -> None:
    files = {"0.txt": b"held out", "a.txt": b"some text here", "b.txt": b"and more"}  # of few files the first one
    first = summary_of(tmp_path / "first", files)
    assert first.startswith("2 files, 22 B, sha256 ")
    assert summary_of(tmp_path / "second", files) == first
    moved = {"a.txt": b"some text her", "b.txt": b"eand more"}  # the same bytes, cut elsewhere
    changes = [{"a.txt": b"some text hers"}, {"c.txt": b"x"}, {"b.txt": b""}, moved]
    told = [summary_of(tmp_path / str(number), files | change) for number, change in enumerate(changes)]
    assert len({first, *told}) == 5


def test_a_document_larger_than_a_piece_has_one_start_and_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosscloud_trainer.data.corpus._PIECE_BYTES", 5)
    (tmp_path / "long.txt").write_bytes(bytes(range(13)))
    spec = replace(training(f"{tmp_path}/long.txt"), sequence_length=15)
    write_corpus(spec, 1, tmp_path)
    assert open_corpus(tmp_path, 15).train.tolist() == [[256, *range(13), 257]]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("/nowhere/at/all/*.txt", "there is no folder"),
        ("{folder}/*.none", "no file matches it below"),
        ("{folder}", "no file matches it below"),
        ("{folder}/000.txt", "too few: one step takes 16"),
    ],
)
def test_data_that_cannot_be_used_is_one_message_with_the_field(tmp_path: Path, pattern: str, words: str) -> None:
    folder_of(tmp_path, 1, b"short")
    spec = training(pattern.format(folder=tmp_path))
    with pytest.raises(Failure) as caught:
        write_corpus(spec, 2, tmp_path)
    assert caught.value.code == ExitCode.INVALID_INPUT
    assert str(caught.value).startswith("training.data.train[0]: found ")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
