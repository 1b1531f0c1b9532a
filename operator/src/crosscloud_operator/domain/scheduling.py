"""The few rules of the Kubernetes scheduler that planning must obey: selectors, node affinity, taints, requests.

Sources: the Kubernetes documentation of label selectors, node affinity, taints and tolerations, and of init containers
("the effective request is the higher of the largest init container and the sum of the containers").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Raw = Mapping[str, Any]

_KEEPS_AWAY = ("NoSchedule", "NoExecute")
_COUNT_SUFFIXES = {"k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}


def matches_labels(selector: Raw | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector (matchLabels and matchExpressions). None matches nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_matches_expression(item, labels) for item in selector.get("matchExpressions") or ())


def matches_node(pod_spec: Raw, name: str, labels: Mapping[str, str]) -> bool:
    """Whether a pod's nodeSelector and required node affinity let it onto the node."""
    if any(labels.get(key) != value for key, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    terms = required_node_terms(pod_spec)
    return terms is None or any(_matches_term(term, name, labels) for term in terms)


def required_node_terms(pod_spec: Raw) -> Sequence[Raw] | None:
    """The nodeSelectorTerms (any of them must match), None where there are none."""
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if required is None else list(required.get("nodeSelectorTerms") or ())


def untolerated(taints: Iterable[Raw], tolerations: Sequence[Raw]) -> str | None:
    """The first taint, as `key=value:Effect`, that keeps such a pod away; None where none does."""
    for taint in taints:
        if taint.get("effect") in _KEEPS_AWAY and not any(_tolerates(item, taint) for item in tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"{taint.get('key')}{value}:{taint['effect']}"
    return None


def requested(pod_spec: Raw, resource: str) -> int:
    """How much of a counted resource the pod holds on its node."""
    pod_level = ((pod_spec.get("resources") or {}).get("requests") or {}).get(resource)
    if pod_level is not None:
        return count(pod_level)
    running = sum(_requests(container, resource) for container in pod_spec.get("containers") or ())
    sidecars = peak = 0
    for container in pod_spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            sidecars += _requests(container, resource)
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + _requests(container, resource))
    overhead = count((pod_spec.get("overhead") or {}).get(resource, 0))
    return max(running + sidecars, peak) + overhead


def count(quantity: object) -> int:
    """A whole number of devices from a Kubernetes quantity; what isn't one counts as 0 (a node offers none of it)."""
    text = str(quantity).strip()
    for suffix, factor in _COUNT_SUFFIXES.items():
        if text.endswith(suffix) and text[: -len(suffix)].isdigit():
            return int(text[: -len(suffix)]) * factor
    return int(text) if text.isdigit() else 0


def _requests(container: Raw, resource: str) -> int:
    resources = container.get("resources") or {}
    for part in ("requests", "limits"):  # requests that are not given are the limits
        if resource in (resources.get(part) or {}):
            return count(resources[part][resource])
    return 0


def _tolerates(toleration: Raw, taint: Raw) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    if toleration["key"] != taint.get("key"):
        return False
    return exists or (toleration.get("value") or "") == (taint.get("value") or "")


def _matches_term(term: Raw, name: str, labels: Mapping[str, str]) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # an empty term matches no node
    return all(_matches_expression(item, labels) for item in expressions) and all(
        _matches_expression(item, {"metadata.name": name}) for item in fields
    )


def _matches_expression(expression: Raw, labels: Mapping[str, str]) -> bool:
    found = labels.get(str(expression.get("key")))
    values = [str(value) for value in expression.get("values") or ()]
    operator = expression.get("operator")
    if operator == "In":
        return found is not None and found in values
    if operator == "NotIn":
        return found is None or found not in values
    if operator == "Exists":
        return found is not None
    if operator == "DoesNotExist":
        return found is None
    if operator in ("Gt", "Lt") and found is not None and len(values) == 1:
        try:
            left, right = int(found), int(values[0])
        except ValueError:
            return False
        return left > right if operator == "Gt" else left < right
    return False
