"""Whatever a spec looks like, the API server and the contract's reader give the same verdict on it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

from apiserver import ApiServer
from crdfiles import JOBS, job, minimal_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosscloud_trainer.contract import InvalidDocument, JobSpec, read
from crosscloud_trainer.contract.manifest import Data, Model, ReplicaOverride
from crosscloud_trainer.contract.reading import Rule, camel, fields_of

EITHER = ("train", "sources")
TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ODD_KINDS = [None, True, False, [], [None], ["a", "a"], {}, {"a": 1}]
ODD_NUMBERS = [0, -1, 1, 2.0, 1.5, 3, 65, 1025, 65_537, 100_001, 2**31, 10**15 + 1, 10**20]
ODD_TEXTS = ["", " ", "2", "a", "A", "a\n", "7k", "1001T", "None", "s3://a", "/"]
WEIRD = st.sampled_from([*ODD_KINDS, *ODD_NUMBERS, *ODD_TEXTS])


def values_of(kind: Any, limits: Rule) -> st.SearchStrategy[Any]:
    """Values within the limits, also the last ones."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is tuple:
        (item, _) = typing.get_args(kind)
        single = dataclasses.replace(limits, min_items=None, max_items=None, unique=None)
        return st.lists(values_of(item, single), max_size=3)
    if typing.get_origin(kind) is dict:
        return st.fixed_dictionaries({"model_type": st.just("llama")}, optional={"x": JSON})
    if dataclasses.is_dataclass(kind):
        return object_of(typing.cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from([item.value for item in kind])
    return scalars_of(kind, limits)


def scalars_of(kind: type, limits: Rule) -> st.SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.from_regex(limits.pattern or "", fullmatch=True).filter(lambda text: len(text) < 80)
    low = limits.minimum if limits.minimum is not None else 1e-6
    high = limits.maximum if limits.maximum is not None else 1e6
    numbers = st.sampled_from([value for value in (low, high, 1, 2, 8) if low <= value <= high])
    if limits.quantity:
        return numbers | st.from_regex(r"[1-9][0-9]{0,2}[kMGT]?", fullmatch=True)
    return numbers if kind is float else numbers.map(int)


def object_of(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    if cls is Model:
        made = [{"preset": "tiny-llama"}, {"config": {"model_type": "llama", "id2label": {"0": None}}}]
        return st.sampled_from([*made, *({**model, "initFrom": "s3://models/base"} for model in [*made, {}])])
    needed, optional = {}, {}
    for name, kind, limits, field in fields_of(cls):
        if cls is Data and name in (*EITHER, "tokenizer", "tokenizer_file"):
            continue
        mandatory = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        (needed if mandatory else optional)[camel(name)] = values_of(kind, limits)
    if cls is Data:
        return data_of(needed, optional)
    if cls is ReplicaOverride:
        needed |= {"name": st.sampled_from("abc"), "index": st.integers(0, 3)}
    if cls is JobSpec:
        kinds = [{name: optional.pop(name)} for name in ("script", "training")]
        return st.one_of([st.fixed_dictionaries(needed | kind, optional=optional) for kind in kinds])
    return st.fixed_dictionaries(needed, optional=optional)


def data_of(needed: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Data with what exactly one of two fields may say."""
    train, sources = (values_of(kind, limits) for name, kind, limits, _ in fields_of(Data) if name in EITHER)
    either = st.fixed_dictionaries({"train": train}) | st.fixed_dictionaries({"sources": sources})
    tokenizer = st.sampled_from([{}, {"tokenizer": "Bytes"}, {"tokenizer": "File", "tokenizerFile": "/a"}])
    rest = st.fixed_dictionaries(needed, optional=optional)
    return st.tuples(either, tokenizer, rest).map(lambda parts: {k: v for part in parts for k, v in part.items()})


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in the document that can be replaced."""
    found = [path] if path else []
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inside:
        found += places(value, (*path, key))
    return found


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A spec of arbitrary values within the limits, in half of the cases with something odd put somewhere."""
    spec = draw(st.just(minimal_spec()) | object_of(JobSpec))
    for _ in range(draw(st.integers(0, 2))):
        *parents, last = draw(st.sampled_from(places(spec)))
        spec = copy.deepcopy(spec)
        at: Any = spec
        for part in parents:
            at = at[part]
        at[last] = draw(WEIRD)
    if draw(st.integers(0, 9)) == 0:
        spec[draw(st.sampled_from(["extra", "Replicas", "suspend"]))] = 1
    return spec


def contract_takes(spec: Mapping[str, Any]) -> bool:
    try:
        read(JobSpec, spec)
    except InvalidDocument:
        return False
    return True


@given(spec=specs())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
def test_the_api_server_and_the_contract_agree_on_every_spec(hub: ApiServer, spec: dict[str, Any]) -> None:
    status, answer = hub.raw("POST", f"{JOBS}?dryRun=All&fieldValidation=Strict", job(spec))
    assert status in (201, 400, 422), answer
    assert contract_takes(spec) == (status == 201), answer.get("message")


@given(spec=object_of(JobSpec))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_api_server_stores_reads_as_what_was_sent(hub: ApiServer, spec: dict[str, Any]) -> None:
    status, answer = hub.raw("POST", f"{JOBS}?dryRun=All&fieldValidation=Strict", job(spec))
    if status == 201:
        assert read(JobSpec, answer["spec"]) == read(JobSpec, spec)
