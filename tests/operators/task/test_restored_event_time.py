"""Which event time a subtask restores beside records in flight (ADR 91)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.operators.functions.windows.kept_watermark import LATE_UNTIL, WATERMARKS
from holdfast.operators.task.restore import StateLoader
from holdfast.statebackends.handles import InlineHandle, OperatorListHandle
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution

FIRED = OperatorListStateDescriptor("fired_until", Redistribution.UNION)
LISTS = (WATERMARKS, LATE_UNTIL, FIRED)


@pytest.mark.parametrize(("parallelism", "timed"), [(3, [b"1"]), (2, [b"0", b"1", b"2"])])
def test_its_own_event_time_unless_the_job_was_rescaled(parallelism: int, timed: list[bytes]) -> None:
    """Three subtasks have stored these lists; the second one restores."""
    handles = [
        OperatorListHandle(state_meta(each, None), InlineHandle(b"%d" % subtask), 1) for subtask in range(3) for each in LISTS
    ]
    loader: Any = SimpleNamespace(_vertex=SimpleNamespace(parallelism=parallelism), _subtask=1)
    found: dict[str, list[bytes]] = {}
    for handle in StateLoader._with_own_event_time(loader, handles, LISTS):
        assert isinstance(handle.part, InlineHandle)
        found.setdefault(handle.state.name, []).append(handle.part.data)
    assert found == {"watermarks": timed, "late_until": timed, "fired_until": [b"0", b"1", b"2"]}
