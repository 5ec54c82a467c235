"""Whether the barriers of a checkpoint overtake: as the settings on record say, or as its user did."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, TriggerCheckpoint
from holdfast.barriers.tunable import CheckpointMode
from holdfast.chaos.checkers.observations import Answered
from holdfast.chaos.checkers.settings import SettingsChecker
from holdfast.chaos.cluster.coordinator_host import UserRequest
from holdfast.coordinator.ha.records import ConfigRecord, encode_record
from tests.simulation.checker_world import JOB, Story, graph

CHECKPOINT, SAVEPOINT = CheckpointKind.CHECKPOINT, CheckpointKind.SAVEPOINT


class Job(Story):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.graph = graph(1, **config)
        self.checkers = [each for each in self.checkers if isinstance(each, SettingsChecker)]
        self.begin()

    def ask(self, trigger_id: str, mode: CheckpointMode) -> None:
        body = UserRequest(CHECKPOINT, trigger_id, mode=mode)
        self.tell(Answered(self.now_ms, f"coordinator-{self.epoch}", "user", "wish", trigger_id, body))

    def take(
        self, number: int, unaligned: bool, timeout_ms: int | None, *, kind: CheckpointKind = CHECKPOINT, trigger_id: str = ""
    ) -> None:
        claim = self.claim(number, kind, trigger_id=trigger_id)
        sent = TriggerCheckpoint(claim.attempt, number, 0, kind, claim.folder, unaligned=unaligned, aligned_timeout_ms=timeout_ms)
        self.command(sent)

    def change(self, number: int, **settings: Any) -> None:
        record = ConfigRecord(number, self.epoch, self.submission, settings, f"n{self.epoch}")
        self.put(f"{JOB}/config/{number}.json", encode_record(record))


def test_a_mode_that_no_settings_on_record_have() -> None:
    job = Job(aligned_checkpoint_timeout_ms=30)
    job.take(1, False, None)
    job.take(2, True, 30)
    assert job.broken == ["I16"]
    job.change(1, aligned_checkpoint_timeout_ms=30, unaligned_checkpoints=True)
    job.take(3, True, 30)
    job.take(4, False, None)
    assert job.broken == ["I16"], "either of them may hold"
    job.take(5, True, 0)
    assert job.broken == ["I16", "I16"]


@pytest.mark.parametrize(("unaligned", "timeout_ms"), [(False, None), (True, 5)])
def test_a_mode_that_is_not_its_user_s(unaligned: bool, timeout_ms: int | None) -> None:
    job = Job(aligned_checkpoint_timeout_ms=5)
    job.ask("t", CheckpointMode(unaligned=True, aligned_timeout_ms=20))
    job.take(1, unaligned, timeout_ms, trigger_id="t")
    assert job.broken == ["I16"]
    assert "request t" in job.violations[0][1]


def test_a_user_s_mode_is_completed_from_the_settings() -> None:
    job = Job(aligned_checkpoint_timeout_ms=5)
    job.ask("t", CheckpointMode(unaligned=True))
    job.take(1, True, 5, trigger_id="t")
    job.take(2, True, 9, trigger_id="of a user who was not heard")
    assert job.broken == []


def test_a_savepoint_that_may_overtake() -> None:
    job = Job(unaligned_checkpoints=True)
    job.take(1, False, None, kind=SAVEPOINT)
    job.take(2, True, 0)
    assert job.broken == []
    job.take(3, True, 0, kind=SAVEPOINT)
    assert job.broken == ["I16"]
