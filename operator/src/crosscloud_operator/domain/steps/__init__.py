"""One decision function per state; `stopping.deleting` stands apart, since it must work without a readable spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crosscloud_operator.domain.lifecycle import Decision, Facts, State
from crosscloud_operator.domain.steps.gang import admitting, binding
from crosscloud_operator.domain.steps.running import running
from crosscloud_operator.domain.steps.stopping import ending, finished, retrying, stopping
from crosscloud_operator.domain.steps.waiting import waiting

STEPS: Mapping[State, Callable[[Facts], Decision]] = {
    State.WAITING: waiting,
    State.ADMITTING: admitting,
    State.BINDING: binding,
    State.RUNNING: running,
    State.STOPPING: stopping,
    State.RETRYING: retrying,
    State.ENDING: ending,
    State.FINISHED: finished,
}


def decide(facts: Facts) -> Decision:
    """What follows from the facts."""
    return STEPS[facts.state](facts)
