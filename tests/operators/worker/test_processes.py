"""Worker processes of one machine: when one that ended is started again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.operators.worker.main import EXIT_RESPAWN, WorkerSpec
from tests.harness.slots import RESPAWN_DELAY_MS_MAX, RESPAWN_DELAY_MS_MIN, LocalProcessSlots


@pytest.mark.parametrize("code", [EXIT_RESPAWN, 1, -9])
def test_a_process_that_always_ends_at_once_is_started_ever_more_slowly(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr("tests.harness.slots.start_worker", lambda *_: SimpleNamespace(poll=lambda: code))
    slots = LocalProcessSlots(WorkerSpec("job", 0, 1, 1, "http://127.0.0.1:1", None, "", b"", ""), 1)
    (slot,), now_s, delays = slots._slots, 1_000.0, []
    for _ in range(10):
        slots._look_after(slot, now_s)
        slots._look_after(slot, now_s)
        delays.append(round((slot.respawn_at_s - now_s) * 1000))
        now_s = slot.respawn_at_s
        slot.process = None
    slots._folder.cleanup()
    assert delays[0] == RESPAWN_DELAY_MS_MIN
    assert delays == sorted(delays)
    assert delays[-1] == RESPAWN_DELAY_MS_MAX
