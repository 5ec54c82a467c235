"""CORE: what a look at a job means to the driver of one of its submissions. Pure; the same in production and in the simulator."""

from __future__ import annotations

from enum import StrEnum

TERMINAL_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
ENDING_STATES = frozenset({"CANCELLING", "FAILING"})
"""Nothing leads out of them but a terminal one."""


class Standing(StrEnum):
    """What a look at a job means to the driver of one submission of it."""

    OURS = "ours"
    """Our submission runs."""
    ENDED = "ended"
    """Our submission is in a terminal state."""
    SUPERSEDED = "superseded"
    """A newer submission took the job over: it is another driver's."""
    STALE = "stale"
    """Whoever answered knows only an older submission: not the leader, or not any more. It says nothing of ours."""


def judge_look(*, ours: int, seen: int, state: str) -> Standing:
    """`ours` is the number of the driver's submission, `seen` the one that the coordinator speaks of, in `state`."""
    if seen != ours:
        return Standing.SUPERSEDED if seen > ours else Standing.STALE
    return Standing.ENDED if state in TERMINAL_STATES else Standing.OURS
