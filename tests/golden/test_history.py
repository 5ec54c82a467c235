"""A file of a job's history as the first version wrote it: read alike, and written alike."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.coordinator.explain.kept import describe_explanation, recall_explanation
from holdfast.coordinator.explain.records import CauseKind, Phase, Place
from holdfast.coordinator.history.records import HistoryEntry, RecordKind, encode_line
from holdfast.coordinator.history.remembered import recall_checkpoints
from holdfast.coordinator.history.store import HistoryQuery, read_history
from holdfast.coordinator.views import HookFailureView
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.coordinator.world import JOB, DictStorage

GOLDEN = (Path(__file__).parent / "history_v1.jsonl").read_bytes()
PATHS = JobPaths(JOB)


def test_golden_file_is_read_whole() -> None:
    storage = DictStorage()
    storage.execute(PutIfAbsent(PATHS.history(1, 1), GOLDEN))
    storage.execute(PutIfAbsent(PATHS.history(2, 1), GOLDEN.splitlines(keepends=True)[0]))
    page = run_flow(read_history(PATHS, HistoryQuery(), 0), storage)
    kinds = ["leader", "restart", "state", "failure", "checkpoint", "request", "state", "leader"]
    assert [each.kind for each in page.entries] == kinds
    assert (page.gaps, page.damage) == ((), ())


def test_golden_file_is_written_alike() -> None:
    found = [json.loads(line) for line in GOLDEN.splitlines()]
    assert b"".join(encode_line(each["number"], each["at_ms"], each["kind"], each["facts"]) for each in found) == GOLDEN


# ------------------------------------------------------------------- explanations, and the hooks that a checkpoint failed for

EXPLANATIONS = (Path(__file__).parent / "history_explanations_v1.jsonl").read_bytes()


def entries() -> tuple[HistoryEntry, ...]:
    storage = DictStorage()
    storage.execute(PutIfAbsent(PATHS.history(1, 1), EXPLANATIONS))
    page = run_flow(read_history(PATHS, HistoryQuery(), 0), storage)
    assert (page.gaps, page.damage) == ((), ())
    return page.entries


def test_golden_explanations_are_read_and_written_alike() -> None:
    failed, slow, _ = entries()
    found = recall_explanation(failed.facts)
    assert found is not None
    assert (found.checkpoint_id, found.subject, found.explained_ms, found.compared) == (41, "failed", 1_700_000_000_001, 20)
    assert [each.kind for each in found.causes] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS, CauseKind.IN_FUNCTION]
    assert found.first_cause.place == Place("count per carrier", "counts", 2, "h2")
    assert [(each.phase, each.longest_ms, each.median_ms) for each in found.phases] == [
        (Phase.START_DELAY, 20, 20),
        (Phase.DECIDE, 15, -1),
    ]
    assert found.setting is not None
    assert (found.setting.name, found.setting.old, found.setting.new) == ("unaligned_checkpoints", False, True)
    for entry in (failed, slow):
        told = recall_explanation(entry.facts)
        assert told is not None
        assert encode_line(entry.number, entry.at_ms, RecordKind.EXPLANATION, describe_explanation(told)) in EXPLANATIONS


def test_golden_record_names_the_hook_that_its_checkpoint_failed_for() -> None:
    (found,) = recall_checkpoints(entries())
    assert found.checkpoint.hook_failure == HookFailureView(("ledger",), timed_out=True)
