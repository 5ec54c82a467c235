"""A file of a job's history as the first version wrote it: read alike, and written alike."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.coordinator.history.records import encode_line
from holdfast.coordinator.history.store import HistoryQuery, read_history
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
