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
    """With its number of seeds."""
    expected: tuple[str, ...]
    """Invariants that it is expected to break; empty: any."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of a trial."""

    sabotage: str
    caught_after: int
    """Seeds up to the one that caught it, inclusive; 0: not caught."""
    seeds: int
    """Seeds that were granted."""
    invariant: str
    """The first invariant that it broke."""
    expected: tuple[str, ...]
    message: str


def try_all(trials: Iterable[Trial], run: Callable[[Campaign], Finding], told: Callable[[Verdict], None]) -> list[Verdict]:
    """Trials one after another; `run` stops at the first failure, `told` receives each verdict. Raises KeyboardInterrupt when
    interrupted."""
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
