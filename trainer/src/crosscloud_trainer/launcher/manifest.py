"""A `CrossCloudTrainingJob` from a YAML file, by the rules that kubectl and the API server apply to it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from crosscloud_trainer.contract import API_VERSION, KIND, InvalidDocument, JobSpec, Problem, read
from crosscloud_trainer.contract.manifest import NAME_PATTERN
from crosscloud_trainer.failures import invalid

_NAME = re.compile(NAME_PATTERN)
_NAME_LENGTH = 63
_TOP = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = ("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences")
_MOST_VALUES = 100_000  # a few lines of YAML can hold the same list a billion times
_MADE_BY_SERVER = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid")


class _Constructor(SafeConstructor):
    """Dates are text, as for kubectl."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


@dataclass(frozen=True)
class Manifest:
    name: str
    namespace: str
    spec: JobSpec


def read_manifest(path: Path) -> Manifest:
    """Raises Failure(INVALID_INPUT) with every fault of the file, each with its path, or the line of a syntax error."""
    data = _parse(path)
    problems: list[Problem] = []
    if not isinstance(data, Mapping):
        allowed = f"{path} must hold one object with apiVersion, kind, metadata and spec"
        raise invalid([Problem("", data, allowed)])
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if data.get(field) != expected:
            problems.append(Problem(field, data.get(field), f"must be {expected}"))
    for key in data:
        if key not in _TOP:
            problems.append(Problem(str(key), data[key], f"unknown field; known here: {', '.join(_TOP)}"))
    name, namespace = _metadata(data.get("metadata"), problems)
    spec: JobSpec | None = None
    try:
        spec = read(JobSpec, data.get("spec"), "spec")
    except InvalidDocument as fault:
        problems.extend(fault.problems)
    if problems or spec is None:
        raise invalid([f"{path}: {len(problems)} thing(s) to mend:", *(f"  {problem}" for problem in problems)])
    return Manifest(name, namespace, spec)


def _parse(path: Path) -> Any:
    yaml = YAML(typ="safe", pure=True)  # YAML 1.2: 3e-4 is a number, as for kubectl
    yaml.Constructor = _Constructor
    room = _Room()
    try:
        documents = [_plain(item, "", room) for item in yaml.load_all(path.read_text()) if item is not None]
    except OSError as fault:
        raise invalid([f"MANIFEST: {path} can't be read: {fault.strerror}"]) from fault
    except UnicodeDecodeError as fault:
        raise invalid([f"MANIFEST: {path} is not UTF-8 text ({fault.reason})"]) from fault
    except MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown line"
        what = " ".join(str(fault.problem or fault.context or "not YAML").split())
        raise invalid([f"{path}, {where}: this is not valid YAML: {what}"]) from fault
    except YAMLError as fault:
        raise invalid([f"{path}: this is not valid YAML: {' '.join(str(fault).split())}"]) from fault
    except RecursionError as fault:
        raise invalid([f"{path}: lists or objects lie too deep in each other, or in themselves"]) from fault
    except ValueError as fault:  # a number of thousands of digits
        raise invalid([f"{path}: holds a value that can't be read: {fault}"]) from fault
    jobs = [item for item in documents if isinstance(item, Mapping) and item.get("kind") == KIND]
    if len(documents) > 1 and len(jobs) != 1:
        raise invalid([f"{path}: holds {len(jobs)} objects of kind {KIND}; give a file with exactly one"])
    return jobs[0] if len(documents) > 1 else (documents[0] if documents else None)


@dataclass
class _Room:
    left: int = _MOST_VALUES


def _plain(data: Any, path: str, room: _Room) -> Any:
    """`data` once it is known to hold nothing but what JSON has. YAML has more: sets, any key, what holds itself."""
    room.left -= 1
    if room.left < 0:
        raise invalid([f"{path}: more than {_MOST_VALUES} values, each use of an alias counted; leave some out"])
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise invalid([Problem(path, str(key), "is no name of a field; put quotes around it")])
            _plain(value, f"{path}.{key}" if path else key, room)
    elif isinstance(data, list):
        for number, value in enumerate(data):
            _plain(value, f"{path}[{number}]", room)
    elif isinstance(data, float) and not math.isfinite(data):
        raise invalid([Problem(path, data, "must be finite")])
    elif data is not None and not isinstance(data, str | int | float):
        raise invalid([Problem(path, str(data), "must be text, a number, true, false, a list or an object")])
    return data


def _metadata(data: Any, problems: list[Problem]) -> tuple[str, str]:
    if not isinstance(data, Mapping):
        problems.append(Problem("metadata", data, "must be an object with a name"))
        return "", ""
    for key in data:
        if key not in (*_METADATA, *_MADE_BY_SERVER):
            problems.append(Problem(f"metadata.{key}", data[key], f"unknown field; known here: {', '.join(_METADATA)}"))
    name, namespace = data.get("name"), data.get("namespace", "default")
    for field, value in (("name", name), ("namespace", namespace)):
        if not isinstance(value, str) or not _NAME.fullmatch(value) or len(value) > _NAME_LENGTH:
            allowed = f"must be at most {_NAME_LENGTH} lower-case letters, digits and '-', with no '-' at either end"
            problems.append(Problem(f"metadata.{field}", value, allowed))
    return str(name), str(namespace)
