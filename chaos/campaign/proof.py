"""Proof that the checkers can fail: every sabotage is run until one of them catches it, or its seeds are used up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from holdfast.chaos.campaign.campaign import Campaign, Finding


@dataclass(frozen=True, slots=True)
class Trial:
    """A sabotage to be caught."""

    name: str
    campaign: Campaign
    """With as many seeds as are granted."""
    expected: tuple[str, ...]
    """Invariants that it breaks; empty: any."""


class Verdict(msgspec.Struct, frozen=True):
    """What became of a trial."""

    sabotage: str
    caught_after: int
    """Seeds, the one that caught it included; 0: not caught."""
    seeds: int
    """Seeds that were granted."""
    invariant: str
    """That it broke first."""
    expected: tuple[str, ...]
    message: str


def try_all(trials: Iterable[Trial], run: Callable[[Campaign], Finding], told: Callable[[Verdict], None]) -> list[Verdict]:
    """One after another; `run` stops at the first failure, `told` hears each verdict. Raises KeyboardInterrupt when interrupted."""
    verdicts = []
    for trial in trials:
        found = run(trial.campaign)
        if found.summary.interrupted:
            raise KeyboardInterrupt
        caught = found.failures if found.summary.caught_after else ()
        verdict = Verdict(
            trial.name,
            found.summary.caught_after,
            trial.campaign.seeds,
            caught[0].invariant if caught else "",
            trial.expected,
            caught[0].message if caught else "",
        )
        told(verdict)
        verdicts.append(verdict)
    return verdicts
