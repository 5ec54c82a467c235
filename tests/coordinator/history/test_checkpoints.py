"""Records of a checkpoint are found without reading the whole history, and make views again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints.stats import derive_phases
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.records import CauseKind, Explanation, Situation
from holdfast.coordinator.history.checkpoints import LATE_FILES_MAX, read_checkpoints
from holdfast.coordinator.history.records import HistoryEntry, describe_checkpoint, encode_line
from holdfast.coordinator.history.remembered import comparable_phases, recall_checkpoints, recall_failures
from holdfast.coordinator.views import CheckpointView, HookFailureView
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import PutIfAbsent, ReadFile, run_flow
from tests.coordinator.explain.building import NOW, SINK, SOURCE, WINDOW, Built
from tests.coordinator.world import JOB, DictStorage

PATHS = JobPaths(JOB)
HOSTS = {0: "h0", 1: "h1", 2: "h2", 3: "h3"}


class CountingStorage(DictStorage):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def execute(self, operation: Any) -> Any:
        self.reads += isinstance(operation, ReadFile)
        return super().execute(operation)


def put(storage: DictStorage, epoch: int, first: int, *records: tuple[str, dict[str, Any]]) -> None:
    lines = (encode_line(first + index, NOW + first, kind, facts) for index, (kind, facts) in enumerate(records))
    assert storage.execute(PutIfAbsent(PATHS.history(epoch, first), b"".join(lines)))


def completed(number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> tuple[str, dict[str, Any]]:
    return "checkpoint", {"id": number, "checkpoint_kind": kind.value, "status": "COMPLETED", "duration_ms": 100 + number}


def found(storage: DictStorage, number: int | None, count: int = 20) -> list[int]:
    return [entry.facts["id"] for entry in run_flow(read_checkpoints(PATHS, number, count), storage) if entry.kind == "checkpoint"]


def long_history() -> CountingStorage:
    """2,000 files, one checkpoint in each; a failure beside every hundredth; two leaders."""
    storage = CountingStorage()
    for number in range(1, 2_001):
        epoch = 1 if number <= 1_000 else 2
        extra = [("failure", {"error": f"ValueError: {number}", "attempt": 1})] if number % 100 == 0 else []
        put(storage, epoch, 10 * number, completed(number), *extra)
    return storage


@pytest.mark.parametrize("number", [1, 2, 999, 1_000, 1_001, 1_999, 2_000])
def test_a_checkpoint_is_found_with_those_in_front_of_it_in_few_reads(number: int) -> None:
    storage = long_history()
    assert found(storage, number) == list(range(max(1, number - 20), number + 1))
    assert storage.reads < 45, "11 steps of a bisection, and 20 files to compare with"


def test_the_newest_are_found_without_a_search() -> None:
    storage = long_history()
    assert found(storage, None, 5) == [1_996, 1_997, 1_998, 1_999, 2_000]
    assert storage.reads == 5


def test_what_is_not_on_record_is_not_found() -> None:
    storage = long_history()
    assert found(storage, 2_001) == []
    assert found(DictStorage(), 1) == []
    assert found(DictStorage(), None) == []


def test_files_without_a_checkpoint_and_one_that_ended_late_are_no_hindrance() -> None:
    storage = DictStorage()
    for number in range(1, 41):
        put(storage, 1, number, completed(number) if number not in (30, *range(10, 28)) else ("state", {"state": "RESTARTING"}))
    put(storage, 1, 41, completed(30, CheckpointKind.SAVEPOINT))
    for number in (1, 9, 28, 29, 30, 31, 40):
        assert number in found(storage, number, 2), number
    storage = DictStorage()
    for first, number in enumerate((1, 2, 4, 5, 3, 6, 7), start=1):
        put(storage, 1, first, completed(number))
    assert found(storage, 3, 2)[-1] == 3


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "two files"])
def test_when_its_subtasks_knew_is_on_record_with_the_next_one(apart: bool) -> None:
    kind, facts = completed(8)
    records = [completed(6), completed(7), (kind, {**facts, "notified": [{"id": 7, "notify_ms": 35}]}), completed(9)]
    storage = DictStorage()
    for first, each in enumerate(records, start=1) if apart else ():
        put(storage, 1, first, each)
    if not apart:
        put(storage, 1, 1, *records)
    recalled = recall_checkpoints(run_flow(read_checkpoints(PATHS, 7, 20), storage))
    told = {each.checkpoint.checkpoint_id: (each.checkpoint.notify_ms, each.phases.notify_ms) for each in recalled}
    assert (told[6], told[7]) == ((-1, -1), (35, 35))


# -------------------------------------------------------------------------------------------------------- explanations


def explanation(number: int) -> tuple[str, dict[str, Any]]:
    return "explanation", {"id": number, "subject": "failed", "summary": f"of {number}", "explained_ms": 1, "causes": []}


def told_of(storage: DictStorage, number: int) -> list[str]:
    entries = run_flow(read_checkpoints(PATHS, number, 20), storage)
    return [entry.facts["summary"] for entry in entries if entry.kind == "explanation" and entry.facts["id"] == number]


@pytest.mark.parametrize("apart", [0, 1, 2, 3])
def test_an_explanation_is_found_behind_its_checkpoint(apart: int) -> None:
    """With so many files of other records between them, under a leader that goes on."""
    storage = DictStorage()
    files = [[completed(6)], [completed(7)], *[[("state", {"state": "RUNNING"})]] * apart, [explanation(7)], [completed(8)]]
    for first, records in enumerate(files, start=1):
        put(storage, 1, first, *records)
    assert told_of(storage, 7) == ["of 7"]
    assert (told_of(storage, 6), told_of(storage, 8)) == ([], [])
    assert found(storage, 7) == [6, 7]


def test_an_explanation_in_the_same_file_and_one_behind_the_next_checkpoint() -> None:
    storage = DictStorage()
    put(storage, 1, 1, completed(6), completed(7), explanation(6), completed(8))
    put(storage, 1, 5, explanation(8), completed(9))
    assert [told_of(storage, number) for number in (6, 7, 8)] == [["of 6"], [], ["of 8"]]


def test_explanations_are_not_looked_for_without_end() -> None:
    storage = CountingStorage()
    put(storage, 1, 1, completed(7))
    for first in range(1, 11):
        line = encode_line(10 * first, NOW + 2_000 * first, *completed(7 + first))
        assert storage.execute(PutIfAbsent(PATHS.history(1, 10 * first), line))
    assert (told_of(storage, 7), storage.reads <= 4 + 1 + LATE_FILES_MAX) == ([], True)
    storage = CountingStorage()
    put(storage, 1, 1, completed(7))
    put(storage, 2, 1, completed(8))
    for first in range(2, 8):
        put(storage, 2, first, completed(7 + first))
    put(storage, 2, 9, explanation(7))
    assert told_of(storage, 7) == [], "none follows under another leader"


# --------------------------------------------------------------------------------------------------------- views again


def recorded(view: CheckpointView) -> HistoryEntry:
    return HistoryEntry(1, 1, NOW, "checkpoint", describe_checkpoint(view, HOSTS))


def recalled(built: Built, *others: HistoryEntry) -> tuple[Situation, Explanation]:
    """The explanation from the record alone, with phases of checkpoints before it as they were."""
    situation = built.made()
    assert situation.checkpoint is not None
    record = recall_checkpoints([recorded(situation.checkpoint)])[0]
    job = replace(situation.job, vertices=(), workers=(), exceptions=recall_failures(others))
    made = replace(situation, job=job, checkpoint=record.checkpoint, record=record)
    return made, explain(made)


def test_phases_of_a_record_are_those_of_all_subtasks() -> None:
    built = Built()
    built.ack(WINDOW, [2], sync=700)
    view = built.made().checkpoint
    assert view is not None
    record = recall_checkpoints([recorded(view)])[0]
    assert record.phases == replace(derive_phases(view), notify_ms=-1, store_rate=-1, new_files=-1)
    assert record.hosts[SubtaskKey(WINDOW, 2)] == "h2"
    assert record.checkpoint.num_subtasks == 13


def test_a_record_and_what_was_seen_tell_the_same_longest_phases() -> None:
    built = Built()
    built.ack(SINK, [1], encode=2_000)
    seen, (_, told) = explain(built.made()), recalled(built)
    phases = {each.phase: each.longest_ms for each in told.phases}
    assert phases == {each.phase: each.longest_ms for each in seen.phases if each.phase != "notify"}
    assert (told.first_cause.kind, str(told.first_cause.place)) == (seen.first_cause.kind, str(seen.first_cause.place))
    assert told.first_cause.kind is CauseKind.SLOW_ENCODE


def test_what_takes_all_subtasks_is_not_judged() -> None:
    for change in (
        lambda built: built.all_acks(store=9_000),  # slow storage
        lambda built: built.ack(WINDOW, [1], store=9_000, size=400 << 20, state=400 << 20),  # skew of the state
    ):
        built = Built()
        change(built)
        _, told = recalled(built)
        assert not told.is_usual
        assert told.first_cause.kind in (CauseKind.SLOW_STORE, CauseKind.MORE_STATE)
    built = Built()
    built.all_acks(align=20_000)
    built.busy(WINDOW)
    built.pressed(SOURCE)
    _, told = recalled(built)
    assert told.first_cause.kind is CauseKind.NO_LONGER_SEEN, "what is busy now is no cause of then"
    assert "not on record" in told.first_cause.text


def test_failed_checkpoints_of_the_history() -> None:
    built = Built(status="FAILED", reason=FailureReason.EXPIRED, failed_after_ms=5_000)
    built.missing(WINDOW, 0, 1, 2, 3)
    _, told = recalled(built)
    assert [each.kind for each in told.causes] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS, CauseKind.NOT_KNOWN]
    assert "4 of 13 acknowledgements were missing: count per carrier (uid counts) subtask 0 on h0" in told.causes[1].text
    built = Built(status="FAILED", reason=FailureReason.JOB_FAILOVER, failed_after_ms=5_000)
    facts = {"error": "ValueError: boom", "attempt": 1, "vertex": WINDOW, "subtask": 2, "slot": 2, "restarts": 1}
    _, told = recalled(built, HistoryEntry(1, 2, NOW, "failure", facts))
    assert told.first_cause.kind is CauseKind.TASK_FAILED
    assert "count per carrier (uid counts) subtask 2 on h2 failed: ValueError: boom" in told.first_cause.text
    before_trigger = {"id": 5, "checkpoint_kind": "checkpoint", "status": "FAILED", "reason": "trigger_failure", "message": "full"}
    view = recall_checkpoints([HistoryEntry(1, 3, NOW, "checkpoint", before_trigger)])[0].checkpoint
    assert (view.failure_ms, view.trigger_ms, view.vertices) == (NOW, NOW, {})


def test_the_master_hook_that_a_checkpoint_failed_for_is_on_record() -> None:
    message = "no answer in time from master hook 'ledger'"
    built = Built(status="FAILED", reason=FailureReason.TRIGGER_FAILURE, message=message, failed_after_ms=10_000)
    built.hook_failure = HookFailureView(("ledger",), timed_out=True)
    view = built.made().checkpoint
    assert view is not None
    assert describe_checkpoint(view, HOSTS)["hook_failure"] == {"names": ("ledger",), "timed_out": True}
    made, told = recalled(built)
    assert made.checkpoint is not None
    assert (made.checkpoint.hook_failure, told.first_cause.kind) == (built.hook_failure, CauseKind.MASTER_HOOK_TIMEOUT)
    assert "from master hook 'ledger'; no task was triggered" in told.first_cause.text
    built.hook_failure = None  # as an earlier version recorded it
    made, told = recalled(built)
    assert (told.first_cause.kind, told.first_cause.text) == (CauseKind.NOT_KNOWN, f"its tasks were not triggered: {message}")
    assert told.setting is None


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"left_out_bytes": 300_000},
        {"id": "7", "checkpoint_kind": "checkpoint", "status": "COMPLETED"},
        {"id": 7, "checkpoint_kind": "checkpoint", "status": "IN_PROGRESS"},
        {"id": 2**70, "checkpoint_kind": "checkpoint", "status": "FAILED"},
        {"id": 7, "checkpoint_kind": "checkpoint", "status": "FAILED", "slowest": [{"vertex": 3}]},
        {"id": 7, "checkpoint_kind": "checkpoint", "status": "FAILED", "vertices": {"a": []}},
    ],
)
def test_a_record_of_another_shape_is_no_checkpoint(facts: dict[str, Any]) -> None:
    assert recall_checkpoints([HistoryEntry(1, 1, NOW, "checkpoint", facts)]) == []
    assert recall_failures([HistoryEntry(1, 1, NOW, "failure", facts)]) == ()


def test_checkpoints_of_other_tasks_and_savepoints_are_not_compared() -> None:
    view = Built().made().checkpoint
    assert view is not None
    number = view.checkpoint_id
    others = [replace(view, kind=CheckpointKind.SAVEPOINT), replace(view, status="FAILED")]
    entries = [recorded(each) for each in (replace(view, checkpoint_id=number + 1), view, *others)]
    found = recall_checkpoints(entries)
    assert [each.checkpoint_id for each in comparable_phases(found, view.vertices, 20)] == [number, number + 1]
    assert [each.checkpoint_id for each in comparable_phases(found, view.vertices, 1)] == [number + 1]
    assert comparable_phases(found, [WINDOW], 20) == ()
