"""Label selectors as kubectl writes them, read into a LabelSelector. Pure."""

from __future__ import annotations

import re

import click

from crosscloud_operator.kube.api import Obj

_KEY = r"(?:[a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_SET = re.compile(rf"(?P<key>{_KEY})\s+(?P<word>in|notin)\s+\((?P<values>[^()]*)\)")
_EQUAL = re.compile(rf"(?P<key>{_KEY})\s*(?P<word>==|=|!=)\s*(?P<value>{_VALUE})?")
_EXISTS = re.compile(rf"(?P<word>!?)\s*(?P<key>{_KEY})")
_ALLOWED = "must be labels as in `kubectl get -l`, like team=ml,env in (dev,test),!old"


def parse_selector(text: str) -> Obj:
    """Raises click.BadParameter naming the part that can't be read."""
    labels: dict[str, str] = {}
    expressions: list[Obj] = []
    # Commas between requirements, not those within parentheses.
    for part in re.split(r",(?![^(]*\))", text):
        requirement = part.strip()
        if found := _EQUAL.fullmatch(requirement):
            value = found["value"] or ""
            if found["word"] == "!=":
                expressions.append({"key": found["key"], "operator": "NotIn", "values": [value]})
            elif labels.setdefault(found["key"], value) != value:
                raise click.BadParameter(f"found {requirement!r}; {found['key']} can't have two values")
        elif found := _SET.fullmatch(requirement):
            values = [value.strip() for value in found["values"].split(",")]
            if not all(re.fullmatch(_VALUE, value) for value in values):
                raise click.BadParameter(f"found {requirement!r}; {_ALLOWED}")
            operator = "In" if found["word"] == "in" else "NotIn"
            expressions.append({"key": found["key"], "operator": operator, "values": values})
        elif found := _EXISTS.fullmatch(requirement):
            operator = "DoesNotExist" if found["word"] else "Exists"
            expressions.append({"key": found["key"], "operator": operator})
        else:
            raise click.BadParameter(f"found {requirement!r}; {_ALLOWED}")
    selector: Obj = {}
    if labels:
        selector["matchLabels"] = labels
    if expressions:
        selector["matchExpressions"] = expressions
    return selector
