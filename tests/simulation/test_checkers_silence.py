"""When a silent source may be idle, as seen from outside (I33)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.chaos.checkers.silence import SilenceChecker
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.functions.event_time.watermarks import WatermarkStrategy
from holdfast.operators.functions.schema import UNDECLARED
from holdfast.operators.task.source_operator import SourceOperator
from tests.operators.functions.event_time.test_idleness import Tap
from tests.operators.runtime import Bench
from tests.simulation.checker_world import Story, process

TIMEOUT_MS = 200


class Watch:
    """A source with a timeout, and the checker that looks at it."""

    def __init__(self) -> None:
        made = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda row: row).with_idleness(TIMEOUT_MS)
        self.tap = Tap([10])
        self.bench = Bench([SourceOperator(self.tap), TimestampsOperator(made.assigner, made, UNDECLARED)])
        self.bench.subtask.start()
        deployed = SimpleNamespace(subtask=self.bench.subtask, gate=None)
        self.story = Story(live_workers=[process("worker-0.1", subtasks=lambda: [deployed])])
        self.found: list[str] = []
        self.checker = SilenceChecker(self.story, self.story.scenario, lambda _, message: self.found.append(message), None)  # type: ignore[arg-type]

    def step(self, at_ms: int) -> None:
        """Of the subtask, in its worker's time."""
        self.bench.clock.now_ms = at_ms
        self.bench.run()

    def look(self, at_ms: int) -> list[str]:
        """By the simulator's clock; what is found."""
        self.bench.clock.now_ms = at_ms
        self.checker.look()
        return self.found

    @property
    def is_idle(self) -> bool:
        return self.bench.chain.nodes[-1].idle


@pytest.fixture
def watch() -> Watch:
    """Its last record comes at 1,010 ms, between two looks."""
    watch = Watch()
    watch.step(1_000)
    watch.look(1_000)
    watch.tap.waiting = [11]
    watch.step(1_010)
    return watch


def test_a_source_that_steps_behind_a_slow_one_is_silent_in_its_workers_time(watch: Watch) -> None:
    watch.step(1_410)  # another subtask of the worker has taken 400 ms, of which the simulator's clock shows none
    assert watch.is_idle
    assert watch.look(1_100) == []
    assert watch.look(1_200) == []


def test_what_such_a_step_took_counts_once(watch: Watch) -> None:
    """A record comes behind it: from then on the source has its timeout again."""
    watch.step(1_410)
    watch.look(1_100)
    watch.tap.waiting = [12]
    watch.step(1_420)
    watch.look(1_420)
    watch.bench.chain.nodes[-1].idle = True
    assert watch.look(1_500) == ["op1 (0) of worker-0.1 is idle after 90 ms in which it could read, before its 200 ms"]


def test_a_source_that_is_idle_too_early_is_found(watch: Watch) -> None:
    watch.bench.chain.nodes[-1].idle = True
    assert watch.look(1_150) == ["op1 (0) of worker-0.1 is idle after 150 ms in which it could read, before its 200 ms"]


def test_a_source_that_never_goes_idle_is_found_behind_a_slow_step_too(watch: Watch) -> None:
    watch.step(1_150)
    watch.look(1_100)
    for at_ms in range(1_200, 1_700, 50):
        watch.bench.clock.now_ms = at_ms
        watch.bench.subtask._times.last_end_s = at_ms / 1000
        assert watch.look(at_ms) == []
    watch.bench.subtask._times.last_end_s = 1.8
    found = watch.look(1_800)
    assert found == ["op1 (0) of worker-0.1 is active after 650 ms without a record; it has 200 ms"]
