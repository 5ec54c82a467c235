"""The time that workers have to come back to a new leader: what the checker says, and what it must not."""

from __future__ import annotations

from types import SimpleNamespace

from holdfast.chaos.checkers.observations import Listened
from holdfast.coordinator.jobmaster.failover import Failure
from holdfast.coordinator.jobmaster.lifecycle import NOT_BACK
from tests.simulation.checker_world import Story, graph, process

TIMEOUT_MS = 1_000


class Takeover(Story):
    """A job that a new leader leads since the moment 0."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = graph(1, reconcile_timeout_ms=TIMEOUT_MS)
        self.begin()
        exceptions = SimpleNamespace(newest=None)
        self.master = SimpleNamespace(
            coordinator=SimpleNamespace(pending=[]), lifecycle=SimpleNamespace(exceptions=exceptions, attempt=0)
        )
        self.live_coordinators = [process("coordinator-1", services=[SimpleNamespace(epoch=self.epoch, _master=self.master)])]

    def listen(self) -> None:
        self.tell(Listened(self.now_ms, f"coordinator-{self.epoch}"))

    def give_up(self, at_ms: int, error: str = f"WorkerLost: slots [0] {NOT_BACK}") -> list[tuple[str, str]]:
        self.now_ms = at_ms
        self.master.lifecycle.exceptions.newest = Failure(error)
        self.record_attempt(0)
        return self.violations


def test_workers_that_nobody_could_reach_yet() -> None:
    (violation,) = Takeover().give_up(TIMEOUT_MS)
    assert violation[0] == "I16"
    assert "does not even listen" in violation[1]


def test_workers_whose_time_began_before_their_leader_could_be_reached() -> None:
    job = Takeover()
    job.now_ms = 600
    job.listen()
    (violation,) = job.give_up(TIMEOUT_MS + 1)
    assert f"within 401 ms; they have {TIMEOUT_MS} ms" in violation[1]


def test_workers_that_had_their_time() -> None:
    job = Takeover()
    job.now_ms = 600
    job.listen()
    assert job.give_up(600 + TIMEOUT_MS) == []


def test_another_failure_may_come_at_any_time() -> None:
    assert Takeover().give_up(1, "WorkerLost: nothing was heard from the worker in slot 0") == []
