"""The CRD keeps every field of the status that the operator writes: what a schema doesn't know is pruned in silence."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from crosscloud_operator.domain.record import TIMES, JobStatus
from crosscloud_trainer.contract.reading import camel

CRDS = Path(__file__).parents[2] / "crds"


def job_schema() -> dict[str, Any]:
    for path in sorted(CRDS.glob("*.yaml")):
        for document in YAML(typ="safe", pure=True).load_all(path.read_text()):
            if document and document.get("spec", {}).get("names", {}).get("kind") == "CrossCloudTrainingJob":
                (version,) = document["spec"]["versions"]
                return version["schema"]["openAPIV3Schema"]["properties"]["status"]  # type: ignore[no-any-return]
    raise AssertionError("no CRD of CrossCloudTrainingJob")


def differences(kind: Any, schema: dict[str, Any], path: str) -> list[str]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(item for item in typing.get_args(kind) if item is not type(None))
    if typing.get_origin(kind) is tuple:
        found = [] if schema.get("type") == "array" else [f"{path}: must be an array"]
        return found + differences(typing.get_args(kind)[0], schema.get("items", {}), f"{path}[]")
    if dataclasses.is_dataclass(kind):
        properties = schema.get("properties", {})
        hints = typing.get_type_hints(kind)
        found = [f"{path}.{name}: not written by the operator" for name in set(properties) - set(map(camel, hints))]
        for name, hint in hints.items():
            if camel(name) not in properties:
                found.append(f"{path}.{camel(name)}: not in the CRD")
            else:
                found += differences(hint, properties[camel(name)], f"{path}.{camel(name)}")
        return found
    wanted = {str: "string", int: "integer", bool: "boolean"}[kind]
    return [] if schema.get("type") == wanted else [f"{path}: must be {wanted}, is {schema.get('type')}"]


def test_the_crd_and_the_operator_know_the_same_status() -> None:
    assert differences(JobStatus, job_schema(), "status") == []


def times(schema: dict[str, Any]) -> set[str]:
    """Names of all properties that are a date-time."""
    found = {name for name, item in schema.get("properties", {}).items() if item.get("format") == "date-time"}
    for below in (*schema.get("properties", {}).values(), schema.get("items", {})):
        found |= times(below) if below else set()
    return found


def test_every_time_of_the_status_is_read_with_care_but_for_those_that_nobody_computes_with() -> None:
    assert times(job_schema()) - {"lastTransitionTime"} == TIMES
