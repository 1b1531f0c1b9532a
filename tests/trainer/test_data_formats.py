"""Documents from text, JSONL and Parquet, local and by address; broken ones are errors that say where."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from trainer.s3 import S3Server, s3_server
from trainer.test_data import corpus_of, tokens_of, training
from trainer.test_data_packing import trained_tokenizer

from crosscloud_trainer.contract import Data, DataFormat, ExitCode, Source, Tokenizer
from crosscloud_trainer.data import formats
from crosscloud_trainer.data.corpus import write_corpus
from crosscloud_trainer.data.files import File
from crosscloud_trainer.data.formats import Broken, read_documents
from crosscloud_trainer.failures import Failure

TEXTS = ["first", "", "zweites Stück\nmit Zeilen", "第三", "x" * 3000]


def file_of(path: Path, kind: DataFormat, name: str = "text") -> File:
    return File(str(path), kind, name, "training.data.train[0]", str(path))


def documents(file: File, *, any_bytes: bool = False) -> list[str]:
    """Whole texts."""
    found, text = [], b""
    for piece in read_documents(file, any_bytes=any_bytes):
        if piece is None:
            found.append(text.decode())
            text = b""
        else:
            text += piece
    assert text == b""
    return found


def jsonl(path: Path, values: list[object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def table(path: Path, column: object, name: str = "text", **settings: object) -> Path:
    parquet.write_table(pyarrow.table({name: column, "other": list(range(len(column)))}), path, **settings)  # type: ignore[arg-type]
    return path


def test_lines_and_rows_are_documents(tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "a.jsonl", [{"body": text, "n": 1} for text in TEXTS])
    assert documents(file_of(lines, DataFormat.JSONL, "body")) == TEXTS
    rows = table(tmp_path / "a.parquet", TEXTS, "body", row_group_size=2)
    assert documents(file_of(rows, DataFormat.PARQUET, "body")) == TEXTS
    large = table(tmp_path / "b.parquet", pyarrow.array(TEXTS, pyarrow.large_string()))
    assert documents(file_of(large, DataFormat.PARQUET)) == TEXTS


@given(st.text(alphabet=st.sampled_from("aé第🙂\n"), max_size=60), st.integers(1, 9))
def test_pieces_of_a_text_file_add_up_to_it_and_never_end_within_a_letter(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PIECE_BYTES", size)
        pieces = list(read_documents(file_of(path, DataFormat.TEXT), any_bytes=False))
    assert pieces.pop() is None
    assert "".join(piece.decode() for piece in pieces if piece is not None) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n\n{"text": "b"\n', "line 3 is no JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": "a"}\n[1]\n', "line 2 must be an object with the field 'text', not list"),
        (b'{"body": "a", "id": 1}\n', "line 1 has no field 'text'; it has body, id"),
        (b'{"text": 5}\n', "line 1 must have text in the field 'text', not int"),
        (b'{"text": null}\n', "line 1 must have text in the field 'text', not NoneType"),
        (b'{"text": "\xff"}\n', "line 1 is no JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"text": "\\ud800"}\n', "line 1 is no JSON: 'utf-8' codec can't encode character"),
        (b"[" * 200_000 + b"\n", "line 1 is no JSON: "),
    ],
)
def test_a_broken_line_is_told_by_its_number_and_field(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(Broken) as caught:
        documents(file_of(tmp_path / "a.jsonl", DataFormat.JSONL))
    assert str(caught.value).startswith(words)


def test_broken_rows_and_columns_are_told(tmp_path: Path) -> None:
    bad = pyarrow.array([b"good", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    cases = {
        "is no whole Parquet file": Path(tmp_path / "a.parquet"),
        "has no column 'text'; it has body, other": table(tmp_path / "b.parquet", TEXTS, "body"),
        "must have text in the column 'text', not int64": table(tmp_path / "c.parquet", [1, 2]),
        "row 2 has nothing in the column 'text'": table(tmp_path / "d.parquet", ["a", None]),
        "row 2 is no UTF-8 in the column 'text'": table(tmp_path / "e.parquet", bad),
    }
    whole = table(tmp_path / "whole.parquet", TEXTS).read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    for words, path in cases.items():
        with pytest.raises(Broken) as caught:
            documents(file_of(path, DataFormat.PARQUET))
        assert str(caught.value).startswith(words)


def test_text_that_is_no_utf_8_is_told_by_its_line_unless_bytes_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xffe\nfour")
    with pytest.raises(Broken, match=r"^line 3 is no UTF-8 "):
        documents(file_of(tmp_path / "a.txt", DataFormat.TEXT))
    pieces = list(read_documents(file_of(tmp_path / "a.txt", DataFormat.TEXT), any_bytes=True))
    assert pieces == [b"one\ntwo\nthr\xffe\nfour", None]


def test_all_broken_files_are_named_at_once_with_their_field(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    source = Source(name="web", paths=(f"{tmp_path}/*.jsonl",))
    with pytest.raises(Failure) as caught:
        write_corpus(replace(training(""), data=Data(sources=(source,))), [["m"]], 0, tmp_path)
    assert caught.value.code == ExitCode.INVALID_INPUT
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    for line, name in zip(lines, "ab", strict=True):
        assert line.startswith("training.data.sources[0].paths[0]: found ")
        assert f"{tmp_path}/{name}.jsonl line 2 must have text in the field 'text', not int" in line


def test_a_format_is_told_by_the_suffix_unless_the_manifest_says_it(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.JSONL", [{"text": "ab"}] * 3)
    jsonl(tmp_path / "b.json", [{"text": "ab"}] * 3)
    suffix = corpus_of(training(f"{tmp_path}/a.JSONL"), tmp_path / "1")
    assert tokens_of(suffix.train[0]) == [[256, 97, 98, 257, 256, 97, 98, 257]]
    source = Source(name="web", paths=(f"{tmp_path}/b.json",), format=DataFormat.JSONL)
    said = corpus_of(replace(training(""), data=Data(sources=(source,))), tmp_path / "2")
    assert tokens_of(said.train[0]) == tokens_of(suffix.train[0])
    plain = corpus_of(training(f"{tmp_path}/b.json"), tmp_path / "3")
    assert bytes(tokens_of(plain.train[0])[0][1:]) == b'{"text"'


def test_a_row_group_of_48_megabytes_is_read_in_bounded_memory(tmp_path: Path) -> None:
    texts = [f"{number:07}" * 1750 for number in range(4000)]  # 12 kB each
    path = table(tmp_path / "a.parquet", texts, row_group_size=4000, compression="none", use_dictionary=False)
    assert path.stat().st_size > 48e6
    pool = pyarrow.default_memory_pool()
    del texts
    before, tops, count = pool.bytes_allocated(), [], 0
    tracemalloc.start()
    for piece in read_documents(file_of(path, DataFormat.PARQUET), any_bytes=True):
        count += piece is None
        tops.append(pool.bytes_allocated() - before)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 4000
    assert max(tops) < 24e6
    assert most < 12e6


def test_a_long_jsonl_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    with (tmp_path / "a.jsonl").open("w") as out:
        out.writelines(line for _ in range(2000))
    tracemalloc.start()
    count = sum(
        piece is None for piece in read_documents(file_of(tmp_path / "a.jsonl", DataFormat.JSONL), any_bytes=True)
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 2000
    assert most < 1e6


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def test_an_object_store_is_read_by_glob_and_address(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = s3.folder / "corpus"
    (bucket / "deep").mkdir(parents=True)
    for number in range(3):
        jsonl(bucket / f"{number}.jsonl", [{"text": f"{number}a"}, {"text": f"{number}b"}])
    table(bucket / "deep" / "z.parquet", ["za", "zb"])
    pattern = replace(training(""), data=Data(train=("s3://corpus/*.jsonl", "s3://corpus/**/*.parquet")))
    corpus = corpus_of(pattern, tmp_path / "1")
    local = replace(training(""), data=Data(train=(f"{bucket}/*.jsonl", f"{bucket}/**/*.parquet")))
    assert tokens_of(corpus.train[0]) == tokens_of(corpus_of(local, tmp_path / "2").train[0])
    assert corpus.summaries == corpus_of(local, tmp_path / "3").summaries
    single = replace(training(""), data=Data(train=("s3://corpus/0.jsonl", "s3://corpus/1.jsonl")))
    assert len(corpus_of(single, tmp_path / "4").train[0]) == 1
    (s3.folder / "corpus" / "words").mkdir()
    for path in Path(trained_tokenizer(tmp_path / "words")).iterdir():
        (s3.folder / "corpus" / "words" / path.name).write_bytes(path.read_bytes())
    for address in ("s3://corpus/words", "s3://corpus/words/", "s3://corpus/words/tokenizer.json"):
        spoken = replace(pattern, data=replace(pattern.data, tokenizer=Tokenizer.FILE, tokenizer_file=address))
        corpus_of(replace(spoken, sequence_length=1), tmp_path / address.replace("/", "-"))
    missing = replace(training(""), data=Data(train=("s3://corpus/none.jsonl",)))
    with pytest.raises(Failure, match=r"^training.data.train\[0\]: found .*; no file matches it") as caught:
        corpus_of(missing, tmp_path / "5")
    assert caught.value.code == ExitCode.INVALID_INPUT


def test_a_store_that_does_not_answer_is_worth_another_attempt_and_a_refusal_is_not(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    spec = replace(training(""), data=Data(train=("s3://corpus/*.jsonl",)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(Failure, match=r"^training.data.train\[0\]: ") as caught:
        corpus_of(spec, tmp_path / "1")
    assert caught.value.code == ExitCode.INVALID_INPUT
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Failure, match=r"^training.data.train\[0\]: ") as caught:
        corpus_of(spec, tmp_path / "2")
    assert caught.value.code == ExitCode.STORAGE_UNREACHABLE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.exists, "there is no such file or folder"),
        (lambda path: path.write_text("{}"), "no tokenizer can be read there"),
        (lambda path: path.mkdir(), "no tokenizer can be read there"),
    ],
)
def test_a_tokenizer_that_is_none_is_told_by_its_field(tmp_path: Path, make: object, words: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    make(tmp_path / "tokenizer.json")  # type: ignore[operator]
    data = Data(train=(f"{tmp_path}/a.txt",), tokenizer=Tokenizer.FILE, tokenizer_file=str(tmp_path / "tokenizer.json"))
    with pytest.raises(Failure, match=f"^training.data.tokenizerFile: found .*; {words}") as caught:
        write_corpus(replace(training(""), data=data), [["m"]], 0, tmp_path)
    assert caught.value.code == ExitCode.INVALID_INPUT
