"""The token files of one pod: written once by its launcher, read by all of its ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosscloud_trainer.contract import DataFormat, ExitCode, Problem, Tokenizer, Training
from crosscloud_trainer.data.files import File, Found, find_files, unreadable, words
from crosscloud_trainer.data.formats import Broken, Pieces, read_documents
from crosscloud_trainer.data.sequences import Batch, Sequences, TokenFile
from crosscloud_trainer.data.split import Indices, Share, Split
from crosscloud_trainer.data.tokens import ByteEncoder, Encoder, Tokens, Vocabulary
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.sizes import bytes_text

HELD_OUT_EVERY = 50  # without `validation`, one document of so many is kept from training
TOKENIZER = "tokenizer"  # the folder with the tokenizer, where it is not Bytes
_VALIDATION = "validation"
_ABOUT = "corpus.json"
_BATCH_BYTES = 2**22  # encoded at a time, so that an encoder can use all cores
_MOST_PROBLEMS = 10  # of as many files as there may be
_DIGEST_DIGITS = 32  # enough to tell apart what differs by mistake, and it can be read to the end


@dataclass(frozen=True)
class Corpus:
    """What a replica reads: the sequences of its sources in the order of the manifest, and those held out.

    `summaries` tells each source by its place in the manifest: number of files, size, and a digest of their names and
    texts in the order in which they are read.
    """

    train: Mapping[int, Sequences]
    validation: Sequences
    summaries: Mapping[int, str]
    vocabulary: Vocabulary
    tokenizer: str
    tokenizer_folder: Path | None

    @property
    def summary(self) -> str:
        """What all nodes of the replica must have alike."""
        return "; ".join([*self.summaries.values(), self.tokenizer])

    def agreement(self, training: Training) -> dict[str, str]:
        """What must be alike in all replicas, by name: the sources that are open to all of them, and the tokenizer."""
        sources = training.data.all_sources
        shared = {place: text for place, text in self.summaries.items() if sources[place].members is None}
        return {f"data of {sources[place].name}": text for place, text in shared.items()} | {
            "tokenizer": self.tokenizer
        }

    def split(self, training: Training, replicas: Sequence[Collection[str]], me: int) -> Split:
        """The sequences of replica number `me`; `replicas` has the members of each."""
        counts = {place: len(sequences) for place, sequences in self.train.items()}
        return Split(shares_of(training, replicas, me, counts), me, training.batch_size, training.seed)

    def take(self, rows: Indices) -> Batch:
        """Tokens and document starts of rows that a `Split` gave, each of shape (rows, sequence_length)."""
        order = list(self.train.values())
        parts = [order[place].read([number]) for place, number in rows.tolist()]
        return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([starts for _, starts in parts])

    def starts(self, rows: Indices) -> NDArray[np.bool_]:
        """Only the document starts of `take`."""
        order = list(self.train.values())
        return np.stack([order[place].starts(number) for place, number in rows.tolist()])


def shares_of(
    training: Training, replicas: Sequence[Collection[str]], me: int, counts: Mapping[int, int]
) -> tuple[Share, ...]:
    """What replica number `me` has of each source that it reads; `counts` has their sequences by place."""
    read = [set(training.data.sources_of(members)) for members in replicas]
    found = []
    for place, count in sorted(counts.items()):
        readers = [number for number, places in enumerate(read) if place in places]
        found.append(Share(place, count, readers.index(me), len(readers)))
    return tuple(found)


def write_corpus(training: Training, replicas: Sequence[Collection[str]], me: int, folder: Path) -> str:
    """Tokenize what replica number `me` reads into `folder`; returns a line that says what was found.

    `replicas` has the members of each replica. Raises Failure naming the field when files are missing, can't be read,
    are broken or too small.
    """
    problems: list[Problem] = []
    encoder = _encoder(training, folder)
    files = find_files(training.data, replicas[me], problems)
    if problems:
        raise invalid(problems)
    train: dict[int, TokenFile] = {}
    summaries: dict[int, str] = {}
    with TokenFile(folder / _VALIDATION, encoder.vocabulary) as held:
        for found in files.sources:
            every = 0 if files.validation or not _many_documents(found.files) else HELD_OUT_EVERY
            with TokenFile(folder / str(found.place), encoder.vocabulary) as out:
                summaries[found.place] = _write(found.files, encoder, out, held, every, problems)
            train[found.place] = out
        _write(files.validation, encoder, held, held, 0, problems)
    if not problems:
        counts = {place: out.tokens // training.sequence_length for place, out in train.items()}
        _check_sizes(training, files.sources, shares_of(training, replicas, me, counts), held.tokens, problems)
    if problems:
        raise invalid(problems)
    about = {"summaries": summaries, "tokenizer": encoder.summary, "vocabulary": dataclasses.asdict(encoder.vocabulary)}
    (folder / _ABOUT).write_text(json.dumps(about))
    return _told(training, train, summaries, held.tokens)


def open_corpus(folder: Path, sequence_length: int) -> Corpus:
    """What `write_corpus` left in `folder`."""
    about = json.loads((folder / _ABOUT).read_text())
    vocabulary = Vocabulary(**about["vocabulary"])
    summaries = {int(place): text for place, text in about["summaries"].items()}

    def sequences(name: str) -> Sequences:
        return Sequences(folder / name, sequence_length, vocabulary)

    tokenizer = folder / TOKENIZER
    train = {place: sequences(str(place)) for place in sorted(summaries)}
    return Corpus(
        train,
        sequences(_VALIDATION),
        summaries,
        vocabulary,
        about["tokenizer"],
        tokenizer if tokenizer.is_dir() else None,
    )


def _encoder(training: Training, folder: Path) -> Encoder:
    if training.data.tokenizer is Tokenizer.BYTES:
        return ByteEncoder()
    from crosscloud_trainer.data.tokenizer import read_tokenizer  # transformers takes seconds to load

    return read_tokenizer(training.data.tokenizer_file or "", folder / TOKENIZER)


def _many_documents(files: Sequence[File]) -> bool:
    """Whether one can be held out and others are left: of rows and lines there are many."""
    return len(files) > 1 or any(file.format is not DataFormat.TEXT for file in files)


def _write(
    files: Iterable[File], encoder: Encoder, out: TokenFile, held: TokenFile, every: int, problems: list[Problem]
) -> str:
    """The documents of a source into `out`, of each `every` the first one into `held` (0: none); returns what was read.

    That doesn't depend on other sources: replicas which don't read those must hold out the same documents of this one.
    """
    tally, documents = _Tally(), 0
    for file in files:
        tally.begin(file)
        target = None
        try:
            for ids in _encoded(_read(file, encoder, tally), encoder):
                if target is None:
                    target = held if every and documents % every == 0 else out
                    documents += 1
                if ids is not None:
                    target.add(ids)
                else:
                    target.end()
                    target = None
        except Broken as fault:
            problems.append(Problem(file.field, file.pattern, f"{file.path} {fault}"))
            if len(problems) >= _MOST_PROBLEMS:
                break
    return str(tally)


class _Tally:
    """Number of files, size of their texts, and a digest that any change of a name, a text or their order changes."""

    def __init__(self) -> None:
        self._files = self._size = self._length = 0
        self._digest = hashlib.sha256()

    def begin(self, file: File) -> None:
        self._files += 1
        self._digest.update(os.fsencode(file.path.rpartition("/")[2]) + b"\0")

    def see(self, piece: bytes | None) -> None:
        if piece is None:
            self._digest.update(self._length.to_bytes(8))
            self._length = 0
            return
        self._digest.update(piece)
        self._length += len(piece)
        self._size += len(piece)

    def __str__(self) -> str:
        return f"{self._files:,} files, {bytes_text(self._size)}, sha256 {self._digest.hexdigest()[:_DIGEST_DIGITS]}"


def _read(file: File, encoder: Encoder, tally: _Tally) -> Pieces:
    """A file's documents. Raises Broken for what another attempt won't mend, else Failure."""
    try:
        for piece in read_documents(file, any_bytes=encoder.any_bytes):
            tally.see(piece)
            yield piece
    except Broken:
        raise
    except Exception as fault:  # every file system has its own tree of errors
        failure = unreadable(file.field, file.pattern, file.path, fault)
        if failure.code != ExitCode.INVALID_INPUT:
            raise failure from fault
        raise Broken(f"can't be read: {words(fault)}") from fault


def _encoded(pieces: Pieces, encoder: Encoder) -> Iterator[Tokens | None]:
    """The ids of each piece, None after a document."""
    batch: list[bytes | None] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece or b"")
        if size >= _BATCH_BYTES:
            yield from _encode(batch, encoder)
            batch, size = [], 0
    yield from _encode(batch, encoder)


def _encode(batch: Sequence[bytes | None], encoder: Encoder) -> Iterator[Tokens | None]:
    encoded = iter(encoder.encode([piece for piece in batch if piece is not None]))
    for piece in batch:
        yield None if piece is None else next(encoded)


def _check_sizes(
    training: Training, sources: Sequence[Found], shares: Sequence[Share], held: int, problems: list[Problem]
) -> None:
    length, batch = training.sequence_length, training.batch_size
    there = sum(share.count for share in shares)
    if there < batch:
        allowed = (
            f"too few: one step takes {batch:,} sequences of {length:,} tokens, and this replica has {there:,}; give "
            "more text or make batchSize or sequenceLength smaller"
        )
        last = sources[-1]
        number = len(last.source.paths) - 1
        problems.append(Problem(f"{training.data.path_of(last.place)}[{number}]", last.source.paths[number], allowed))
    if training.data.validation and held < length:
        last_glob = len(training.data.validation) - 1
        allowed = f"{held:,} tokens are too few: one sequence takes {length:,}"
        problems.append(Problem(f"training.data.validation[{last_glob}]", training.data.validation[last_glob], allowed))


def _told(training: Training, train: Mapping[int, TokenFile], summaries: Mapping[int, str], held: int) -> str:
    sources = training.data.all_sources
    parts = [f"{out.tokens:,} tokens of {sources[place].name} ({summaries[place]})" for place, out in train.items()]
    told = f"{held:,} tokens held out for validation"
    if held < training.sequence_length:
        told = "no validation: it needs two documents or more, or training.data.validation"
    return "; ".join([*parts, told])
