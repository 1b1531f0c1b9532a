"""What a checkpoint is in the storage: chunks of safetensors, and a manifest that comes last.

Each rank stores the parts of vectors that it has, cut into chunks, and then a list of them. The lowest replica's first
rank waits for all lists and writes `manifest.json`: a folder without it is no checkpoint. A replica that can't take
part says so in place of its list, and the checkpoint is abandoned. All files name the run document, so that what an
older job left in the same folder is never taken for this one's.

A vector is one number for each element of the model (weights, a moment of the optimizer, a residual). Its parts are
named by parameter and offset, so that they can be read back by ranks that share the model in another way. Pure, but
for reading and writing the storage.
"""

from __future__ import annotations

import enum
import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from crosscloud_trainer.contract import ExitCode, StoredCheckpoint
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.layout import Index
from crosscloud_trainer.storage import Storage

VERSION = "checkpoint.crosscloud.dev/v2"
MANIFEST = "manifest.json"
ABANDONED = "abandoned.json"
WEIGHTS = "outer.weights"

_CHUNK_BYTES = 128 * 2**20
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 2.0
_WAIT_SECONDS = 1800.0  # for the other ranks, of which only the writing is left


class Abandoned(Exception):
    """A checkpoint that some replica can't take part in; the one before it stays the newest."""


class Scope(enum.Enum):
    """Who stores a vector."""

    MODEL = "Model"  # alike in all replicas: the lowest one stores it
    VIEW = "View"  # of each element, one replica has it
    REPLICA = "Replica"  # each replica has its own


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` of parameter number `parameter`."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """Values of one span of the vector `section`: flat, as long as the span."""

    section: str
    scope: Scope
    span: Span
    values: torch.Tensor


@dataclass(frozen=True)
class CheckpointId:
    """Which checkpoint: the folder `attempt-N/home-H/step-K` below the storage."""

    job_uid: str
    run_digest: str
    attempt: int
    home: int
    step: int
    round: int

    @property
    def folder(self) -> str:
        return f"attempt-{self.attempt}/home-{self.home}/step-{self.step}"

    def header(self) -> dict[str, Any]:
        return {
            "apiVersion": VERSION,
            "job": self.job_uid,
            "run": self.run_digest,
            "attempt": self.attempt,
            "home": self.home,
            "step": self.step,
            "round": self.round,
        }


def write_chunks(
    storage: Storage, which: CheckpointId, replica: int, rank: int, index: Index, parts: Sequence[Part]
) -> list[dict[str, Any]]:
    """Store one rank's parts; returns what the manifest says of the files."""
    found = []
    for number, group in enumerate(_chunks(parts)):
        tensors: dict[str, torch.Tensor] = {}
        spans: dict[str, list[list[int]]] = {}
        for part in group:
            span = part.span
            tensors[f"{part.section}/{index.parameters[span.parameter].name}:{span.start}"] = part.values.contiguous()
            spans.setdefault(part.section, []).append([span.parameter, span.start, span.stop])
        data = save(tensors)
        path = f"replica-{replica}/rank-{rank}-{number}.safetensors"
        storage.write(f"{which.folder}/{path}", data)
        digest = hashlib.sha256(data).hexdigest()
        found.append({"path": path, "sha256": digest, "bytes": len(data), "parts": spans})
    return found


def write_list(storage: Storage, which: CheckpointId, replica: int, rank: int, content: Mapping[str, Any]) -> None:
    """Say that one rank's chunks are stored; `content` goes into the manifest as it is."""
    storage.write(_list_path(which, replica, rank), _text({**which.header(), **content}))


def abandon(storage: Storage, which: CheckpointId, replica: int, rank: int, why: str) -> None:
    """Say in place of a list that this rank takes no part."""
    write_list(storage, which, replica, rank, {"abandoned": why})


def write_manifest(
    storage: Storage,
    which: CheckpointId,
    ranks: Mapping[int, int],
    state: Mapping[str, Any],
    say: Callable[[str], None],
) -> StoredCheckpoint:
    """Wait for the list of every rank, then write the manifest. `ranks`: how many each replica has.

    Raises Abandoned once one takes no part, after saying so to the others; Failure(PEER_LOST) when one doesn't finish.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    lists: dict[tuple[int, int], Any] = {}
    wanted = [(replica, rank) for replica, count in sorted(ranks.items()) for rank in range(count)]
    told, pause = False, _FIRST_POLL_SECONDS
    while missing := [place for place in wanted if place not in lists]:
        for place in missing:
            found = _read_own(storage, which, _list_path(which, *place))
            if found is not None and "abandoned" in found:
                why = f"replica {place[0]}: {found['abandoned']}"
                storage.write(f"{which.folder}/{ABANDONED}", _text({**which.header(), "why": why}))
                raise Abandoned(why)
            if found is not None:
                lists[place] = {key: value for key, value in found.items() if key not in which.header()}
        late = sorted({replica for replica, rank in wanted if (replica, rank) not in lists})
        if late and time.monotonic() > deadline:
            message = f"replicas {late} didn't finish their part of the checkpoint in {_WAIT_SECONDS:.0f} s"
            raise Failure(ExitCode.PEER_LOST, message)
        if late and not told:
            say(f"checkpoint of step {which.step}: waiting for the parts of replicas {late}")
            told = True
        if late:
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)
    sections = {name: scope for said in lists.values() for name, scope in said.pop("sections", {}).items()}
    replicas = [
        {"replica": replica, "ranks": [lists[replica, rank] for rank in range(count)]}
        for replica, count in sorted(ranks.items())
    ]
    text = _text({**which.header(), **state, "sections": sections, "replicas": replicas})
    storage.write(f"{which.folder}/{MANIFEST}", text)
    uri, digest = storage.address(f"{which.folder}/{MANIFEST}"), hashlib.sha256(text).hexdigest()
    return StoredCheckpoint(uri, digest, which.step, _validation_loss([lists[replica, 0] for replica in sorted(ranks)]))


def _validation_loss(said: Sequence[Mapping[str, Any]]) -> str | None:
    """The mean of what the replicas had measured last, by the list of one rank of each."""
    losses = [item["validationLoss"] for item in said if item.get("validationLoss") is not None]
    return f"{sum(losses) / len(losses):.4f}" if len(losses) == len(said) else None


def wait_for_manifest(storage: Storage, which: CheckpointId) -> None:
    """Return once the manifest is there. Raises Abandoned where it never will be."""
    deadline, pause = time.monotonic() + _WAIT_SECONDS, _FIRST_POLL_SECONDS
    while _read_own(storage, which, f"{which.folder}/{MANIFEST}") is None:
        found = _read_own(storage, which, f"{which.folder}/{ABANDONED}")
        if found is not None:
            raise Abandoned(str(found["why"]))
        if time.monotonic() > deadline:
            raise Abandoned(f"no manifest came in {_WAIT_SECONDS:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)


def give_up(storage: Storage, which: CheckpointId, why: str) -> None:
    """Tell those who wait for the manifest that it won't come."""
    storage.write(f"{which.folder}/{ABANDONED}", _text({**which.header(), "why": why}))


def discard(storage: Storage, which: CheckpointId, replica: int, rank: int) -> None:
    """Delete what one rank has stored of a checkpoint that won't be."""
    folder = f"{which.folder}/replica-{replica}"
    for name in storage.names(folder):
        if name.startswith((f"rank-{rank}-", f"rank-{rank}.")):
            storage.remove(f"{folder}/{name}")


class Damaged(Exception):
    """A checkpoint that can't be used; the message says what is wrong with it."""


class Checkpoint:
    """A stored checkpoint, opened: its manifest is the one that was told of, and every vector in it is whole."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        """Raises Damaged, or Failure where the storage doesn't answer or refuses."""
        self._storage = Storage(stored.uri.rpartition("/")[0])
        self.uri = stored.uri
        text = self._storage.read(stored.uri.rpartition("/")[2])
        if text is None:
            raise Damaged("its manifest isn't there")
        if hashlib.sha256(text).hexdigest() != stored.digest:
            raise Damaged("its manifest isn't the one that was written")
        self.manifest: Mapping[str, Any] = json.loads(text)
        version = self.manifest.get("apiVersion") if isinstance(self.manifest, Mapping) else None
        if version != VERSION:
            raise Damaged(f"it is of version {version!r}; this trainer reads {VERSION}")
        self.scopes = {name: Scope(scope) for name, scope in self.manifest["sections"].items()}
        self._chunks: dict[str, Mapping[str, Any]] = {}
        self._spans: dict[tuple[str, int | None], list[tuple[Span, str]]] = {}
        for replica in self.manifest["replicas"]:
            for rank in replica["ranks"]:
                for chunk in rank["chunks"]:
                    self._add(replica["replica"], chunk)
        self._check_cover()

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(replica["replica"] for replica in self.manifest["replicas"])

    def ranks_of(self, replica: int) -> list[Mapping[str, Any]]:
        """What each rank of a replica said in its list."""
        return next(list(item["ranks"]) for item in self.manifest["replicas"] if item["replica"] == replica)

    def sections(self, prefix: str, replica: int) -> list[str]:
        """Names of the vectors that begin with `prefix` and that this replica can have, without the prefix."""
        found = {name for name, source in self._spans if name.startswith(prefix) and source in (None, replica)}
        return sorted(name.removeprefix(prefix) for name in found)

    def _add(self, replica: int, chunk: Mapping[str, Any]) -> None:
        self._chunks[chunk["path"]] = chunk
        for section, spans in chunk["parts"].items():
            source = replica if self.scopes[section] is Scope.REPLICA else None
            known = self._spans.setdefault((section, source), [])
            known += [(Span(*span), chunk["path"]) for span in spans]

    def _check_cover(self) -> None:
        """Every vector has each element of the model exactly once."""
        sizes = [elements for _, elements in self.manifest["parameters"]]
        for (section, source), spans in self._spans.items():
            spans.sort(key=lambda item: (item[0].parameter, item[0].start))
            reached = [0] * len(sizes)
            whose = section if source is None else f"{section} of replica {source}"
            for span, _ in spans:
                if reached[span.parameter] != span.start or span.stop > sizes[span.parameter]:
                    raise Damaged(f"{whose}: elements {span.start} to {span.stop} leave a gap or lie twice")
                reached[span.parameter] = span.stop
            if reached != sizes:
                raise Damaged(f"{whose}: {sum(sizes) - sum(reached)} elements are missing")

    def read(self, wants: Sequence[tuple[str, int | None, Span, torch.Tensor]]) -> None:
        """Fill flat tensors, given as (section, replica or None where all share it, span, tensor), a chunk at a time.

        Raises Damaged where a chunk is missing or isn't what was written.
        """
        by_chunk: dict[str, list[tuple[str, Span, Span, torch.Tensor]]] = {}
        for section, source, span, target in wants:
            for stored, path in self._overlapping(section, source, span):
                by_chunk.setdefault(path, []).append((section, stored, span, target))
        for path, copies in sorted(by_chunk.items()):
            tensors = self._chunk(path)
            for section, stored, span, target in copies:
                name = self.manifest["parameters"][span.parameter][0]
                first, last = max(span.start, stored.start), min(span.stop, stored.stop)
                values = tensors[f"{section}/{name}:{stored.start}"][first - stored.start : last - stored.start]
                target[first - span.start : last - span.start].copy_(values)

    def _overlapping(self, section: str, source: int | None, span: Span) -> Iterator[tuple[Span, str]]:
        key = (section, source if self.scopes[section] is Scope.REPLICA else None)
        spans = self._spans[key]  # sorted, without gaps
        first = bisect_right(spans, (span.parameter, span.start), key=lambda item: (item[0].parameter, item[0].start))
        for stored, path in spans[max(0, first - 1) :]:
            if (stored.parameter, stored.start) >= (span.parameter, span.stop):
                return
            if stored.parameter == span.parameter and stored.stop > span.start:
                yield stored, path

    def _chunk(self, path: str) -> dict[str, torch.Tensor]:
        data = self._storage.read(path)
        if data is None:
            raise Damaged(f"{path} isn't there")
        expected = self._chunks[path]
        if len(data) != expected["bytes"]:
            raise Damaged(f"{path} has {len(data)} bytes; {expected['bytes']} were written")
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise Damaged(f"{path} isn't what was written there: the storage changed it")
        tensors: dict[str, torch.Tensor] = load(data)
        return tensors


def _chunks(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts in groups of a limited size; a part above it is cut."""
    group: list[Part] = []
    size = 0
    for part in _cut(parts):
        nbytes = part.values.numel() * part.values.element_size()
        if group and size + nbytes > _CHUNK_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += nbytes
    if group:
        yield group


def _cut(parts: Sequence[Part]) -> Iterator[Part]:
    for part in parts:
        step = _CHUNK_BYTES // part.values.element_size()
        span = part.span
        for first in range(span.start, span.stop, step):
            last = min(first + step, span.stop)
            values = part.values[first - span.start : last - span.start]
            yield Part(part.section, part.scope, Span(span.parameter, first, last), values)


def _list_path(which: CheckpointId, replica: int, rank: int) -> str:
    return f"{which.folder}/replica-{replica}/rank-{rank}.json"


def _read_own(storage: Storage, which: CheckpointId, path: str) -> Any:
    """What lies there, None unless it is of this very checkpoint and whole."""
    text = storage.read(path)
    try:
        found = json.loads(text) if text else None
    except ValueError:  # it is being written
        return None
    if not isinstance(found, dict):
        return None
    same = all(found.get(key) == value for key, value in which.header().items())
    return found if same else None


def _text(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True).encode()
