"""Settings of a running job: refused by name, durable before they hold, the same under every later leader."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind, TaskState, TriggerCheckpoint
from holdfast.barriers.tunable import AS_CONFIGURED, TUNABLE, CheckpointMode, apply_settings, parse_setting
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission, start_submission
from holdfast.coordinator.ha.recorded_job import derive_config
from holdfast.coordinator.ha.records import ConfigRecord, encode_record
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.running_settings import CONFIG_RETRY_MS, WAITING_MAX
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CorruptStateError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    NotLeaderError,
    StorageUnavailableError,
    UnsupportedVersionError,
)
from holdfast.statebackends.layout import JobPaths, is_job_record
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB, DictStorage, Steps

PATHS = JobPaths(JOB)


def change(rig: Rig, **settings: Any) -> JobConfig:
    config: JobConfig = rig.call(lambda ticket: job_events.SettingsRequested(ticket, settings))
    return config


def recorded(storage: DictStorage) -> JobConfig:
    job = run_flow(read_job(PATHS), storage)
    assert job.newest_submission is not None
    return derive_config(job, job.newest_submission)


def next_leader(storage: DictStorage, name: str) -> JobConfig:
    return run_flow(resume_submission(JOB, Starter(name, "", "directory", 0)), storage).config_in_force


def triggers(rig: Rig) -> list[int]:
    return [each.checkpoint_id for each in rig.commands(0, TriggerCheckpoint)]


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"checkpoint_intervall_ms": 5}, "checkpoint_intervall_ms"),
        ({"retained_checkpoints": 5}, "retained_checkpoints"),
        ({"checkpoint_interval_ms": "5000"}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_ms": True}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_ms": 1000.5}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_ms": [1]}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_ms": -1}, "checkpoint_interval_ms"),
        ({"checkpoint_interval_ms": 2**63}, "checkpoint_interval_ms"),
        ({"checkpoint_timeout_ms": None}, "checkpoint_timeout_ms"),
        ({"checkpoint_timeout_ms": 0}, "checkpoint_timeout_ms"),
        ({"min_pause_ms": -1}, "min_pause_ms"),
        ({"tolerable_failed_checkpoints": -1}, "tolerable_failed_checkpoints"),
        ({"checkpoint_interval_during_backlog_ms": -1}, "checkpoint_interval_during_backlog_ms"),
        ({"checkpoint_interval_during_backlog_ms": 5_000}, "checkpoint_interval_during_backlog_ms"),
        ({"min_pause_ms": 5, "checkpoint_timeout_ms": 0}, "checkpoint_timeout_ms"),
        ({"unaligned_checkpoints": 1}, "unaligned_checkpoints"),
        ({"unaligned_checkpoints": None}, "unaligned_checkpoints"),
        ({"aligned_checkpoint_timeout_ms": -1}, "aligned_checkpoint_timeout_ms"),
        ({"aligned_checkpoint_timeout_ms": None}, "aligned_checkpoint_timeout_ms"),
        ({"checkpointing_mode": "at_least_once"}, "checkpointing_mode"),
    ],
)
def test_what_can_t_hold_is_refused_by_name_and_changes_nothing(settings: dict[str, Any], named: str) -> None:
    rig = Rig(checkpoint_interval_ms=10_000)
    with pytest.raises(InvalidConfigError) as caught:
        change(rig, **settings)
    assert caught.value.fields["setting"] == named
    assert rig.master.settings.config == rig.graph.config
    assert not [path for path in rig.storage.files if "/config/" in path]


def test_settings_are_judged_together_with_those_that_hold() -> None:
    rig = Rig(checkpoint_interval_ms=10_000, max_concurrent_checkpoints=2)
    with pytest.raises(InvalidConfigError, match="max_concurrent_checkpoints=1"):
        change(rig, min_pause_ms=1)
    change(rig, checkpoint_interval_ms=100, checkpoint_interval_during_backlog_ms=200)
    with pytest.raises(InvalidConfigError, match="which is 300"):
        change(rig, checkpoint_interval_ms=300)


@pytest.mark.parametrize(
    ("fixed", "why"), [({"checkpointing_mode": "at_least_once"}, "exactly_once"), ({"max_concurrent_checkpoints": 2}, "=1")]
)
def test_a_job_that_can_t_overtake_does_not_begin_to(fixed: dict[str, Any], why: str) -> None:
    rig = Rig(**fixed)
    with pytest.raises(InvalidConfigError, match=why) as caught:
        change(rig, aligned_checkpoint_timeout_ms=5, unaligned_checkpoints=True)
    assert caught.value.fields["setting"] == "unaligned_checkpoints"
    assert change(rig, aligned_checkpoint_timeout_ms=5).aligned_checkpoint_timeout_ms == 5, "it holds when one overtakes"


def test_each_setting_that_can_be_changed_is_one_of_the_job() -> None:
    assert set(TUNABLE) <= set(JobConfig.__struct_fields__)
    values = {"checkpoint_interval_ms": 20, "checkpoint_interval_during_backlog_ms": 30}
    assert apply_settings(JobConfig(), values) == JobConfig(checkpoint_interval_ms=20, checkpoint_interval_during_backlog_ms=30)


@pytest.mark.parametrize(
    ("text", "parsed"), [("a=5", ("a", 5)), ("a=none", ("a", None)), ("a=True", ("a", True)), ("a=60_000", ("a", 60_000))]
)
def test_settings_of_the_command_line(text: str, parsed: tuple[str, object]) -> None:
    assert parse_setting(text) == parsed


@pytest.mark.parametrize("text", ["a", "=5", "a=", "a=5s", "a=1e3", f"a={2**63}"])
def test_wrong_settings_of_the_command_line(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        parse_setting(text)


def test_an_ended_job_takes_no_settings() -> None:
    rig = Rig()
    rig.call(job_events.CancelRequested)
    with pytest.raises(FencedError) as caught:
        change(rig, min_pause_ms=1)
    assert caught.value.fields["state"] == "CANCELED"


# --------------------------------------------------------------------------------------------------------------- in force


def test_a_change_holds_from_the_next_trigger_on_and_no_worker_hears_of_it() -> None:
    rig = Rig(checkpoint_interval_ms=None).run()
    rig.feed_request()
    heard = [list(rig.sent[slot]) for slot in rig.sent]
    assert change(rig, checkpoint_interval_ms=1_000, checkpoint_timeout_ms=700).checkpoint_timeout_ms == 700
    assert [list(rig.sent[slot]) for slot in rig.sent] == heard
    (first,) = rig.master.coordinator.pending
    assert first.deadline_ms == rig.graph.config.checkpoint_timeout_ms, "as it was triggered"
    rig.pass_time(5_000)
    assert triggers(rig) == [1], "one at a time"
    for slot in range(2):
        rig.acknowledge(slot, 1, 1)
    assert triggers(rig) == [1, 2], "it was due"
    change(rig, checkpoint_interval_ms=None)
    rig.pass_time(700)
    assert rig.master.coordinator.pending == ()
    rig.pass_time(100_000)
    assert triggers(rig) == [1, 2], "paused"


def test_the_next_trigger_says_whether_its_barriers_overtake() -> None:
    rig = Rig(checkpoint_interval_ms=None).run()
    rig.feed_request()
    changes: tuple[dict[str, Any], ...] = (
        {"unaligned_checkpoints": True},
        {"aligned_checkpoint_timeout_ms": 70},
        {"unaligned_checkpoints": False},
    )
    for number, settings in enumerate(changes, 1):
        change(rig, **settings)
        assert triggers(rig)[-1] == number, "the pending one is as it was triggered"
        rig.feed_request()
        for slot in range(2):
            rig.acknowledge(slot, 1, number)
    sent = [(each.unaligned, each.aligned_timeout_ms) for each in rig.commands(0, TriggerCheckpoint)]
    assert sent == [(False, None), (True, 0), (True, 70), (False, None)]


def test_a_shorter_pause_lets_the_postponed_checkpoint_begin_at_once() -> None:
    rig = Rig(checkpoint_interval_ms=100, min_pause_ms=60_000).run()
    while not triggers(rig):
        rig.pass_time(100)
    for slot in range(2):
        rig.acknowledge(slot, 1, 1)
    rig.pass_time(1_000)
    assert triggers(rig) == [1]
    change(rig, min_pause_ms=2_000)
    rig.pass_time(999)
    assert triggers(rig) == [1]
    rig.pass_time(1)
    assert triggers(rig) == [1, 2]


def test_tolerable_failures_are_judged_by_what_holds() -> None:
    rig = Rig(checkpoint_interval_ms=None, checkpoint_timeout_ms=1_000).run()
    change(rig, tolerable_failed_checkpoints=1)
    for _ in range(2):
        rig.feed_request()
        assert rig.state == "RUNNING"
        rig.pass_time(1_000)
    assert rig.state == "RESTARTING"


def test_what_is_as_it_is_writes_nothing() -> None:
    rig = Rig(min_pause_ms=5)
    assert change(rig, min_pause_ms=5) == change(rig) == rig.graph.config
    assert recorded(rig.storage) == rig.graph.config
    change(rig, min_pause_ms=6)
    assert change(rig, min_pause_ms=5) == rig.graph.config
    assert sorted(path for path in rig.storage.files if "/config/" in path) == [PATHS.config(1), PATHS.config(2)]
    assert all(is_job_record(path.removeprefix(f"{JOB}/")) for path in (PATHS.config(1), PATHS.config(2)))


# ---------------------------------------------------------------------------------------------------------------- durable


def test_settings_survive_leaders_and_attempts_until_the_next_submission() -> None:
    rig = Rig(checkpoint_interval_ms=None).run()
    wanted = change(rig, checkpoint_timeout_ms=777, tolerable_failed_checkpoints=3)
    wanted = change(rig, min_pause_ms=50)
    assert (wanted.checkpoint_timeout_ms, wanted.min_pause_ms) == (777, 50)
    rig.report(0, 1, TaskState.FAILED, error="E: x")
    assert rig.master.settings.config == wanted
    setup = run_flow(resume_submission(JOB, Starter("second", "", "directory", 0)), rig.storage)
    rig.open(setup)
    assert rig.master.settings.config == wanted
    assert change(rig, min_pause_ms=60).checkpoint_timeout_ms == 777
    assert next_leader(rig.storage, "third").min_pause_ms == 60
    graph = word_count(checkpoint_interval_ms=None)
    fresh = run_flow(start_submission(JOB, submission(graph, job_id=JOB), Starter("fourth", "", "directory", 0)), rig.storage)
    assert fresh.config_in_force == graph.config
    rig.open(fresh)
    change(rig, min_pause_ms=70)
    assert next_leader(rig.storage, "fifth").checkpoint_timeout_ms == graph.config.checkpoint_timeout_ms


@pytest.mark.parametrize("performed", range(6))
def test_a_leader_killed_between_any_two_steps_leaves_the_old_or_the_new_settings(performed: int) -> None:
    rig = Rig(min_pause_ms=1)
    rig.held = {job_actions.WriteConfig}
    rig.feed(job_events.SettingsRequested(99, {"min_pause_ms": 2}))
    (action,) = rig.waiting
    flow = Steps(rig.effects.flow(action), rig.storage)
    for _ in range(performed):
        if not flow.done:
            flow.step()
    found = next_leader(rig.storage, "second").min_pause_ms
    assert found == 2 if flow.done else found in (1, 2)
    assert next_leader(rig.storage, "third").min_pause_ms == found
    assert flow.done == (performed >= 3), "the table has every step"


@pytest.mark.parametrize("before", range(4))
def test_a_leader_that_sleeps_between_any_two_steps_changes_nothing_behind_its_successor(before: int) -> None:
    """The one that sleeps wakes while its successor takes over, or behind that; whatever the successor found holds for good."""
    step = 0
    while not takes_over_meanwhile(before, step):
        step += 1
    assert step > 10


def takes_over_meanwhile(before: int, second: int) -> bool:
    """Whether the successor had taken over in `second` steps, before the other one woke."""
    rig = Rig(min_pause_ms=1)
    rig.held = {job_actions.WriteConfig}
    rig.feed(job_events.SettingsRequested(99, {"min_pause_ms": 2}))
    (action,) = rig.waiting
    sleeper = Steps(rig.effects.flow(action), rig.storage)
    for _ in range(before):
        if not sleeper.done:
            sleeper.step()
    successor = Steps(resume_submission(JOB, Starter("second", "", "directory", 0)), rig.storage)
    for _ in range(second):
        if not successor.done:
            successor.step()
    is_late = successor.done
    outcome = sleeper.run()
    found = successor.run().config_in_force.min_pause_ms
    if isinstance(outcome, job_events.ConfigWritten):
        assert found == 2
    copy = DictStorage()
    copy.files = dict(rig.storage.files)
    assert next_leader(copy, "third").min_pause_ms == found
    rig.open(successor.value)
    change(rig, checkpoint_timeout_ms=5)
    assert recorded(rig.storage).min_pause_ms == found, "also when the number was taken"
    assert recorded(rig.storage).checkpoint_timeout_ms == 5
    return is_late


class Lying(DictStorage):
    """Writes of settings take effect and report failure, or fail, as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lies = self.failures = 0

    def execute(self, operation: Any) -> Any:
        if isinstance(operation, PutIfAbsent) and "/config/" in operation.path:
            if self.failures:
                self.failures -= 1
                raise StorageUnavailableError("away", path=operation.path)
            if self.lies:
                self.lies -= 1
                super().execute(operation)
                raise AmbiguousWriteError("who knows", path=operation.path)
        return super().execute(operation)


def test_a_write_whose_outcome_is_unknown_is_repeated_until_it_is_known() -> None:
    storage = Lying()
    rig = Rig(storage=storage, min_pause_ms=1)
    storage.lies = 4
    rig.feed(job_events.SettingsRequested(1, {"min_pause_ms": 2}))
    rig.feed(job_events.SettingsRequested(2, {"min_pause_ms": 3}))
    assert rig.answers == {}
    assert rig.master.settings.config.min_pause_ms == 1
    rig.pass_time(CONFIG_RETRY_MS)
    rig.pass_time(CONFIG_RETRY_MS)
    assert {ticket: answer.min_pause_ms for ticket, answer in rig.answers.items()} == {1: 2, 2: 3}
    assert next_leader(storage, "second").min_pause_ms == 3


def test_storage_that_fails_leaves_the_settings_as_they_were() -> None:
    storage = Lying()
    rig = Rig(storage=storage, min_pause_ms=1)
    storage.failures = 1
    with pytest.raises(StorageUnavailableError, match="as they were"):
        change(rig, min_pause_ms=2)
    assert rig.master.settings.config.min_pause_ms == recorded(storage).min_pause_ms == 1
    assert change(rig, min_pause_ms=2).min_pause_ms == 2


def test_changes_that_wait_are_bounded_and_refused_when_the_leader_is_none_any_more() -> None:
    rig = Rig(min_pause_ms=1)
    rig.held = {job_actions.WriteConfig}
    for ticket in range(WAITING_MAX + 2):
        rig.feed(job_events.SettingsRequested(ticket, {"min_pause_ms": ticket + 2}))
    assert isinstance(rig.answers[WAITING_MAX + 1], StorageUnavailableError)
    assert len(rig.answers) == 1
    rig.feed(job_events.LeadershipEnded("fenced"))
    assert {type(answer) for ticket, answer in rig.answers.items() if ticket <= WAITING_MAX} == {NotLeaderError}
    assert len(rig.answers) == WAITING_MAX + 2
    rig.perform_waiting()
    assert rig.master.settings.config.min_pause_ms == 1


def test_a_change_that_waits_when_the_job_ends_is_refused() -> None:
    rig = Rig()
    rig.held = {job_actions.WriteConfig}
    rig.feed(job_events.SettingsRequested(99, {"min_pause_ms": 2}))
    rig.call(job_events.CancelRequested)
    assert isinstance(rig.answers[99], FencedError)
    rig.perform_waiting()
    assert rig.state == "CANCELED"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{", CorruptStateError),
        (encode_record(ConfigRecord(1, 1, 1, {"min_pause_ms": -1}, "n")), CorruptStateError),
        (encode_record(ConfigRecord(1, 1, 1, {"of_a_later_version": 1}, "n")), CorruptStateError),
        (encode_record(ConfigRecord(1, 1, 1, {}, "n", version=2)), UnsupportedVersionError),
    ],
)
def test_a_damaged_record_is_named(content: bytes, error: type[HoldfastError]) -> None:
    rig = Rig()
    rig.storage.files[PATHS.config(1)] = content
    with pytest.raises(error) as caught:
        next_leader(rig.storage, "second")
    assert caught.value.fields["path"] == PATHS.config(1)


def by_hand(rig: Rig, trigger_id: str, mode: CheckpointMode) -> TriggerCheckpoint | None:
    """The trigger that was sent for it, if any."""
    before = len(triggers(rig))
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.CHECKPOINT, trigger_id, mode=mode))
    sent = rig.commands(0, TriggerCheckpoint)
    return sent[-1] if len(sent) > before else None


def test_a_checkpoint_by_hand_names_its_own_mode() -> None:
    rig = Rig(checkpoint_interval_ms=None, aligned_checkpoint_timeout_ms=30).run()
    first = by_hand(rig, "first", CheckpointMode(unaligned=True))
    assert first is not None
    assert (first.unaligned, first.aligned_timeout_ms) == (True, 30)
    assert by_hand(rig, "second", CheckpointMode(unaligned=True, aligned_timeout_ms=0)) is None, "one at a time"
    change(rig, aligned_checkpoint_timeout_ms=50)
    for slot in range(2):
        rig.acknowledge(slot, 1, 1)
    second = rig.commands(0, TriggerCheckpoint)[-1]
    assert (second.checkpoint_id, second.unaligned, second.aligned_timeout_ms) == (2, True, 0)
    assert by_hand(rig, "second", CheckpointMode(aligned_timeout_ms=7)) is None, "a repetition: the first one's mode holds"


@pytest.mark.parametrize(
    ("config", "mode", "named"),
    [
        ({"checkpointing_mode": "at_least_once"}, CheckpointMode(unaligned=True), "unaligned"),
        ({"max_concurrent_checkpoints": 2}, CheckpointMode(unaligned=True, aligned_timeout_ms=5), "unaligned"),
        ({}, CheckpointMode(aligned_timeout_ms=5), "alignedCheckpointTimeout"),
        ({"unaligned_checkpoints": True}, CheckpointMode(unaligned=False, aligned_timeout_ms=5), "alignedCheckpointTimeout"),
        ({}, CheckpointMode(unaligned=True, aligned_timeout_ms=-1), "alignedCheckpointTimeout"),
        ({}, CheckpointMode(unaligned=True, aligned_timeout_ms=2**63), "alignedCheckpointTimeout"),
    ],
)
def test_a_mode_that_the_job_can_t_have_is_refused_by_name(config: dict[str, Any], mode: CheckpointMode, named: str) -> None:
    rig = Rig(checkpoint_interval_ms=None, **config).run()
    with pytest.raises(InvalidConfigError) as caught:
        by_hand(rig, "t", mode)
    assert caught.value.fields["setting"] == named
    assert (triggers(rig), rig.master.triggers.get("t")) == ([], None)
    assert by_hand(rig, "t", AS_CONFIGURED) is not None, "the id is free"


def test_a_checkpoint_by_hand_is_taken_while_periodic_ones_are_paused() -> None:
    rig = Rig(checkpoint_interval_ms=100).run()
    change(rig, checkpoint_interval_ms=None)
    rig.pass_time(1_000)
    assert triggers(rig) == []
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.CHECKPOINT, "t"))
    assert triggers(rig) == [1]
