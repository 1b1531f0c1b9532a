"""The view as the register keeps it: who exchanges with whom, under whose authority. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crosscloud_trainer.contract.reading import rule
from crosscloud_trainer.link import Authority, Fenced

VIEW_VERSION = "view.crosscloud.dev/v1"
VIEW_KEY = "view.json"  # the key in the ConfigMap


@dataclass(frozen=True)
class ViewReplica:
    index: int = rule(minimum=0)
    incarnation: int = rule(minimum=1)


@dataclass(frozen=True)
class View:
    """Replicas of one attempt that exchange with each other.

    `term` grows with every process that takes charge of the view, `number` with every change of its replicas.
    """

    api_version: str = rule(pattern=f"^{VIEW_VERSION}$")
    attempt: int = rule(minimum=1)
    home: int = rule(minimum=1)
    term: int = rule(minimum=1)
    number: int = rule(minimum=1)
    replicas: tuple[ViewReplica, ...] = rule(min_items=1, unique="index")

    @property
    def authority(self) -> Authority:
        return Authority(self.home, self.term, self.number)

    @property
    def incarnations(self) -> dict[int, int]:
        return {replica.index: replica.incarnation for replica in self.replicas}


def opened(before: View | None, home: int, attempt: int, incarnations: Mapping[int, int]) -> View:
    """What the register must hold once this process has taken charge. Raises Fenced if it is too late for that."""
    if before is not None and (before.attempt, before.home) > (attempt, home):
        found = f"attempt {before.attempt} and home {before.home}"
        raise Fenced(f"the view is of {found}; this is attempt {attempt} and home {home}")
    term = before.term + 1 if before else 1
    if before is not None and before.attempt == attempt and before.incarnations == dict(incarnations):
        return replace(before, home=home, term=term)
    replicas = tuple(ViewReplica(index, incarnations[index]) for index in sorted(incarnations))
    number = before.number + 1 if before else 1
    return View(VIEW_VERSION, attempt, home, term, number, replicas)
