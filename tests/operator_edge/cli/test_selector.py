"""Label selectors on the command line, and what is changed of an object that is there."""

from __future__ import annotations

from typing import Any

import pytest
from click import BadParameter

from crosscloud_operator.cli.apply import difference
from crosscloud_operator.cli.selector import parse_selector


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("team=ml", {"matchLabels": {"team": "ml"}}),
        ("team==ml, tier=a", {"matchLabels": {"team": "ml", "tier": "a"}}),
        ("env in (dev, test)", {"matchExpressions": [{"key": "env", "operator": "In", "values": ["dev", "test"]}]}),
        ("env notin (dev)", {"matchExpressions": [{"key": "env", "operator": "NotIn", "values": ["dev"]}]}),
        ("a!=b", {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}),
        ("acme.io/ml", {"matchExpressions": [{"key": "acme.io/ml", "operator": "Exists"}]}),
        ("!old", {"matchExpressions": [{"key": "old", "operator": "DoesNotExist"}]}),
    ],
)
def test_selectors_are_read_as_kubectl_reads_them(text: str, expected: dict[str, Any]) -> None:
    assert parse_selector(text) == expected


UNREADABLE = ["", " ", "=", "a in", "a in dev", "a in (dev", "a=b=c", "a=b,,c", "a=1,a=2", "a b", "a in ()"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_selectors_that_can_not_be_read_are_named(text: str) -> None:
    with pytest.raises(BadParameter, match="found"):
        parse_selector(text)


def test_a_difference_leaves_what_it_does_not_name() -> None:
    present = {"metadata": {"name": "a", "labels": {"x": "1"}}, "spec": {"kept": 1, "map": {"old": 1, "same": 2}}}
    wanted = {"metadata": {"name": "a", "labels": {"y": "2"}}, "spec": {"map": {"same": 2, "new": 3}}}
    assert difference(present, wanted) == {
        "metadata": {"labels": {"y": "2"}},
        "spec": {"map": {"old": None, "new": 3}},
    }
    assert difference(present, present) == {}
