"""Which loss of a worker the coordinator calls a silence: that is what its driver cancels it for."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.views import WorkerView
from holdfast.statebackends.errors import FencedError
from tests.coordinator.rig import Rig


def running(**settings: Any) -> Rig:
    rig = Rig(heartbeat_interval_ms=500, heartbeat_timeout_ms=3_000, **settings)
    for slot in (0, 1):
        rig.register(slot, spawn=1, fingerprint=f"f{slot}")
    return rig


def view(rig: Rig, slot: int = 0) -> WorkerView:
    return rig.master.slot_pool.views()[slot]


def keep_alive(rig: Rig, slot: int, for_ms: int) -> None:
    for _ in range(for_ms // 500):
        rig.pass_time(500)
        rig.heartbeat(slot)


def test_a_worker_that_is_silent_on_an_open_stream_has_timed_out() -> None:
    rig = running()
    keep_alive(rig, 1, 3_500)
    found = view(rig)
    assert (found.registered, found.timed_out, found.spawn, found.fingerprint) == (False, True, 1, "f0")
    assert not view(rig, 1).timed_out


def test_a_worker_that_died_closed_its_stream_and_has_not_timed_out() -> None:
    rig = running()
    rig.close_stream(0)
    keep_alive(rig, 1, 1_500)
    found = view(rig)
    assert (found.registered, found.timed_out, found.spawn) == (False, False, 1)


@pytest.mark.parametrize(("spawn", "nonce"), [(1, "0-0"), (2, "successor")], ids=["itself", "its successor"])
def test_whoever_registers_ends_the_silence(spawn: int, nonce: str) -> None:
    rig = running()
    keep_alive(rig, 1, 3_500)
    rig.register(0, spawn=spawn, nonce=nonce, task_attempt=spawn - 1)
    found = view(rig)
    assert (found.registered, found.timed_out, found.spawn) == (True, False, spawn)


def test_a_worker_that_wakes_behind_its_successor_is_refused_even_with_a_higher_task_attempt() -> None:
    """Spark may have run the abandoned task again: what counts is whom the driver started last."""
    rig = running()
    keep_alive(rig, 1, 3_500)
    rig.register(0, spawn=2, nonce="successor", task_attempt=1)
    with pytest.raises(FencedError):
        rig.register(0, spawn=1, nonce="again", task_attempt=9)
    assert view(rig).nonce == "successor"


def test_a_new_leader_accuses_nobody() -> None:
    """It knows no spawn of a slot that has not registered: a driver finds its own workers absent instead."""
    found = view(Rig())
    assert (found.spawn, found.timed_out) == (0, False)
