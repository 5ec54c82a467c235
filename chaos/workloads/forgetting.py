"""The keyed counter whose user has it forget a key while it runs (I46). The key comes among the first records alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Forgetting,
    InFlightRows,
    Positions,
    Possibly,
    Scenario,
    Workload,
)
from holdfast.chaos.workloads.settings import draw_settings

GUEST = 0x5ED1_C90A_7B3F_2461
"""The key. Its bytes are nothing else."""
_EVERY = 7


@dataclass(frozen=True, slots=True)
class GuestFeed(Feed):
    """Every seventh of the first records is the guest's."""

    guest_rows: int = 0

    def key(self, index: int) -> int:
        return GUEST if self._is_guest(index) else (self._mixed(index) >> 12) % self.keys

    def _is_guest(self, index: int) -> bool:
        return index < self.guest_rows and index % _EVERY == 0

    def make_batch(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        keys = pa.array([self.key(index) for index in indices.tolist()], pa.int64())
        plain = Feed.make_batch(self, indices)
        return pa.RecordBatch.from_arrays([plain.column(0), keys, *plain.columns[2:]], schema=self.schema)


def make(rng: random.Random) -> Scenario:
    """As the counter, with several checkpoints that are retained."""
    feed = GuestFeed("numbers", rng.randint(700, 900), KEYS, first=rng.randrange(1_000), guest_rows=rng.randint(100, 300))
    backend = rng.choice(("memory", "filesystem", "filesystem", "filesystem", "rocksdb"))
    settings = {
        **draw_settings(rng, interval_ms=(50, 110)),
        "min_pause_ms": 0,
        "retained_checkpoints": rng.choice((1, 2, 3)),
        "batch_rows_max": 65_536,
        "state_backend": backend,
        "inline_threshold": rng.choice((0, 20_480)),
    }
    made = counted_into_ledger(feed, rng.choice((1, 2, 2)), rng.randint(600, 800), rng.choice((80, 100, 125)), settings)
    cuts = tuple(_forgiving(cut) for cut in made.cuts)
    return replace(made, cuts=cuts, forgetting=Forgetting(feed.uid, "count", GUEST, feed.guest_rows, feed.rows), may_rewind=False)


def _forgiving(cut: CutExpectation) -> CutExpectation:
    """The guest's state is there as it must be, or erased."""

    def expected(positions: Positions) -> CutStates:
        return _softened(cut.expected(positions))

    def beside(positions: Positions, in_flight: InFlightRows) -> CutStates:
        assert cut.beside is not None
        return _softened(cut.beside(positions, in_flight))

    return replace(cut, expected=expected, beside=beside)


def _softened(states: CutStates) -> CutStates:
    def soften(held: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {key: Possibly(value) if key == GUEST else value for key, value in held.items()}

    return {name: soften(held) for name, held in states.items()}


WORKLOAD = Workload("forgetting", "the counter, which forgets a key while it runs; only when it is named", make)
