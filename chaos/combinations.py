"""Faults that show something only together, which faults drawn one by one meet too rarely: now and then a seed gets them whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from barriers.jobgraph import JobConfig
from chaos.faults import Fault

SHARE = 0.15
"""Of the runs that a combination fits, those that get one beside their other faults."""
LASTS_MS = 5_000
"""Longer than a short job takes."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Faults of one run."""

    name: str
    meaning: str
    """The dangerous state that they lead to."""
    kinds: tuple[str, ...]
    """Kinds of its faults: drawn only where all of them are wanted."""
    draw: Callable[[random.Random, int], tuple[Fault, ...]]
    """Given the ms in which the job would end by itself."""
    fits: Callable[[JobConfig], bool] = lambda config: True


def draw_combination(rng: random.Random, kinds: tuple[str, ...], config: JobConfig, horizon_ms: int) -> tuple[Fault, ...]:
    """The faults of one combination, or mostly none."""
    fitting = [each for each in COMBINATIONS if set(each.kinds) <= set(kinds) and each.fits(config)]
    if not fitting or rng.random() >= SHARE:
        return ()
    return rng.choice(fitting).draw(rng, horizon_ms)


def _lasting(kind: str, target: str, *, amount: int = 0, probability: float = 1.0) -> Fault:
    return Fault(kind, target, at_ms=0, duration_ms=LASTS_MS, amount=amount, probability=probability)


def _overtaken(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    slow = _lasting("store_slow", "worker:all/savepoint-", amount=rng.choice((60, 200, 400)))
    return Fault("savepoint", at_ms=rng.randrange(100, horizon_ms)), slow


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "overtaken_savepoint",
        "workers are slow with a savepoint, and checkpoints that were triggered after it complete before it",
        ("savepoint", "store_slow"),
        _overtaken,
        lambda config: config.max_concurrent_checkpoints > 1,
    ),
)
