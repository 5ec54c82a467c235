from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.fakes import FakeCoordinator, Served, serving


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeCoordinator, Served]]:
    """One server for all tests that don't change its settings: starting and stopping one takes a third of a second."""
    coordinator = FakeCoordinator()
    with serving(coordinator, tmp_path_factory.mktemp("shared")) as running:
        yield coordinator, running


@pytest.fixture
def coordinator(_shared: tuple[FakeCoordinator, Served]) -> Iterator[FakeCoordinator]:
    """As new for each test."""
    shared = _shared[0]
    shared.reset()
    yield shared
    for subscription in shared.subscriptions:
        subscription.end()


@pytest.fixture
def served(_shared: tuple[FakeCoordinator, Served], coordinator: FakeCoordinator) -> Served:
    return _shared[1]
