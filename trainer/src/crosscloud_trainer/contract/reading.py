"""Strict, symmetric reading and writing of documents as frozen dataclasses.

`read(T, data)` turns plain JSON data into a `T` and reports every fault at once, each with the path of the field, the
value found and what is allowed. `dump(obj)` is its inverse: `read(T, dump(x)) == x`. Attributes are snake_case in
Python and camelCase in documents. Unknown fields are faults: a field that is accepted is a field that works.

Standard library only, since the operator imports this package without torch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

Fault = tuple[str, Any, str]  # path below the object, value found, what is allowed

_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
QUANTITY_PATTERN = r"^[1-9][0-9]{0,14}[kMGT]?$"


@dataclass(frozen=True)
class Problem:
    """One fault of a document: where, what was found, and what to write instead."""

    path: str
    found: Any
    allowed: str

    def __str__(self) -> str:
        shown = json.dumps(self.found, default=str, ensure_ascii=False)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        text = f"{self.path or '(document)'}: found {shown}; {self.allowed}"
        return text.encode(errors="backslashreplace").decode()  # JSON may hold halves of letters, which no output takes


class InvalidDocument(ValueError):
    """A document that breaks the contract; `problems` holds every fault that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class Rule:
    """What a field's value must satisfy beyond its type."""

    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    pattern: str | None = None
    max_length: int | None = None
    min_items: int | None = None
    max_items: int | None = None
    unique: str | None = None  # attribute that tells the items of a list apart; "" is the item itself
    quantity: bool = False  # an integer that may be written like "200M"


NO_RULE = Rule()


def rule(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None, **limits: Any) -> Any:
    """A dataclass field with limits; `default` or `factory` makes it optional."""
    metadata = {"rule": Rule(**limits)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def camel(name: str) -> str:
    """`inner_steps` -> `innerSteps`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def read(cls: type[T], data: Any, path: str = "") -> T:
    """Read `data` as a `cls`. Raises InvalidDocument with every problem found."""
    problems: list[Problem] = []
    result = _read(cls, NO_RULE, data, path, problems)
    if problems:
        raise InvalidDocument(problems)
    return typing.cast(T, result)


def read_json(cls: type[T], text: str | bytes) -> T:
    """Read JSON text as a `cls`. Raises InvalidDocument, also where the text is no JSON."""
    return read(cls, parse_json(text))


def parse_json(text: str | bytes) -> Any:
    """The text's plain data. Raises InvalidDocument for whatever can't be read: others write some of the documents."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as fault:  # no JSON, no UTF-8, a number of thousands of digits
        start = text[:60].decode(errors="replace") if isinstance(text, bytes) else text[:60]
        raise InvalidDocument([Problem("", start, f"must be JSON text ({fault})")]) from fault


def dump(obj: Any) -> Any:
    """Plain JSON data of a dataclass; fields that are None are left out."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        pairs = ((field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj))
        return {camel(name): dump(value) for name, value in pairs if value is not None}
    if isinstance(obj, enum.Enum):
        return obj.value
    if isinstance(obj, tuple | list):
        return [dump(item) for item in obj]
    if isinstance(obj, Mapping):
        return {key: dump(value) for key, value in obj.items()}
    return obj


def dump_json(obj: Any) -> str:
    """Canonical JSON text: sorted keys, no spaces, so that equal documents have equal digests."""
    return json.dumps(dump(obj), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fields_of(cls: type) -> Iterator[tuple[str, Any, Rule, dataclasses.Field[Any]]]:
    """(attribute, type, rule, field) of each field, with type hints resolved."""
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        yield field.name, hints[field.name], field.metadata.get("rule", NO_RULE), field


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Resolving annotations costs more than reading the document itself."""
    return typing.get_type_hints(cls)


def _read(kind: Any, limits: Rule, data: Any, path: str, problems: list[Problem]) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if data is None:
            return None
        return _read(options[0], limits, data, path, problems)
    if origin is tuple:
        return _read_list(typing.get_args(kind)[0], limits, data, path, problems)
    if origin is dict:
        return _read_mapping(typing.get_args(kind)[1], data, path, problems)
    if dataclasses.is_dataclass(kind):
        return _read_object(typing.cast(type, kind), data, path, problems)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _read_enum(kind, data, path, problems)
    return _read_scalar(kind, limits, data, path, problems)


def _read_object(cls: type, data: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(data, Mapping):
        problems.append(Problem(path, data, "must be an object"))
        return None
    before = len(problems)
    values: dict[str, Any] = {}
    known: set[str] = set()
    for name, kind, limits, field in fields_of(cls):
        key = camel(name)
        known.add(key)
        where = f"{path}.{key}" if path else key
        if data.get(key) is not None:  # null counts as left out, as it does for the API server
            values[name] = _read(kind, limits, data[key], where, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(Problem(where, None, "is required"))
    for key in sorted(set(map(str, data)) - known):
        where = f"{path}.{key}" if path else key
        problems.append(Problem(where, data.get(key), f"unknown field; known here: {', '.join(sorted(known))}"))
    if len(problems) > before:
        return None
    made = cls(**values)
    check = getattr(made, "check", None)
    if check is not None:
        for sub, found, allowed in check():
            problems.append(Problem(".".join(part for part in (path, sub) if part), found, allowed))
    return made


def _read_list(kind: Any, limits: Rule, data: Any, path: str, problems: list[Problem]) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        problems.append(Problem(path, data, "must be a list"))
        return ()
    if limits.min_items is not None and len(data) < limits.min_items:
        problems.append(Problem(path, len(data), f"must have at least {limits.min_items} item(s)"))
    if limits.max_items is not None and len(data) > limits.max_items:
        problems.append(Problem(path, len(data), f"must have at most {limits.max_items} items"))
    item_limits = dataclasses.replace(limits, min_items=None, max_items=None, unique=None)
    items = tuple(_read(kind, item_limits, item, f"{path}[{index}]", problems) for index, item in enumerate(data))
    if limits.unique is not None:
        seen: set[Any] = set()
        for index, item in enumerate(items):
            key = getattr(item, limits.unique, item) if limits.unique else item
            if key in seen:
                where = f"{path}[{index}]" + (f".{camel(limits.unique)}" if limits.unique else "")
                problems.append(Problem(where, key, "must be unique in the list"))
            seen.add(key)
    return items


def _read_mapping(kind: Any, data: Any, path: str, problems: list[Problem]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        problems.append(Problem(path, data, "must be an object"))
        return {}
    if kind is Any:
        return dict(data)
    return {str(key): _read(kind, NO_RULE, item, f"{path}.{key}", problems) for key, item in data.items()}


def _read_enum(kind: type[enum.Enum], data: Any, path: str, problems: list[Problem]) -> Any:
    allowed = [member.value for member in kind]
    if data in allowed and not isinstance(data, bool):
        return kind(data)
    problems.append(Problem(path, data, f"must be one of {', '.join(map(str, allowed))}"))
    return None


def _read_scalar(kind: Any, limits: Rule, data: Any, path: str, problems: list[Problem]) -> Any:
    if kind is Any:
        return data
    if limits.quantity and isinstance(data, str):
        if re.fullmatch(QUANTITY_PATTERN, data):
            number, suffix = (data[:-1], data[-1]) if data[-1] in _SUFFIXES else (data, "")
            data = int(number) * _SUFFIXES[suffix]
        else:
            problems.append(Problem(path, data, "must be a whole number like 50000, 200k, 200M, 1G or 2T"))
            return None
    if isinstance(data, int) and abs(data) >= 2**64:
        problems.append(Problem(path, data, "must fit into 64 bits"))
        return None
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data)
    if kind is int and isinstance(data, float) and data.is_integer() and not limits.quantity:
        data = int(data)  # JSON doesn't tell 2.0 from 2
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        problems.append(Problem(path, data, f"must be {words.get(kind, kind)}"))
        return None
    fault = _limit_fault(limits, data)
    if fault:
        problems.append(Problem(path, data, fault))
    return data


def _limit_fault(limits: Rule, data: Any) -> str | None:
    if isinstance(data, float) and not math.isfinite(data):
        return "must be finite"
    if isinstance(data, int | float) and not isinstance(data, bool):
        if limits.minimum is not None and data < limits.minimum:
            return f"must be at least {limits.minimum:g}"
        if limits.maximum is not None and data > limits.maximum:
            return f"must be at most {limits.maximum:g}"
        if limits.exclusive_minimum is not None and data <= limits.exclusive_minimum:
            return f"must be more than {limits.exclusive_minimum:g}"
    if isinstance(data, str):
        if limits.max_length is not None and len(data) > limits.max_length:
            return f"must have at most {limits.max_length} characters, has {len(data)}"
        if limits.pattern is not None and not re.search(_strict_end(limits.pattern), data):
            return f"must match {limits.pattern}"
    return None


def _strict_end(pattern: str) -> str:
    """`$` as the API server means it: the very end, not also before a line feed there."""
    return pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern
