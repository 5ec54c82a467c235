"""Groups F, G and H in each mode of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.coordinator.bench import Bench

MODES: Mapping[str, Mapping[str, Any]] = {
    "aligned": {},
    "unaligned": {"unaligned_checkpoints": True},
    "timeout": {"unaligned_checkpoints": True, "aligned_checkpoint_timeout_ms": 40},
    "at_least_once": {"checkpointing_mode": "at_least_once"},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of the coordinator in all modes; one that needs several checkpoints at once where there may be several."""
    name = metafunc.module.__name__
    if (not name.endswith("test_failures") and ".checkpoints." not in name) or getattr(metafunc.module, "Bench", None) is not Bench:
        return
    several = getattr(metafunc.function, "needs_several", False)
    modes = [mode for mode, settings in MODES.items() if not (several and "unaligned_checkpoints" in settings)]
    metafunc.fixturenames.append("mode")
    metafunc.parametrize("mode", modes, indirect=True)


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(Bench, "mode", MODES[name])
    return name
