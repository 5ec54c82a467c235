from __future__ import annotations

import io
from typing import Any

import pytest

from holdfast.operators.datastream.launcher import OperatorProgress, Progress
from holdfast.operators.spark import progress as progress_module
from holdfast.operators.spark.progress import (
    COUNTERS_SHOWN_MAX,
    PLAIN_INTERVAL_S,
    CompletedCheckpoints,
    ObservedJob,
    ProgressLine,
    derive_progress,
    describe_late,
    describe_restart,
    describe_restored,
    describe_skipped,
    format_counters,
    format_progress,
    format_totals,
    registered_slots,
)


def numbers(uid: str, kind: str, records_in: int = 0, records_out: int = 0, late: int = 0, **counters: int) -> dict[str, Any]:
    fixed = {"uid": uid, "name": uid, "kind": kind, "records_in": records_in, "records_out": records_out}
    return {**fixed, "late_dropped": late, "late_ms_max": late * 1_000, "counters": counters}


def look(at_ms: int, read: int, written: int, latest: dict[str, Any] | None = None, late: int = 0) -> ObservedJob:
    operators = [
        numbers("a", "source", 0, read),
        numbers("b", "window", read, written, late),
        numbers("c", "sink_writer", written, 3),
        numbers("c-commit", "sink_committer", 3, 0),
    ]
    workers = {"restarts": 2, "workers": [{"slot": 0, "registered": True}, {"slot": 1, "registered": False}]}
    job = {"state": "RUNNING", "duration": 12_345}
    return ObservedJob(at_ms, job, {"latest": {"completed": latest}}, {**workers, "operators": operators})


def test_counters_that_fall_back_are_no_negative_rate() -> None:
    progress = derive_progress(look(1000, 10, 1), look(0, 5000, 400))
    assert (progress.records_in_per_second, progress.records_out_per_second) == (0, 0)


def test_a_first_look_has_no_rates() -> None:
    assert derive_progress(look(1000, 10, 1), None).records_in_per_second == 0


def test_rates_are_over_the_last_interval() -> None:
    progress = derive_progress(look(2000, 30_000, 50), look(1500, 10_000, 40))
    assert (progress.records_in_per_second, progress.records_out_per_second) == (40_000, 20)
    assert (progress.records_in, progress.records_out, progress.restarts, progress.seconds) == (30_000, 50, 2, 12.345)


def test_out_is_what_sinks_took_and_not_what_they_told_their_committers() -> None:
    """A sink chained to its source used to count the names of its files."""
    assert derive_progress(look(0, 30_000, 50), None).records_out == 50


def test_an_older_coordinator_that_names_no_operators_is_no_error() -> None:
    progress = derive_progress(ObservedJob(0, {"state": "RUNNING"}, {}, {}), None)
    assert (progress.records_in, progress.operators) == (0, ())


def test_the_line_says_what_matters() -> None:
    progress = derive_progress(look(2000, 2_500_000, 50, {"id": 7, "end_to_end_duration": 12}), look(1000, 0, 0))
    line = format_progress("job", progress, 1, 2)
    assert line == "job RUNNING  in 2.5 M/s  out 50/s  checkpoint 7 in 12 ms  restarts 2  1 of 2 workers"


def test_the_line_counts_late_rows() -> None:
    assert format_progress("job", derive_progress(look(0, 3_000, 1, late=2_980), None), 1, 1).endswith("restarts 2  late 2,980")


def test_the_last_line_says_what_the_job_has_done() -> None:
    progress = derive_progress(look(0, 3_000, 1, late=2_980), None, checkpoints=4)
    assert format_totals("job", progress) == (
        "job RUNNING after 12.3 s: 3,000 rows in, 1 row out to c, 4 checkpoints, 2 restarts, 2,980 rows dropped as late"
    )


def test_skipped_rows_are_in_the_line_the_last_line_and_a_warning() -> None:
    now = look(0, 3_000, 1)
    now.workers["operators"][1] |= {"rows_skipped": 1_200, "first_skipped": "operator 'b', subtask 0: no number"}
    progress = derive_progress(now, None)
    assert (progress.rows_skipped, progress.operators[1].rows_skipped) == (1_200, 1_200)
    assert format_progress("job", progress, 1, 1).endswith("restarts 2  skipped 1,200")
    assert format_totals("job", progress).endswith("0 rows dropped as late, 1,200 rows skipped")
    assert describe_skipped("job", progress) == [
        "job: operator 'b' left out 1,200 rows of 3,000 (on_error='skip'), the first since: operator 'b', subtask 0: no number"
    ]
    assert describe_skipped("job", derive_progress(look(0, 3_000, 1), None)) == []


def test_late_rows_are_a_warning_that_names_the_operator_and_the_latest() -> None:
    (warning,) = describe_late("job", derive_progress(look(0, 3_000, 1, late=2_980), None))
    assert warning.startswith(
        "job: operator 'b' dropped 2,980 of 3,000 rows because they came too late, the latest 49 min 40 s behind the watermark. "
    )
    assert "max_out_of_orderness_ms" in warning
    assert describe_late("job", derive_progress(look(0, 3_000, 1), None)) == []


@pytest.mark.parametrize(
    ("late_ms", "text"),
    [(1, "0.001 s"), (1_250, "1.25 s"), (59_999, "59.999 s"), (60_000, "1 min"), (3_725_000, "1 h 2 min"), (90_000_000, "1 d 1 h")],
)
def test_how_late_is_told_in_units_for_people(late_ms: int, text: str) -> None:
    progress = Progress("FINISHED", 0, 0, 0, 0, None, None, 0, operators=(OperatorProgress("w", "window", 9, 0, 1, late_ms),))
    assert f"the latest {text} behind" in describe_late("job", progress)[0]


def test_counters_of_users_are_shown_at_the_end() -> None:
    def progress(*operators: OperatorProgress) -> Progress:
        return Progress("FINISHED", 0, 0, 0, 0, None, None, 0, operators=operators)

    big = OperatorProgress("big", "process", counters={"refunds": 1_200, "gifts": 1})
    assert format_counters("job", progress(big)) == "job counters: big gifts 1, big refunds 1,200"
    assert format_counters("job", progress()) is None
    many = OperatorProgress("m", "process", counters={f"c{number:02}": 1 for number in range(COUNTERS_SHOWN_MAX + 2)})
    text = format_counters("job", progress(many))
    assert text is not None
    assert text.endswith("m c19 1, and 2 more")


def test_checkpoints_are_counted_over_coordinators() -> None:
    completed = CompletedCheckpoints()
    for epoch, count in ((1, 3), (1, 5), (2, 0), (1, 4), (2, 2)):
        completed.note(epoch, count)
    assert completed.count == 7


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_nobody_sees_a_live_line_there_is_one_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(progress_module.sys, "stderr", shown)  # type: ignore[attr-defined]
    now = [100.0]
    line = ProgressLine(enabled=True, clock=lambda: now[0])
    for second in range(25):
        now[0] = 100.0 + second
        line.show(f"{second} {'x' * 200}", "RUNNING")
    line.show("over", "FINISHED")
    assert PLAIN_INTERVAL_S == 10
    assert [text.split()[0] for text in shown.getvalue().splitlines()] == ["0", "10", "20", "over"], "nor is one torn"


def test_the_totals_take_the_place_of_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(progress_module.sys, "stderr", shown)  # type: ignore[attr-defined]
    monkeypatch.setenv("TERM", "xterm")
    line = ProgressLine(enabled=True)
    line.show("running", "RUNNING")
    line.finish("totals")
    text = shown.getvalue()
    assert text.index("running") < text.rindex("\x1b[2K") < text.index("totals"), "what stood there is erased"
    assert text.endswith("totals\n")


def test_registered_slots_are_those_that_are_registered() -> None:
    assert registered_slots(look(0, 0, 0).workers) == {0}


def restarted(restarts: int, **failures: str | None) -> ObservedJob:
    return ObservedJob(0, {}, {}, {"restarts": restarts, **failures})


def test_a_restart_names_the_newest_failure_by_its_first_line() -> None:
    now = restarted(3, failure="UserFunctionError: no\nTraceback ...", last_failure="older")
    assert describe_restart("job", now, restarted(2)) == "job restart 3: UserFunctionError: no"


def test_a_restart_that_is_over_at_the_next_look_is_still_named() -> None:
    assert describe_restart("job", restarted(1, failure=None, last_failure="WorkerLost: slot 0"), restarted(0)) == (
        "job restart 1: WorkerLost: slot 0"
    )
    assert describe_restart("job", restarted(1), restarted(0)) == "job restart 1: cause unknown"


def test_no_restart_between_two_looks_is_no_line() -> None:
    assert describe_restart("job", restarted(2, failure="x"), restarted(2, failure="x")) is None
    assert describe_restart("job", restarted(2, failure="x"), None) is None, "a driver that comes later did not see it"


def restored(restarts: int, at_ms: int, number: int = 7) -> ObservedJob:
    latest = {"restored": {"id": number, "restore_timestamp": at_ms, "is_savepoint": False}} if at_ms else {"restored": None}
    return ObservedJob(0, {}, {"latest": latest}, {"restarts": restarts})


def test_a_restart_names_the_checkpoint_that_it_goes_on_from() -> None:
    assert describe_restored("job", restored(1, 50), restored(1, 0)) == "job restored from checkpoint 7"
    assert describe_restored("job", restored(1, 50), restored(1, 40)) == "job restored from checkpoint 7"
    assert describe_restored("job", restored(1, 50), restored(1, 50)) is None
    assert describe_restored("job", restored(1, 50), None) is None, "a driver that comes later did not see it"
    assert describe_restored("job", restored(0, 50), restored(0, 0)) is None, "where the job began is told before"
