"""Takeovers of members (I44): each has a reason that the member has seen itself, so that a healthy member stays the active one;
and an active member that storage takes nothing from does not stay it.

No job's safety depends on it: two members that lead are two coordinators, and all other invariants hold."""

from __future__ import annotations

from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.observations import Claimed, Observation, SignFailed


class TakeoversChecker(Checker):
    """Checks the claims of one run."""

    invariants: ClassVar[tuple[str, ...]] = ("I44",)
    hears: ClassVar[tuple[type, ...]] = (Claimed, SignFailed)

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, SignFailed):
            if observation.in_a_row > 2 * observation.signs_until_given_up:
                self.report("I44", f"{observation.actor} is active, and could not store {observation.in_a_row} signs of life")
            return
        assert isinstance(observation, Claimed)
        claimed = observation
        if claimed.has_left or claimed.has_lock:
            return
        who = f"{claimed.actor} asks for epoch {claimed.epoch}"
        if claimed.unchanged_ms < claimed.takeover_after_ms:
            self.report("I44", f"{who}, and saw the active member's sign of life unchanged for {claimed.unchanged_ms} ms alone")
        elif not claimed.probe_failed or claimed.probed_ms < claimed.takeover_after_ms:
            self.report("I44", f"{who} without a probe that failed since")
