"""The data of a job: which files, which tokens, and which sequences a rank takes."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from crosscloud_trainer.contract import Data, ExitCode, Model, ModelPreset, Packing, Problem, Source, Training
from crosscloud_trainer.data.corpus import Corpus, open_corpus, write_corpus
from crosscloud_trainer.data.files import find_files
from crosscloud_trainer.data.sequences import Sequences
from crosscloud_trainer.data.split import Share, Split, evaluation_share
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.link.handshake import differences
from crosscloud_trainer.tasks.causal import CausalTask


@st.composite
def splits(draw: st.DrawFn) -> list[Split]:
    """The splits of all replicas of a job, each of which reads all or some of the sources; sizes are any."""
    replicas = draw(st.integers(1, 5))
    batch, seed = draw(st.sampled_from([1, 2, 4, 6, 12])), draw(st.integers(0, 2**31 - 1))
    shares: list[list[Share]] = [[] for _ in range(replicas)]
    for place in range(draw(st.integers(1, 3))):
        everyone = list(range(replicas))
        readers = everyone if place == 0 else sorted(draw(st.sets(st.sampled_from(everyone), min_size=1)))
        count = draw(st.integers(replicas, 150))
        for number, replica in enumerate(readers):
            shares[replica].append(Share(place, count, number, len(readers)))
    return [Split(tuple(found), replica, batch, seed) for replica, found in enumerate(shares)]


layouts = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 12]))  # replicas, and the batch of each


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def ids(split: Split, first: int, count: int) -> list[tuple[int, int]]:
    """(source, sequence) of the samples of a replica from number `first` on."""
    steps = range(first // split.batch_size, -(-(first + count) // split.batch_size))
    rows = np.concatenate([split.of_replica(step) for step in steps])
    start = first - steps[0] * split.batch_size
    return [(split.shares[place].place, sequence) for place, sequence in rows[start : start + count].tolist()]


@given(splits(), st.integers(0, 3))
def test_in_an_epoch_each_sequence_is_seen_once_and_by_one_replica(all_splits: list[Split], epoch: int) -> None:
    seen = [one for split in all_splits for one in ids(split, epoch * split.per_epoch, split.per_epoch)]
    counts = {share.place: share.sequences for split in all_splits for share in split.shares}
    assert sorted(seen) == [(place, number) for place in sorted(counts) for number in range(counts[place])]


@given(splits(), st.integers(0, 60), st.data())
def test_the_batch_of_a_replica_does_not_depend_on_its_number_of_ranks(
    all_splits: list[Split], step: int, data: st.DataObject
) -> None:
    split = data.draw(st.sampled_from(all_splits))
    count = data.draw(st.sampled_from(divisors(split.batch_size)))
    parts = [split.of_rank(step, rank, count) for rank in range(count)]
    assert np.array_equal(np.concatenate(parts), split.of_replica(step))
    assert len(np.concatenate(parts)) == split.batch_size


@given(st.integers(1, 200), layouts, layouts, st.data())
def test_of_one_source_another_layout_takes_the_very_next_samples_and_at_most_one_step_of_them_twice(
    sequences: int, before: tuple[int, int], after: tuple[int, int], data: st.DataObject
) -> None:
    def taken(layout: tuple[int, int], first: int, last: int | None) -> list[tuple[int, int]]:
        """What all replicas take from step `first` to step `last`, or to the end of their epochs."""
        replicas, batch = layout
        found = []
        for reader in range(replicas):
            split = Split((Share(0, sequences, reader, replicas),), reader, batch, seed=5)
            stop = split.per_epoch if last is None else last * batch
            found += ids(split, first * batch, stop - first * batch) if stop > first * batch else []
        return found

    sequences = max(sequences, before[0], after[0])
    stopped = data.draw(st.integers(0, sequences // before[0] // before[1]))
    seen, per_step = stopped * before[0] * before[1], after[0] * after[1]
    resumed = seen // per_step  # as a checkpoint's tokens say it
    counts = Counter(taken(before, 0, stopped) + taken(after, resumed, None))
    assert sorted(counts) == [(0, number) for number in range(sequences)]
    assert sum(counts.values()) - sequences == seen - resumed * per_step


def test_101_samples_over_4_replicas_are_dealt_whole_and_every_replica_has_a_batch_at_every_step() -> None:
    all_splits = [Split((Share(0, 101, replica, 4),), replica, 8, 3) for replica in range(4)]
    assert [split.per_epoch for split in all_splits] == [26, 25, 25, 25]
    for step in range(40):
        assert [split.of_replica(step).shape for split in all_splits] == [(8, 2)] * 4


def test_a_replica_whose_source_ends_early_begins_it_anew_while_another_is_still_in_its_first_epoch() -> None:
    small = Split((Share(0, 10, 0, 1),), 0, 4, 0)
    large = Split((Share(1, 1000, 0, 1),), 1, 4, 0)
    assert sorted(ids(small, 0, 40)) == sorted((0, number) for number in range(10) for _ in range(4))
    assert len(set(ids(large, 0, 40))) == 40


def test_the_next_epoch_has_another_order_and_another_seed_too() -> None:
    split = Split((Share(0, 1000, 0, 1),), 0, 100, 7)
    first, second = ids(split, 0, 1000), ids(split, 1000, 1000)
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != ids(replace(split, seed=8), 0, 1000)


@given(st.integers(0, 12), st.sampled_from([1, 2, 4]), st.integers(0, 20))
def test_a_rank_takes_micro_batches_of_its_part_of_the_step_whose_weights_have_the_mean_1(
    seed: int, ranks: int, step: int
) -> None:
    starts = np.random.default_rng(seed).random((40, 9)) < 0.3
    corpus = StartsOnly(starts)
    split = Split((Share(0, 40, 0, 1),), 0, 8, seed)
    for packing in Packing:
        found = [
            (batch.weight, batch.inputs["input_ids"][:, 0].tolist())
            for rank in range(ranks)
            for batch in CausalTask(corpus, split, packing, rank, ranks, 2).micro_batches(step, torch.device("cpu"))  # type: ignore[arg-type]
        ]
        assert [number for _, numbers in found for number in numbers] == [
            row[1] for row in split.of_replica(step).tolist()
        ]
        assert len(found) == 4
        assert sum(weight for weight, _ in found) == pytest.approx(4)


class StartsOnly:
    """Sequences whose tokens are their own number."""

    def __init__(self, starts: NDArray[np.bool_]) -> None:
        self._starts = starts

    def starts(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._starts[rows[:, 1]]

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
        return np.repeat(rows[:, 1:].astype(np.uint16), self._starts.shape[1], axis=1), self.starts(rows)


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


def test_the_order_of_files_is_that_of_their_names_bytes(tmp_path: Path) -> None:
    root = folder_of(tmp_path, 120)
    problems: list[Problem] = []
    files = find_files(Data(train=(f"{root}/**/*.txt",)), ["m"], problems)
    names = [str(path) for path in sorted(root.rglob("*.txt"), key=lambda p: str(p).encode())]
    assert problems == []
    assert [file.path for file in files.sources[0].files] == names
    assert files.validation == ()


def test_given_validation_files_are_never_trained_on(tmp_path: Path) -> None:
    root = folder_of(tmp_path, 10)
    data = Data(train=(f"{root}/**/*.txt",), validation=(f"{root}/00[0-2].txt", f"{root}/002.txt"))
    files = find_files(data, ["m"], [])
    assert [Path(file.path).name for file in files.validation] == ["000.txt", "002.txt"]
    assert len(files.sources[0].files) == 8


def test_stdlib_stands_for_the_library_of_this_python_without_installed_packages() -> None:
    problems: list[Problem] = []
    paths = [Path(file.path) for file in find_files(Data(train=("stdlib:**/*.py",)), ["m"], problems).sources[0].files]
    assert problems == []
    assert Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py" in paths
    assert not [path for path in paths if "site-packages" in path.parts]


def corpus_of(spec: Training, folder: Path, replicas: Sequence[Sequence[str]] = (("m",),), me: int = 0) -> Corpus:
    folder.mkdir(exist_ok=True, parents=True)
    write_corpus(spec, replicas, me, folder)
    return open_corpus(folder, spec.sequence_length)


def tokens_of(sequences: Sequences) -> list[list[int]]:
    return sequences.read(range(len(sequences)))[0].tolist() if len(sequences) else []  # type: ignore[no-any-return]


def test_documents_are_packed_with_their_start_and_end_and_it_is_known_where_each_starts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes("é".encode() + bytes(range(4)))
    (tmp_path / "v.txt").write_bytes(b"validate")
    spec = training("")
    train = (f"{tmp_path}/a.txt", f"{tmp_path}/b.txt")
    spec = replace(spec, data=replace(spec.data, train=train, validation=(f"{tmp_path}/v.txt",)))
    corpus = corpus_of(spec, tmp_path / "out")
    assert tokens_of(corpus.train[0]) == [[256, 97, 98, 99, 257, 256, 0xC3, 0xA9]]
    assert corpus.train[0].starts(0).nonzero()[0].tolist() == [0, 5]
    assert tokens_of(corpus.validation) == [[256, *b"validat"]]


def test_every_fiftieth_document_is_held_out_in_each_format(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(120):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(f"{number:06}")
    lines = "".join(json.dumps({"text": f"{number:06}"}) + "\n" for number in range(120))
    (tmp_path / "all.jsonl").write_text(lines)
    for pattern in ("texts/*.txt", "all.jsonl"):
        corpus = corpus_of(training(f"{tmp_path}/{pattern}"), tmp_path / pattern[:3])
        kept = [bytes(row[1:-1]).decode() for row in tokens_of(corpus.validation)]
        assert kept == ["000000", "000050", "000100"]
        assert len(corpus.train[0]) == 117


def summary_of(folder: Path, files: dict[str, bytes]) -> str:
    (folder / "text").mkdir(parents=True)
    for name, content in files.items():
        (folder / "text" / name).write_bytes(content)
    return corpus_of(training(f"{folder}/text/*.txt"), folder).summaries[0]


def test_the_summary_of_the_files_is_the_same_in_another_folder_and_another_one_after_any_change(
    tmp_path: Path,
) -> None:
    files = {"0.txt": b"held out", "a.txt": b"some text here", "b.txt": b"and more"}
    first = summary_of(tmp_path / "first", files)
    assert first.startswith("3 files, 30 B, sha256 ")
    assert summary_of(tmp_path / "second", files) == first
    moved = {"a.txt": b"some text her", "b.txt": b"eand more"}  # the same bytes, cut elsewhere
    changes = [{"a.txt": b"some text hers"}, {"c.txt": b"x"}, {"b.txt": b""}, moved]
    told = [summary_of(tmp_path / str(number), files | change) for number, change in enumerate(changes)]
    assert len({first, *told}) == 5


def test_a_document_larger_than_a_piece_has_one_start_and_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosscloud_trainer.data.formats.PIECE_BYTES", 5)
    (tmp_path / "long.txt").write_bytes(bytes(range(13)))
    spec = replace(training(f"{tmp_path}/long.txt"), sequence_length=15)
    assert tokens_of(corpus_of(spec, tmp_path / "out").train[0]) == [[256, *range(13), 257]]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("/nowhere/at/all/*.txt", "there is no folder"),
        ("{folder}/*.none", "no file matches it below"),
        ("{folder}", "no file matches it below"),
        ("{folder}/000.txt", "too few: one step takes 2 sequences of 8 tokens, and this replica has 0"),
        ("nosuch://bucket/a", "no file system serves this address"),
        ("file:///nowhere/*.txt", "no file matches it"),
    ],
)
def test_data_that_cannot_be_used_is_one_message_with_the_field(tmp_path: Path, pattern: str, words: str) -> None:
    folder_of(tmp_path, 1, b"short")
    spec = replace(training(pattern.format(folder=tmp_path)), batch_size=2)
    with pytest.raises(Failure) as caught:
        write_corpus(spec, [["a"], ["b"]], 0, tmp_path)
    assert caught.value.code == ExitCode.INVALID_INPUT
    assert str(caught.value).startswith("training.data.train[0]: found ")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def private(tmp_path: Path) -> Training:
    """All replicas read `web`, those in west also `notes`; those files exist where they may be read only."""
    for name, count in (("web", 11), ("notes", 7)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{name[0]}{number:05}")
    sources = (
        Source(name="web", paths=(f"{tmp_path}/web/*.txt",)),
        Source(name="notes", paths=(f"{tmp_path}/notes/*.txt",), members=("west",)),
    )
    return replace(training(""), data=Data(sources=sources))


def test_a_private_source_is_read_in_its_members_only_and_what_is_compared_is_what_all_read(tmp_path: Path) -> None:
    spec = private(tmp_path)
    replicas = [["east"], ["west"], ["west"]]
    corpora = [corpus_of(spec, tmp_path / f"pod-{me}", replicas, me) for me in range(3)]
    assert [sorted(corpus.train) for corpus in corpora] == [[0], [0, 1], [0, 1]]
    agreements = [corpus.agreement(spec) for corpus in corpora]
    assert agreements[0] == agreements[1] == agreements[2]
    assert sorted(agreements[0]) == ["data of web", "tokenizer"]
    taken = []
    for me, corpus in enumerate(corpora):
        split = corpus.split(spec, replicas, me)
        rows = np.concatenate([split.of_replica(step) for step in range(split.per_epoch)])
        taken += [bytes(row[1:-1].astype(np.uint8)).decode() for row in corpus.take(rows)[0]]
    held = {bytes(row[1:-1]).decode() for corpus in corpora for row in tokens_of(corpus.validation)}
    assert held == {"n00000", "w00000"}
    kept = [f"n{number:05}" for number in range(1, 7)] + [f"w{number:05}" for number in range(1, 11)]
    assert sorted(taken) == kept


def test_what_is_held_out_of_a_source_does_not_depend_on_what_else_a_replica_reads(tmp_path: Path) -> None:
    spec = private(tmp_path)
    spec = replace(spec, data=replace(spec.data, sources=spec.data.all_sources[::-1]))
    replicas = [["east"], ["west"]]
    east, west = (corpus_of(spec, tmp_path / f"pod-{me}", replicas, me).train for me in range(2))
    assert (sorted(east), sorted(west)) == ([1], [0, 1])
    assert tokens_of(east[1]) == tokens_of(west[1])


def test_a_changed_file_of_an_open_source_shows_in_the_handshake_by_the_sources_name(tmp_path: Path) -> None:
    spec = private(tmp_path)
    replicas = [["east"], ["west"]]
    first = corpus_of(spec, tmp_path / "pod-0", replicas, 0).agreement(spec)
    (tmp_path / "web" / "3.txt").write_text("changed")
    (tmp_path / "notes" / "3.txt").write_text("changed")
    told = differences(first, corpus_of(spec, tmp_path / "pod-1", replicas, 1).agreement(spec))
    assert told.startswith("data of web: 11 files, 66 B, sha256 ")
    assert "notes" not in told


def test_a_replica_in_a_member_without_any_source_says_so(tmp_path: Path) -> None:
    spec = private(tmp_path)
    spec = replace(spec, data=replace(spec.data, sources=spec.data.all_sources[1:]))
    with pytest.raises(Failure, match=r'training.data.sources: found \["notes"\]; none of them is for member north'):
        write_corpus(spec, [["north"]], 0, tmp_path)


def test_a_replica_with_stages_in_two_members_reads_only_what_both_hold(tmp_path: Path) -> None:
    data = private(tmp_path).data
    assert data.sources_of({"west"}) == (0, 1)
    assert data.sources_of({"west", "east"}) == (0,)


def test_a_token_file_that_became_shorter_is_an_error_with_its_name(tmp_path: Path) -> None:
    corpus = corpus_of(private(tmp_path), tmp_path / "out")
    with (tmp_path / "out" / "0").open("r+b") as out:
        out.truncate(20)
    with pytest.raises(OSError, match="has become shorter: sequence 5 of 10 isn't there") as caught:
        corpus.train[0].read([5])
    assert caught.value.filename == str(tmp_path / "out" / "0")
