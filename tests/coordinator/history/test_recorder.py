"""The recorder of a history: when what is written, and what is lost when storage does not take it."""

from __future__ import annotations

import json

from holdfast.coordinator.history.recorder import (
    LAST_TRIES_MAX,
    RETRY_MS,
    RETRY_MS_MAX,
    WAITING_BYTES_MAX,
    WRITE_BYTES,
    WRITE_INTERVAL_MS,
    HistoryRecorder,
    WriteHistory,
)
from holdfast.coordinator.history.records import HISTORY_TEXT_BYTES_MAX, LINE_BYTES_MAX, encode_line


def record(recorder: HistoryRecorder, text: str = "x", *, now_ms: int = 0) -> None:
    recorder.record("state", {"reason": text}, now_ms=now_ms, wall_ms=1_000 + now_ms)


def numbers(action: WriteHistory | None) -> list[int]:
    assert action is not None
    found = [json.loads(line)["number"] for line in action.content.splitlines()]
    assert found[0] == action.first
    return found


def test_records_wait_five_seconds_and_go_into_one_file() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    record(recorder, now_ms=4_000)
    assert recorder.next_deadline_ms() == WRITE_INTERVAL_MS
    assert recorder.advance(WRITE_INTERVAL_MS - 1) is None
    assert numbers(recorder.advance(WRITE_INTERVAL_MS)) == [1, 2]
    assert recorder.next_deadline_ms() is None


def test_records_of_256_kib_are_due_at_once() -> None:
    recorder = HistoryRecorder()
    count = 0
    while recorder.next_deadline_ms() != 0:
        record(recorder, "x" * 4_000)
        count += 1
    assert count * 4_000 <= WRITE_BYTES + 4_096
    assert len(numbers(recorder.advance(0))) == count


def test_what_comes_during_a_write_is_of_the_next_file() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    first = recorder.advance(5_000)
    assert first is not None
    record(recorder, now_ms=5_001)
    assert recorder.next_deadline_ms() is None
    recorder.written(first, 5_100)
    assert recorder.next_deadline_ms() == 5_100 + WRITE_INTERVAL_MS
    assert numbers(recorder.advance(20_000)) == [2]


def test_a_failed_write_is_tried_again_alike_with_growing_pauses() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    first = recorder.advance(5_000)
    assert first is not None
    record(recorder, now_ms=5_001)
    now_ms, pauses = 5_100, []
    for _ in range(8):
        assert recorder.failed(first, now_ms)
        due_ms = recorder.next_deadline_ms()
        assert due_ms is not None
        pauses.append(due_ms - now_ms)
        now_ms = due_ms
        assert recorder.advance(now_ms) is first
    assert pauses[:3] == [RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS]
    assert pauses[-1] == RETRY_MS_MAX


def test_oldest_waiting_records_are_lost_when_too_many_wait_and_their_numbers_stay_free() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    first = recorder.advance(5_000)
    assert first is not None
    sent = 0
    while sent < 2 * WAITING_BYTES_MAX:
        record(recorder, "x" * 4_000, now_ms=5_001)
        sent += 4_000
    assert recorder.lost > 200
    recorder.written(first, 6_000)
    following = numbers(recorder.advance(6_000))
    assert following[0] == 2 + recorder.lost
    assert following == list(range(following[0], following[0] + len(following)))


def test_end_of_the_job_is_written_at_once_and_given_up_after_a_few_tries() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    recorder.end(100)
    last = recorder.advance(100)
    assert numbers(last) == [1]
    assert last is not None
    kept = []
    for _ in range(LAST_TRIES_MAX):
        kept.append(recorder.failed(last, 200))
        due_ms = recorder.next_deadline_ms()
        if due_ms is not None:
            assert recorder.advance(due_ms) is last
    assert kept == [True, True, False]
    assert (recorder.lost, recorder.next_deadline_ms()) == (1, None)


def test_rest_is_taken_beside_a_write_that_is_under_way_and_with_one_that_waits_for_its_retry() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    first = recorder.advance(5_000)
    assert first is not None
    record(recorder, now_ms=5_001)
    assert [numbers(each) for each in recorder.take_rest()] == [[2]]
    recorder = HistoryRecorder()
    record(recorder)
    first = recorder.advance(5_000)
    assert first is not None
    recorder.failed(first, 5_001)
    record(recorder, now_ms=5_001)
    assert [numbers(each) for each in recorder.take_rest()] == [[1], [2]]
    assert recorder.next_deadline_ms() is None


def test_a_late_outcome_of_another_write_changes_nothing() -> None:
    recorder = HistoryRecorder()
    record(recorder)
    recorder.written(WriteHistory(7, b""), 0)
    assert recorder.failed(WriteHistory(7, b""), 0)
    assert recorder.next_deadline_ms() == WRITE_INTERVAL_MS


def test_texts_are_clipped_and_never_break_a_line() -> None:
    line = encode_line(1, 2, "failure", {"error": "a\nb\r\u2028\udc80" + "x" * 100_000})
    assert line.count(b"\n") == 1
    found = json.loads(line)
    assert found["facts"]["error"].startswith("a\nb\r\u2028?")
    assert len(line) < HISTORY_TEXT_BYTES_MAX + 200


def test_record_beyond_its_bound_says_so_in_its_place() -> None:
    line = encode_line(3, 2, "checkpoint", {"vertices": ["x" * 1_000] * 1_000})
    assert len(line) < LINE_BYTES_MAX
    found = json.loads(line)
    assert (found["number"], found["kind"], list(found["facts"])) == (3, "checkpoint", ["left_out_bytes"])
    assert found["facts"]["left_out_bytes"] > 1_000_000
