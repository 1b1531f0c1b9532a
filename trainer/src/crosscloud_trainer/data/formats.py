"""Files to documents, streamed: a document is its text in pieces of UTF-8, then None.

Of a text file the whole is one document, of JSONL each line, of Parquet each row.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import IO, Any

from crosscloud_trainer.contract import DataFormat
from crosscloud_trainer.data.files import File

PIECE_BYTES = 2**20
LINE_BYTES = 2**26  # of JSONL: a longer one is more likely no JSONL at all
_ROWS = 64  # read at a time, so that long texts in them don't add up
_SHOWN = 5  # names of fields that a message lists

Pieces = Iterator[bytes | None]


class Broken(Exception):
    """What is wrong in a file, and where in it."""


def read_documents(file: File, *, any_bytes: bool) -> Pieces:
    """Raises Broken, OSError, or what the file system has for errors. `any_bytes` takes text that is no UTF-8."""
    with file.open() as opened:
        if file.format is DataFormat.JSONL:
            yield from _lines(opened, file.name)
        elif file.format is DataFormat.PARQUET:
            yield from _rows(opened, file.name)
        else:
            yield from _text(opened, any_bytes=any_bytes)


def _text(opened: IO[bytes], *, any_bytes: bool) -> Pieces:
    """Pieces end with a line where lines end at all, and never within a letter."""
    line, rest, new = 1, b"", b" "
    while new:
        new = opened.read(PIECE_BYTES)
        if new and not new.endswith(b"\n"):
            new += opened.readline(PIECE_BYTES)
        piece = rest + new
        whole = _whole_letters(piece) if new else piece
        rest = piece[len(whole) :]
        if not any_bytes:
            try:
                whole.decode()
            except UnicodeDecodeError as fault:
                at = line + whole[: fault.start].count(b"\n")
                raise Broken(f"line {at} is no UTF-8 ({fault.reason}); only tokenizer Bytes takes any bytes") from fault
            line += whole.count(b"\n")
        if whole:
            yield whole
    yield None


def _whole_letters(piece: bytes) -> bytes:
    """`piece` without the first bytes of a letter whose others are missing at its end."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte & 0xC0 != 0x80:  # it begins a letter, of 1 to 4 bytes
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return piece[:-back] if length > back else piece
    return piece


def _lines(opened: IO[bytes], name: str) -> Pieces:
    for number in itertools.count(1):
        line = opened.readline(LINE_BYTES + 1)
        if not line:
            return
        if len(line) > LINE_BYTES:
            raise Broken(f"line {number} has more than {LINE_BYTES:,} bytes; is this JSONL?")
        if line.isspace():
            continue
        try:
            yield _member(json.loads(line.rstrip(b"\r\n")), name).encode()
        except Broken as fault:
            raise Broken(f"line {number} {fault}") from None
        except (ValueError, RecursionError) as fault:  # no JSON, no UTF-8, half a letter
            what = f"{fault.msg} at column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else fault
            raise Broken(f"line {number} is no JSON: {what}") from fault
        yield None


def _member(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise Broken(f"must be an object with the field {name!r}, not {type(value).__name__}")
    if name not in value:
        raise Broken(f"has no field {name!r}; it has {_listed(value)}")
    if not isinstance(value[name], str):
        raise Broken(f"must have text in the field {name!r}, not {type(value[name]).__name__}")
    return str(value[name])


def _rows(opened: IO[bytes], name: str) -> Pieces:
    import pyarrow as arrow  # half a second that other formats need not wait
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(opened, pre_buffer=False, buffer_size=PIECE_BYTES)
        schema = table.schema_arrow
        if name not in schema.names:
            raise Broken(f"has no column {name!r}; it has {_listed(schema.names)}")
        kind = schema.field(name).type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            raise Broken(f"must have text in the column {name!r}, not {kind}")
        row = 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=[name]):
            for value in batch.column(0).cast(arrow.large_binary()).to_pylist():
                row += 1
                yield _checked(value, row, name)
                yield None
    except arrow.ArrowException as fault:
        raise Broken(f"is no whole Parquet file: {' '.join(str(fault).split())[:200]}") from fault


def _checked(value: bytes | None, row: int, name: str) -> bytes:
    if value is None:
        raise Broken(f"row {row} has nothing in the column {name!r}")
    try:
        value.decode()
    except UnicodeDecodeError as fault:
        raise Broken(f"row {row} is no UTF-8 in the column {name!r} ({fault.reason})") from fault
    return value


def _listed(names: Any) -> str:
    found = [str(name) for name in names]
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "") or "none"
