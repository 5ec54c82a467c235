"""Seed processes are copies of one that has imported the simulator: most of a short run's price is the imports."""

from __future__ import annotations

import pytest

from holdfast.chaos.campaign import runner
from tests.harness.nursery import Child, nursery

_IMPORTED = {runner.RUN_SEED: (runner.RUN_SEED.partition(":")[0], "pandas")}
"""By entry. Arrow imports Pandas on first use."""


def start_copy(descriptor: int, entry: str, limit_s: float, hash_seed: str | None) -> Child:
    """As `runner.start_server`, without a new interpreter."""
    copies = nursery(*_IMPORTED.get(entry, ("tests.simulation.fakes",)), hash_seed=hash_seed)
    arguments = (f"{runner.__name__}:serve", str(descriptor), entry, str(limit_s))
    return copies.start(f"{runner.__name__}:call", *arguments, descriptor=descriptor)


@pytest.fixture(autouse=True)
def seed_processes_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "start_server", start_copy)
