"""The checkpoint coordinator against random schedules: acks, duplicates, declines, expiry, failovers, restarts, write outcomes.

A register per id plays the storage; what the coordinator says and does is compared with it after every step (I11-I16)."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    SubtaskKey,
    TaskState,
)
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.ha.recorded_job import Completed, Decision
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord
from tests.coordinator.bench import graph_of, state
from tests.examples import examples

JOB = "0123456789abcdef0123456789abcdef"
TASKS = frozenset(SubtaskKey(name, 0) for name in "ABC")
KINDS = st.sampled_from([CheckpointKind.CHECKPOINT, CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT, CheckpointKind.FINAL])


class CoordinatorModel(RuleBasedStateMachine):
    """`claims` and `register` are storage; everything else is bookkeeping of what was said."""

    @initialize(retained=st.integers(1, 3), concurrent=st.integers(1, 3), tolerable=st.integers(0, 2), seed=st.integers(0, 99))
    def start(self, retained: int, concurrent: int, tolerable: int, seed: int) -> None:
        self.config = JobConfig(
            checkpoint_interval_ms=20,
            checkpoint_timeout_ms=60,
            retained_checkpoints=retained,
            max_concurrent_checkpoints=concurrent,
            tolerable_failed_checkpoints=tolerable,
        )
        self.rng = random.Random(seed)
        self.now = 0
        self.epoch = 1
        self.attempt = 0
        self.calm_until = 3
        self.claims: dict[int, int] = {}
        self.kinds: dict[int, CheckpointKind] = {}
        self.attempts: dict[int, int] = {}
        self.register: dict[int, str] = {}
        self.acked: dict[int, set[SubtaskKey]] = {}
        self.files: dict[int, set[str]] = {}
        self.dropped: set[int] = set()
        self.done: list[int] = []
        self.aborted: list[int] = []
        self.requests = 0
        self.answered: dict[str, int] = {}
        self.writes: list[Any] = []
        self.lead()

    def lead(self) -> None:
        """A leader starts from storage alone."""
        for number in [number for number in self.claims if number not in self.register]:
            self.register[number] = "ABORTED"
        completed = [
            CompletedCheckpoint(number, self.kinds[number], f"{JOB}/chk-{number}", number)
            for number, decision in sorted(self.register.items())
            if decision == "COMPLETED" and number not in self.dropped
        ]
        aborted = [number for number, decision in self.register.items() if decision == "ABORTED" and number not in self.dropped]
        self.machine = CheckpointCoordinator(
            JOB,
            graph_of(TASKS, self.config),
            rng=self.rng,
            completed=CompletedCheckpointStore(self.config.retained_checkpoints, completed, aborted),
            next_checkpoint_id=max(self.claims, default=0) + 1,
        )
        self.writes = []
        self.start_attempt()

    def start_attempt(self) -> None:
        self.attempt += 1
        self.feed(events.AttemptStarted(self.attempt, TASKS))
        self.feed(events.TaskStatesChanged(self.attempt, tuple((task, TaskState.RUNNING) for task in sorted(TASKS))))
        self.feed(events.SchedulerStarted())

    def feed(self, event: events.Event) -> tuple[AckStatus, ...]:
        given: tuple[AckStatus, ...] = ()
        for action in self.machine.handle(event, now_ms=self.now, wall_ms=self.now):
            match action:
                case actions.WriteClaim() | actions.WriteMetadata() | actions.WriteAborted():
                    self.writes.append(action)
                case actions.SendTriggers():
                    assert self.claims[action.checkpoint_id] == self.epoch, "a trigger needs its claim (I12)"
                    assert action.checkpoint_id not in self.register
                case actions.NotifyComplete():
                    assert self.register[action.checkpoint_id] == "COMPLETED", "done needs the record (I14)"
                    assert action.checkpoint_id not in self.aborted
                    self.done.append(action.checkpoint_id)
                case actions.NotifyAborted():
                    assert self.register[action.checkpoint_id] == "ABORTED", "abort needs the record (I13)"
                    assert action.checkpoint_id not in self.done, "abort never comes after done (I14)"
                    self.aborted.append(action.checkpoint_id)
                case actions.DiscardState():
                    # A leader knows nothing of ids that were dropped before its time: what still comes for one has no other owner.
                    kept = self.register.get(action.checkpoint_id) == "COMPLETED" and action.checkpoint_id not in self.dropped
                    assert not kept, "a completed checkpoint's files are kept"
                    if action.files is None:
                        assert self.register[action.checkpoint_id] == "ABORTED"
                case actions.DropCheckpoint():
                    self.check_drop(action.checkpoint_id)
                case actions.CompleteRequest():
                    if action.request.trigger_id:
                        self.answered[action.request.trigger_id] = self.answered.get(action.request.trigger_id, 0) + 1
                case actions.AnswerAcks():
                    given = action.answers
                case actions.FailJob():
                    pass
                case actions.LoseLeadership():
                    raise AssertionError("nobody else writes here")
        return given

    def check_drop(self, number: int) -> None:
        assert number in self.register, "only a decided id is dropped"
        if self.register[number] == "COMPLETED":
            assert self.kinds[number] not in (CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT), "savepoints are the user's"
        if self.register[number] == "COMPLETED":
            newer = [other for other in self.register if other > number and self.is_recovery_point(other)]
            assert newer, "the newest checkpoint is never dropped (I16)"
        self.dropped.add(number)
        self.feed(events.CheckpointDropped(number))

    def is_recovery_point(self, number: int) -> bool:
        return self.register.get(number) == "COMPLETED" and self.kinds[number] is not CheckpointKind.SAVEPOINT

    # -- rules

    @rule(kind=KINDS)
    def request(self, kind: CheckpointKind) -> None:
        self.requests += 1
        name = f"r{self.requests}"
        folder = f"/s/savepoint-{name}" if kind in (CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT) else None
        self.feed(events.CheckpointRequested(CheckpointRequest(kind, name, folder=folder)))

    @rule(by=st.integers(1, 40))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.feed(events.DeadlineReached())

    @rule(task=st.sampled_from(sorted(TASKS)), back=st.integers(0, 3), data=st.data())
    def acknowledge(self, task: SubtaskKey, back: int, data: st.DataObject) -> None:
        number = max(self.claims, default=1) - back
        attempt = data.draw(st.sampled_from([self.attempt, self.attempt, self.attempt, max(1, self.attempt - 1)]))
        name = f"{number}-{attempt}-{task.vertex}"
        known = self.acked.setdefault(number, set())
        ack = AcknowledgeCheckpoint(attempt, number, task.vertex, 0, state(name, task, attempt))
        (answer,) = self.feed(events.AcksReceived((ack,), 0))
        if answer is AckStatus.SUCCESS:
            assert task not in known, "each task counts once"
            assert attempt == self.attempts[number] == self.attempt, "a stale attempt can't acknowledge (I15)"
            known.add(task)

    @rule(back=st.integers(0, 2))
    def everybody_acknowledges(self, back: int) -> None:
        number = max(self.claims, default=1) - back
        items = tuple(
            AcknowledgeCheckpoint(self.attempt, number, task.vertex, 0, state(f"{number}-{task.vertex}", task, self.attempt))
            for task in sorted(TASKS)
        )
        for item, answer in zip(items, self.feed(events.AcksReceived(items, 0)), strict=True):
            if answer is AckStatus.SUCCESS:
                self.acked.setdefault(number, set()).add(SubtaskKey(item.vertex, 0))

    @precondition(lambda self: self.writes)
    @rule()
    def storage_catches_up(self) -> None:
        while self.writes:
            self.write_ends(0, "written")

    @rule(task=st.sampled_from(sorted(TASKS)), back=st.integers(0, 2), reason=st.sampled_from(sorted(FailureReason)))
    def decline(self, task: SubtaskKey, back: int, reason: FailureReason) -> None:
        number = max(self.claims, default=1) - back
        self.feed(events.AcksReceived((DeclineCheckpoint(self.attempt, number, task.vertex, 0, reason),), 0))

    @precondition(lambda self: self.writes)
    @rule(
        index=st.integers(0, 9),
        outcome=st.sampled_from(["written", "written", "written", "failed", "ambiguous landed", "ambiguous lost"]),
    )
    def write_ends(self, index: int, outcome: str) -> None:
        action = self.writes.pop(index % len(self.writes))
        match action:
            case actions.WriteClaim():
                self.claim_ends(action, outcome)
            case actions.WriteMetadata():
                self.metadata_ends(action, outcome)
            case actions.WriteAborted():
                self.abort_ends(action, outcome)

    def claim_ends(self, action: actions.WriteClaim, outcome: str) -> None:
        number = action.checkpoint_id
        assert number not in self.claims, "an id is never taken twice (I12)"
        assert number > max(self.claims, default=0), "ids rise (I12)"
        if outcome in ("written", "ambiguous landed"):
            self.claims[number] = self.epoch
            self.kinds[number] = action.request.kind
            self.attempts[number] = action.attempt
        if outcome == "written":
            self.feed(events.ClaimWritten(number))
            return
        if outcome == "ambiguous lost":
            self.claims[number] = self.epoch  # used up all the same
            self.kinds[number] = action.request.kind
            self.attempts[number] = action.attempt
        self.feed(events.ClaimFailed(number, outcome, ambiguous=outcome.startswith("ambiguous")))

    def metadata_ends(self, action: actions.WriteMetadata, outcome: str) -> None:
        number = action.checkpoint_id
        assert self.acked[number] == TASKS, "completed needs every acknowledgement (I11)"
        assert set(action.states) == TASKS
        if outcome in ("written", "ambiguous landed"):
            assert number not in self.register, "one decision per id (I13)"
            self.register[number] = "COMPLETED"
        if outcome == "written":
            self.feed(events.MetadataWritten(number))
        elif outcome == "failed":
            self.feed(events.MetadataFailed(number, FailureReason.IO_EXCEPTION, outcome))
        else:
            self.feed(events.MetadataAmbiguous(number, outcome))

    def abort_ends(self, action: actions.WriteAborted, outcome: str) -> None:
        number = action.checkpoint_id
        existing = self.register.get(number)
        if existing == "COMPLETED":
            lost = events.AbortLost(number, Completed(number, number))
            self.feed(lost if outcome == "written" else events.AbortFailed(number, outcome))
            return
        if outcome in ("written", "ambiguous landed"):
            self.register[number] = "ABORTED"
        self.feed(events.AbortWritten(number) if outcome == "written" else events.AbortFailed(number, outcome))

    def is_calm(self) -> bool:
        """Disasters wait until something has happened since the last one."""
        return len(self.claims) >= self.calm_until

    @precondition(is_calm)
    @rule()
    def job_fails(self) -> None:
        self.calm_until = len(self.claims) + 3
        self.feed(events.JobFailing("task failed"))
        self.settle()
        self.start_attempt()

    def settle(self) -> None:
        """Answer every write until all is decided, as a failover waits for it."""
        for _ in range(100):
            if self.machine.is_quiet:
                return
            while self.writes:
                self.write_ends(0, "written")
            self.now += 600
            self.feed(events.DeadlineReached())
        raise AssertionError("the coordinator never came to rest")

    @precondition(is_calm)
    @rule()
    def leader_changes(self) -> None:
        self.calm_until = len(self.claims) + 3
        older, writes = self.machine, self.writes
        self.epoch += 1
        self.lead()
        for action in writes:
            self.late_write(older, action)

    def late_write(self, older: CheckpointCoordinator, action: Any) -> None:
        """The old leader's writes come late: it loses every one, and falls silent at the first (I15)."""
        existing: Decision = AbortRecord(action.checkpoint_id, FailureReason.LEADER_CHANGED, self.epoch, "new")
        match action:
            case actions.WriteClaim():
                theirs = ClaimRecord(action.checkpoint_id, self.epoch, 1, self.attempt, CheckpointKind.CHECKPOINT, "f", "new")
                event: events.Event = events.ClaimTaken(action.checkpoint_id, theirs)
            case actions.WriteMetadata():
                event = events.MetadataLost(action.checkpoint_id, existing)
            case _:
                event = events.AbortLost(action.checkpoint_id, existing)
        out = older.handle(event, now_ms=self.now, wall_ms=self.now)
        assert [type(entry) for entry in out] in ([], [actions.LoseLeadership])
        assert older.is_fenced

    # -- invariants

    @invariant()
    def retained_are_the_newest(self) -> None:
        if not hasattr(self, "machine"):
            return
        ids = [entry.checkpoint_id for entry in self.machine.retained]
        assert len(ids) <= self.config.retained_checkpoints
        assert all(self.register[number] == "COMPLETED" for number in ids)
        recoverable = [number for number in self.register if self.is_recovery_point(number)]
        newest = self.machine.newest
        assert (newest.checkpoint_id if newest is not None else None) == max(
            (number for number in recoverable if number not in self.in_doubt()), default=None
        )

    def in_doubt(self) -> set[int]:
        """Completed in storage, and the coordinator can't know yet."""
        return {pending.checkpoint_id for pending in self.machine.pending}

    @invariant()
    def requests_are_answered_at_most_once(self) -> None:
        if hasattr(self, "answered"):
            assert all(count == 1 for count in self.answered.values())


CoordinatorModel.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
TestCoordinatorModel = CoordinatorModel.TestCase
