"""The CRD says what the contract says: type, default, limits of every field of a job's spec."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from crdfiles import JOB_CRD, MEMBER_CRD, load_yaml, properties, schema_of

from crosscloud_operator.domain.record import JobStatus
from crosscloud_trainer.contract import JobSpec, dump
from crosscloud_trainer.contract.reading import QUANTITY_PATTERN, Rule, camel, fields_of

CLIENT_SIDE_APPLY_LIMIT = 262_144  # bytes of all annotations of one object
SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
NOT_IN_THE_CONTRACT = {"description", "format", "x-kubernetes-validations"}


def expected_object(cls: type) -> dict[str, Any]:
    """The structural schema that the dataclass asks for."""
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for name, kind, limits, field in fields_of(cls):
        below = expected(kind, limits)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            schema.setdefault("required", []).append(camel(name))
        elif field.default_factory is not dataclasses.MISSING:
            below["default"] = {}  # the fields inside bring their own
        elif field.default is not None:
            below["default"] = dump(field.default)
        schema["properties"][camel(name)] = below
    return schema


def expected(kind: Any, limits: Rule) -> dict[str, Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is tuple:
        return expected_list(typing.get_args(kind)[0], limits)
    if typing.get_origin(kind) is dict:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if dataclasses.is_dataclass(kind):
        return expected_object(typing.cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        values = [item.value for item in kind]
        return {"type": SCALARS[type(values[0])], "enum": values}
    schema = {"type": SCALARS[kind], **expected_limits(limits)}
    if limits.quantity:
        del schema["type"]
        schema |= {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
        schema |= {"pattern": QUANTITY_PATTERN, "maxLength": 16}
    return schema


def expected_list(kind: Any, limits: Rule) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema |= {"minItems": limits.min_items} if limits.min_items is not None else {}
    schema |= {"maxItems": limits.max_items} if limits.max_items is not None else {}
    if limits.unique is None:
        schema["x-kubernetes-list-type"] = "atomic"
    elif limits.unique == "":
        schema["x-kubernetes-list-type"] = "set"
    else:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [camel(limits.unique)]}
    return schema | {"items": expected(kind, limits)}


def expected_limits(limits: Rule) -> dict[str, Any]:
    found = {
        "minimum": limits.minimum,
        "maximum": limits.maximum,
        "pattern": limits.pattern,
        "maxLength": limits.max_length,
    }
    if limits.exclusive_minimum is not None:
        found |= {"minimum": limits.exclusive_minimum, "exclusiveMinimum": True}
    return {key: value for key, value in found.items() if value is not None}


def stripped(schema: Any) -> Any:
    """The schema without what only people and the API server need."""
    if isinstance(schema, list):
        return [stripped(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: stripped(value) for key, value in schema.items() if key not in NOT_IN_THE_CONTRACT}
    if "properties" in schema:
        result["properties"] = {key: stripped(value) for key, value in schema["properties"].items()}
    return result


def as_sets(schema: Any) -> Any:
    """`required` in any order."""
    if isinstance(schema, dict):
        return {key: sorted(value) if key == "required" else as_sets(value) for key, value in schema.items()}
    return schema


def test_every_field_of_the_spec_has_the_type_default_and_limits_of_the_contract() -> None:
    spec = as_sets(stripped(schema_of(JOB_CRD)["properties"]["spec"]))
    config = spec["properties"]["training"]["properties"]["model"]["properties"]["config"]
    # `Model.check` asks for this one field of a transformers configuration.
    assert config.pop("properties") == {"model_type": {"type": "string"}}
    assert config.pop("required") == ["model_type"]
    assert spec == as_sets(expected_object(JobSpec))


def test_the_status_has_the_fields_and_types_that_the_operator_writes() -> None:
    """The API server drops what it doesn't know, so that a field forgotten here would be lost without a word."""

    def shape(schema: dict[str, Any]) -> Any:
        if schema["type"] == "object":
            return {name: shape(below) for name, below in schema["properties"].items()}
        return [shape(schema["items"])] if schema["type"] == "array" else schema["type"]

    assert shape(schema_of(JOB_CRD)["properties"]["status"]) == shape(expected_object(JobStatus))


@pytest.mark.parametrize("crd", [JOB_CRD, MEMBER_CRD], ids=lambda crd: crd.stem)
def test_every_field_is_explained(crd: Path) -> None:
    silent = [path for path, schema in properties(schema_of(crd)) if not schema.get("description", "").strip()]
    assert silent == ["metadata"], "the API server brings its own words for metadata"


@pytest.mark.parametrize("crd", [JOB_CRD, MEMBER_CRD], ids=lambda crd: crd.stem)
def test_client_side_apply_can_carry_the_crd(crd: Path) -> None:
    assert len(json.dumps(load_yaml(crd.read_text()))) < CLIENT_SIDE_APPLY_LIMIT // 4


@pytest.mark.parametrize("crd", [JOB_CRD, MEMBER_CRD], ids=lambda crd: crd.stem)
def test_every_whole_number_says_how_wide_it_is(crd: Path) -> None:
    found = {
        path: schema.get("format") for path, schema in properties(schema_of(crd)) if schema.get("type") == "integer"
    }
    assert set(found.values()) <= {"int32", "int64"}, found


def test_floats_stand_for_hyperparameters_only() -> None:
    floats = [path for path, schema in properties(schema_of(JOB_CRD)) if schema.get("type") == "number"]
    assert floats == [
        "spec.sync.outerOptimizer.learningRate",
        "spec.sync.outerOptimizer.momentum",
        "spec.training.learningRate",
        "spec.training.weightDecay",
        "spec.training.gradientClipping",
    ]
    assert not [path for path, schema in properties(schema_of(MEMBER_CRD)) if schema.get("type") == "number"]
