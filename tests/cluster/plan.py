"""CORE: which links of the cluster are cut, when, for how long and in which direction, all drawn from a seed.

It knows the hosts by name alone, and nothing of how a link is cut (network.py)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

DRIVER = "driver"
STORAGE = "storage"
WORKERS = ("worker-1", "worker-2")
HOSTS = (DRIVER, *WORKERS, STORAGE)
"""The driver's host has the coordinator, and Spark's Master, too."""

HEARTBEAT_TIMEOUT_MS = 6_000
"""Of the job: a worker that its coordinator has not heard for so long is lost."""

CUTS_MAX = 12


class Kind(StrEnum):
    """What the two hosts of a link are for each other."""

    COORDINATOR = "worker-coordinator"
    WORKER = "worker-worker"
    STORAGE = "worker-storage"


class Lost(StrEnum):
    """Frames that a cut link loses."""

    BOTH = "both ways"
    OUT = "first to second"
    BACK = "second to first"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bounds of a cut's length in ms, included: shorter than the time after which the job takes the other side for lost, and
    longer."""

    short: tuple[int, int]
    limit: int
    """That time: of the job's heartbeats, of ZeroMQ's pings (barriers/transport/zmq_transport.py), of the retries on S3
    (docs/storage.md)."""
    long: tuple[int, int]


LENGTHS = {
    Kind.COORDINATOR: Lengths((1_000, 4_000), HEARTBEAT_TIMEOUT_MS, (9_000, 14_000)),
    Kind.WORKER: Lengths((2_000, 9_000), 30_000, (36_000, 42_000)),
    Kind.STORAGE: Lengths((2_000, 9_000), 30_000, (33_000, 40_000)),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut: it begins `delay_ms` behind the completion of so many checkpoints since the cut before was healed."""

    kind: Kind
    first: str
    second: str
    lost: Lost
    checkpoints: int
    delay_ms: int
    duration_ms: int
    is_long: bool
    """Longer than the time after which the other side is taken for lost."""

    def __str__(self) -> str:
        length = "longer" if self.is_long else "shorter"
        limit = LENGTHS[self.kind].limit / 1000
        waits = f"{self.duration_ms / 1000:.1f} s ({length} than {limit:g} s)"
        return f"{self.first} | {self.second} for {waits}, frames lost {self.lost}"


def plan_cuts(seed: int, count: int = 3) -> tuple[Cut, ...]:
    """The cuts of a run, 1 <= count <= CUTS_MAX. Of each three in a row each kind is one; of two or more one is shorter than the
    other side waits, and one longer. Equal arguments give equal plans. Raises ValueError."""
    if not 1 <= count <= CUTS_MAX:
        raise ValueError(f"a run has 1..{CUTS_MAX} cuts, not {count}")
    rng = random.Random(f"cluster-{seed}")
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += rng.sample(list(Kind), len(Kind))
    long = [rng.random() < 0.5 for _ in range(count)]
    if count > 1 and len(set(long)) == 1:
        index = rng.randrange(count)
        long[index] = not long[index]
    return tuple(_draw(rng, kind, is_long=is_long) for kind, is_long in zip(kinds, long, strict=False))


def _draw(rng: random.Random, kind: Kind, *, is_long: bool) -> Cut:
    worker, other = rng.sample(WORKERS, 2)
    second = {Kind.COORDINATOR: DRIVER, Kind.WORKER: other, Kind.STORAGE: STORAGE}[kind]
    bounds = LENGTHS[kind].long if is_long else LENGTHS[kind].short
    return Cut(
        kind,
        worker,
        second,
        lost=rng.choice((Lost.BOTH, Lost.BOTH, Lost.OUT, Lost.BACK)),
        checkpoints=rng.randint(1, 3),
        delay_ms=rng.randrange(1_500),
        duration_ms=rng.randint(*bounds),
        is_long=is_long,
    )
