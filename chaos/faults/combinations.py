"""Combinations of faults: some states take several faults together, which single draws meet too rarely."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.barriers.jobgraph import JobConfig
from holdfast.chaos.faults.faults import Fault

SHARE = 0.3
"""Share of fitting runs that get a combination beside their other faults."""
LASTS_MS = 5_000
"""Longer than a short job takes, ms."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Faults of one run."""

    name: str
    meaning: str
    """The dangerous state that they lead to."""
    kinds: tuple[str, ...]
    """Kinds of its faults; it is drawn only where all of them are wanted."""
    draw: Callable[[random.Random, int], tuple[Fault, ...]]
    """Draws the faults, given the ms in which the job would end by itself."""
    fits: Callable[[JobConfig], bool] = lambda config: True
    operators: frozenset[str] = frozenset()
    """Uids, of which the job must have one; empty: any job."""
    weight: int = 1
    """Weight of the draw: higher for combinations that fit few jobs or seldom take effect."""


def draw_combination(
    rng: random.Random, kinds: tuple[str, ...], config: JobConfig, operators: tuple[str, ...], horizon_ms: int
) -> tuple[Fault, ...]:
    """Faults of one combination for a job with these operators; mostly empty."""
    fitting = [
        each
        for each in COMBINATIONS
        if set(each.kinds) <= set(kinds) and each.fits(config) and (not each.operators or each.operators & set(operators))
    ]
    if not fitting or rng.random() >= SHARE:
        return ()
    return rng.choices(fitting, [each.weight for each in fitting])[0].draw(rng, horizon_ms)


def _lasting(kind: str, target: str, *, amount: int = 0, probability: float = 1.0) -> Fault:
    return Fault(kind, target, at_ms=0, duration_ms=LASTS_MS, amount=amount, probability=probability)


def _overtaken(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    slow = _lasting("store_slow", "worker:all/savepoint-", amount=rng.choice((60, 200, 400)))
    return Fault("savepoint", at_ms=rng.randrange(100, horizon_ms)), slow


def _half_deleted(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    return (Fault("kill_coordinator", on="coordinator.DeleteFile.shared", nth=rng.randint(2, 12), amount=rng.choice((1, 300))),)


def _unsynced(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    """The writer retries and finds its own name; or it dies, and another leader finds the name, whose effects have been
    announced."""
    power = Fault("power_loss", on="coordinator.send.complete", nth=rng.randint(2, 12), amount=rng.choice((1, 300)))
    return _lasting("store_unsynced", "PutIfAbsent", probability=rng.choice((0.3, 0.6))), power


def _slow_firing(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    return (_lasting("slow_operator", "window/firing", amount=rng.choice((20, 40))),)


def _restarts(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    failed, died, again = sorted(rng.randrange(200, horizon_ms) for _ in range(3))
    return Fault("user_error", at_ms=failed), Fault("kill_coordinator", at_ms=died, amount=1), Fault("user_error", at_ms=again)


def _ended(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    """A savepoint joins the checkpoint that ends the job, and fails; some sources do not know of it, and some readers not of its
    end."""
    probability, since = rng.choice((0.5, 1.0)), "coordinator.send.trigger.savepoint"
    return (
        Fault("savepoint", on="coordinator.send.trigger.final"),
        Fault("drop", "trigger", on=since, duration_ms=LASTS_MS, probability=0.5),
        Fault("drop", "abort", on=since, duration_ms=LASTS_MS, probability=probability),
        Fault("store_fails", "worker:all/savepoint-", on=since, duration_ms=LASTS_MS, probability=probability),
    )


def _failing(rng: random.Random, horizon_ms: int) -> tuple[Fault, ...]:
    """The coordinator dies in one of the pauses."""
    first, apart_ms = rng.randrange(200, horizon_ms // 2), rng.choice((60, 150, 400))
    died = Fault("kill_coordinator", on="coordinator.PutIfAbsent.attempts.done", nth=rng.randint(2, 5), amount=rng.choice((1, 60)))
    return (*(Fault("user_error", at_ms=first + index * apart_ms) for index in range(rng.randint(3, 6))), died)


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "overtaken_savepoint",
        "workers are slow with a savepoint, and checkpoints that were triggered after it complete before it",
        ("savepoint", "store_slow"),
        _overtaken,
        lambda config: config.max_concurrent_checkpoints > 1,
        weight=2,
    ),
    Combination(
        "half_deleted",
        "a coordinator dies between two deletions of files that checkpoints share",
        ("kill_coordinator",),
        _half_deleted,
        lambda config: config.is_incremental,
        weight=10,
    ),
    Combination(
        "unsynced_name",
        "a name is found before it is durable, and the power goes when others have acted on it",
        ("store_unsynced", "power_loss"),
        _unsynced,
    ),
    Combination(
        "slow_firing",
        "windows fire slowly, so that barriers come between two slices",
        ("slow_operator",),
        _slow_firing,
        operators=frozenset({"window"}),
        weight=2,
    ),
    Combination(
        "restarts_over_leaders",
        "an attempt fails under one leader, and the next one under another",
        ("user_error", "kill_coordinator"),
        _restarts,
    ),
    Combination(
        "failing_over_leaders",
        "attempts fail in a row, and their leader dies in a pause between two",
        ("user_error", "kill_coordinator"),
        _failing,
        lambda config: config.restart.is_lasting,
        weight=10,
    ),
    Combination(
        "ended_in_alignment",
        "a savepoint joins the checkpoint that ends the job, and a channel ends while its reader waits for barriers",
        ("savepoint", "drop", "store_fails"),
        _ended,
        weight=3,
    ),
)
