"""Windows of row functions behind a restore: what was late stays late, what was due comes in slices, other lengths go on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.functions.windows.bounds import TimeWindow
from holdfast.statebackends.errors import CorruptStateError, IncompatibleStateError
from tests.operators.functions.windows.row_windows import (
    SCHEMA,
    Seen,
    batched,
    fitted,
    harness_of,
    operator_of,
    results,
    stored_namespaces,
    take,
    timers_of,
    windowed,
)
from tests.scenarios.windows import Case


def made(windows: Any, lateness: int = 0, trigger: Any = None) -> Any:
    case = Case("", windows, "", "", lateness=lateness, trigger=trigger)
    return operator_of(lambda stream: windowed(stream, case).process(Seen()))


def after(operator: Any, *texts: str) -> Any:
    """What a subtask stores that has seen this."""
    with harness_of(operator) as harness:
        for text in texts:
            take(harness, batched(text, 7))
        return harness.snapshot()


# ---------------------------------------------------------------------------------------------------------------- lateness


@pytest.mark.parametrize("trigger", [None, hf.ContinuousEventTimeTrigger(1_000)])
@pytest.mark.parametrize("windows", [hf.Tumbling(10), hf.Sliding(10, slide=5), hf.Session(10)], ids=repr)
def test_what_was_late_stays_late_when_the_lateness_grows(windows: Any, trigger: Any) -> None:
    first = after(made(windows, 0, trigger), "a0 a3 w24 b31")
    with harness_of(made(windows, 100, trigger), [first]) as harness:
        take(harness, batched("a4 a9", 7))
        assert results(harness) == ([], ["a4", "a9"]), "their windows are gone, and must not come back with one record"
        second = harness.snapshot()
    with harness_of(made(windows, 100, trigger), [second]) as harness:
        take(harness, batched("w40 a5 a33 w60", 7))
        found, late = results(harness)
        assert late == ["a5"]
        assert {row["key"] for row, _ in found} == {"a", "b"}
        assert {at for row, _ in found for at in row["ats"]} == {31, 33}


def test_what_was_in_time_stays_so_when_the_lateness_stays_or_grows() -> None:
    stored = after(made(hf.Tumbling(10), 20), "a1 w19")
    for lateness in (20, 50):
        with harness_of(made(hf.Tumbling(10), lateness), [stored]) as harness:
            take(harness, batched("a2", 1))
            assert fitted(results(harness)[0], "") == "a[0,10)2@9"


def test_a_lateness_that_reaches_before_all_times_is_stored() -> None:
    stored = after(made(hf.Tumbling(10), 2**63 - 1), "a1 w19")
    with harness_of(made(hf.Tumbling(10), 2**63 - 1), [stored]) as harness:
        take(harness, batched("a2", 1))
        assert fitted(results(harness)[0], "") == "a[0,10)2@9"


@pytest.mark.parametrize(("before", "after_it"), [(20, 100), (20, 20), (0, 100), (100, 20)])
@pytest.mark.parametrize("trigger", [None, hf.ContinuousEventTimeTrigger(1_000)])
@pytest.mark.parametrize("windows", [hf.Tumbling(10), hf.Sliding(10, slide=5), hf.Session(10)], ids=repr)
def test_the_state_of_a_window_that_has_fired_goes_though_the_lateness_is_another_one(
    windows: Any, trigger: Any, before: int, after_it: int
) -> None:
    stored = after(made(windows, before, trigger), "a1 w25")
    with harness_of(made(windows, after_it, trigger), [stored]) as harness:
        take(harness, batched("w200 w1000 w5000", 1))
        assert results(harness) == ([], [])
        assert len(timers_of(harness).event) == 0
        keys = harness.context.keyed_state.keys
        for state in ("window_contents", "window_sessions", "trigger_next"):
            assert not [key for space in stored_namespaces(harness, state) for key in keys(state, space)]


@pytest.mark.parametrize("trigger", [None, hf.ContinuousEventTimeTrigger(1_000)])
def test_a_session_that_grew_under_another_lateness_does_not_fire_when_the_old_one_is_over(trigger: Any) -> None:
    stored = after(made(hf.Session(10), 20, trigger), "a1 w25")
    with harness_of(made(hf.Session(10), 100, trigger), [stored]) as harness:
        take(harness, batched("a5", 1))
        assert fitted(results(harness)[0], "") == "a[1,15)2@14"
        take(harness, batched("w60 w5000", 1))
        assert len(results(harness)[0]) == 1
        assert len(timers_of(harness).event) == 0


# ----------------------------------------------------------------------------------------------------------- what was due

KEYS = "abcdefgh"


def half_fired(fired: int, case_windows: Any) -> tuple[Any, list[Any]]:
    """A subtask that a barrier met while its windows fired, and what had come out."""
    with harness_of(made(case_windows, 100)) as harness:
        timers_of(harness)._fired_per_slice_max = 1
        take(harness, batched(" ".join(f"{key}1" for key in "abc"), 7))
        harness.process([{"key": key, "at": 2} for key in KEYS], [2] * len(KEYS), SCHEMA)
        slices = harness.watermark_slices(50)
        for _ in range(fired):
            next(slices)
        return harness.snapshot(), results(harness)[0]


@pytest.mark.parametrize("windows", [hf.Tumbling(10), hf.Session(10)], ids=repr)
def test_what_was_due_at_the_cut_comes_in_slices_and_needs_no_record(windows: Any) -> None:
    snapshot, before = half_fired(2, windows)
    for slices_before_crash in range(len(KEYS) - 2):
        with harness_of(made(windows, 100), [snapshot], now_ms=7) as second:
            timers_of(second)._fired_per_slice_max = 1
            assert second.operator.next_processing_time_ms() == MIN_WATERMARK, "whatever the clock says by now"
            slices = second.operator.process_processing_time(7)
            for _ in range(slices_before_crash):
                next(slices)
            assert len(second.output.rows()) == slices_before_crash
            again, between = second.snapshot(), results(second)[0]
        with harness_of(made(windows, 100), [again], now_ms=7) as third:
            take(third, batched("p8 a3", 1))
            assert third.operator.next_processing_time_ms() is None
            found = before + between + results(third)[0]
        rows = Counter((row["key"], len(row["ats"])) for row, _ in found)
        assert rows == Counter([*((key, 2 if key in "abc" else 1) for key in KEYS), ("a", 3)])


def test_a_record_that_comes_between_two_slices_meets_no_window_that_is_due() -> None:
    snapshot, before = half_fired(2, hf.Tumbling(10))
    with harness_of(made(hf.Tumbling(10), 100), [snapshot]) as second:
        timers_of(second)._fired_per_slice_max = 1
        slices = second.operator.process_processing_time(0)
        next(slices)
        take(second, batched("h3", 1))
        found = before + results(second)[0]
    assert [(row["key"], len(row["ats"])) for row, _ in found][-2:] == [("h", 1), ("h", 2)]


@pytest.mark.parametrize("lateness", [0, 5])
@pytest.mark.parametrize("windows", [hf.Tumbling(10), hf.Sliding(10, slide=5), hf.Session(10)], ids=repr)
def test_rows_behind_a_drain_that_was_cut_off_are_in_a_result(windows: Any, lateness: int) -> None:
    for fired in range(7):
        with harness_of(made(windows, lateness)) as first:
            timers_of(first)._fired_per_slice_max = 1
            take(first, batched("w0 a1 b1 c1", 7))
            slices = first.watermark_slices(MAX_WATERMARK)
            for _ in range(fired):
                next(slices, None)
            snapshot, before = first.snapshot(), results(first)[0]
        with harness_of(made(windows, lateness), [snapshot]) as second:
            take(second, batched("a2 b2 c2 w60", 7))
            found, late = results(second)
        assert late == []
        assert {row["key"] for row, _ in found if 2 in row["ats"]} == set("abc"), f"{fired} had fired"
        assert {row["key"] for row, _ in before + found if 1 in row["ats"]} == set("abc")


CLOCK = [hf.Tumbling(10, time="processing"), hf.Sliding(10, slide=5, time="processing"), hf.Session(10, time="processing")]


@pytest.mark.parametrize("windows", CLOCK, ids=repr)
def test_open_windows_of_the_clock_come_in_slices_with_the_end_of_event_time(windows: Any) -> None:
    """Each record is in what came out in front of a barrier in the drain, or behind it, and the job goes on, or drains again."""
    copies = 2 if isinstance(windows, hf.Sliding) else 1
    for fired in range(3 * copies + 1):
        with harness_of(made(windows), now_ms=6) as first:
            timers_of(first)._fired_per_slice_max = 1
            take(first, batched("w0 a1 b1 c1", 7))
            slices = first.watermark_slices(MAX_WATERMARK)
            for _ in range(fired):
                next(slices, None)
            snapshot, before = first.snapshot(), results(first)[0]
            assert len(before) == fired
            for _ in slices:
                pass
            assert len(first.output.rows()) == 3 * copies
            take(first, batched("a2", 1))  # a timer by the clock in front of the operator may bring it
            for _ in first.operator.finish():
                pass
            assert [row["ats"] for row, _ in results(first)[0][3 * copies :]] == [[2]] * copies
        for rest in ("a2 b2 c2 end", "a2 b2 c2 p60"):
            with harness_of(made(windows), [snapshot], now_ms=6) as second:
                take(second, batched(rest, 7))
                found, late = results(second)
            seen = Counter((row["key"], at) for row, _ in before + found for at in row["ats"])
            assert late == []
            assert seen == Counter({(key, at): copies for key in "abc" for at in (1, 2)}), f"{fired} had fired"


# ------------------------------------------------------------------------------------------------------------ other windows


@pytest.mark.parametrize("entry", [b"", b"\xc1", b"\x05", b"\x90", b"\x91\x90"])
def test_an_entry_that_says_nothing_of_windows_is_refused(entry: bytes) -> None:
    snapshot = after(made(hf.Tumbling(20)), "a1")
    snapshot.lists["assigner"] = [entry]
    with pytest.raises(CorruptStateError, match=r"operator 'op'.*'assigner'") as raised:
        harness_of(made(hf.Tumbling(20)), [snapshot]).open()
    assert (raised.value.operator, raised.value.state) == ("op", "assigner")


@pytest.mark.parametrize("state", ["watermarks", "late_until"])
@pytest.mark.parametrize("entry", [b"", b"\x05", bytes(7), bytes(9), bytes(1_000)])
def test_an_entry_that_is_no_event_time_is_refused(state: str, entry: bytes) -> None:
    snapshot = after(made(hf.Tumbling(20)), "a1")
    snapshot.lists[state] = [entry]
    with pytest.raises(CorruptStateError, match=rf"operator 'op'.*'{state}'"):
        harness_of(made(hf.Tumbling(20)), [snapshot]).open()


@pytest.mark.parametrize(
    ("before", "after_it", "expected"),
    [
        (hf.Tumbling(20), hf.Tumbling(40), "a[0,20)=1,3@19 a[0,40)=4,5@39"),
        (hf.Tumbling(20), hf.Tumbling(20, offset=5), "a[-15,5)=4@4 a[0,20)=1,3@19 a[5,25)=5@24"),
        (hf.Sliding(20, slide=10), hf.Tumbling(20), "a[-10,10)=1,3@9 a[0,20)=1,3,4,5@19"),
        (hf.Session(10), hf.Session(3), "a[1,13)=1,3,4,5@12"),
        (hf.Session(5), hf.Session(lambda row: 30), "a[1,35)=1,3,4,5@34"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_windows_of_other_lengths_begin_with_the_records_behind_the_restore(before: Any, after_it: Any, expected: str) -> None:
    stored = after(made(before), "a1 a3")
    with harness_of(made(after_it), [stored]) as harness:
        take(harness, batched("a4 a5", 7))
        take(harness, batched("w100", 1))
        assert fitted(results(harness)[0], expected) == expected
        for state in ("window_contents", "window_sessions"):
            assert [list(harness.context.keyed_state.keys(state, space)) for space in stored_namespaces(harness, state)] in (
                [], [[]] * len(stored_namespaces(harness, state)),
            )  # fmt: skip
        assert len(timers_of(harness).event) == 0


@pytest.mark.parametrize(
    ("before", "after_it", "stored"),
    [
        (hf.Tumbling(20), hf.Session(20), "['aligned', 'event']"),
        (hf.Session(20), hf.Sliding(20, slide=10), "['session', 'event']"),
        (hf.Tumbling(20), hf.Tumbling(20, time="processing"), "['aligned', 'event']"),
        (hf.Session(20, time="processing"), hf.Session(20), "['session', 'processing']"),
        (hf.Tumbling(20), hf.Global(), "['aligned', 'event']"),
    ],
    ids=repr,
)
def test_windows_of_another_kind_are_refused(before: Any, after_it: Any, stored: str) -> None:
    trigger = hf.CountTrigger(2)
    snapshot = after(made(before, 0, trigger), "a1 a3 a4")
    refused = harness_of(made(after_it, 0, trigger), None)
    refused.close()
    with pytest.raises((IncompatibleStateError, hf.UnclaimedStateError)) as error:
        harness_of(made(after_it, 0, trigger), [snapshot]).open()
    if isinstance(error.value, IncompatibleStateError):
        assert error.value.stored == stored


@pytest.mark.parametrize("trigger", [hf.ContinuousEventTimeTrigger(1_000), hf.PurgingTrigger(hf.EventTimeTrigger())])
@pytest.mark.parametrize("lateness", [0, 20])
def test_a_session_that_had_grown_fires_though_the_trigger_is_another_one(trigger: Any, lateness: int) -> None:
    stored = after(made(hf.Session(10)), "a0", "a4", "a8")
    with harness_of(made(hf.Session(10), lateness, trigger), [stored]) as harness:
        take(harness, batched("w50", 1))
        assert fitted(results(harness)[0], "") == "a[0,18)3@17"
        assert len(timers_of(harness).event) == 0


# ----------------------------------------------------------------------------------------------------------- the end of time


def test_a_global_window_of_event_time_fires_when_a_drain_ends_time_and_again_at_the_end() -> None:
    def tested() -> Any:
        return made(hf.Global(), 0, hf.EventTimeTrigger())

    with harness_of(tested()) as harness:
        take(harness, batched("a1 w100", 1))
        assert results(harness)[0] == [], "without the end of time it never fires"
        take(harness, batched("end", 1))
        assert fitted(results(harness)[0], "") == f"a*1@{MAX_WATERMARK}"
        drained = harness.snapshot()
    with harness_of(tested(), [drained]) as harness:
        take(harness, batched("a7", 1))
        assert results(harness)[0] == []
        take(harness, batched("end", 1))
        assert fitted(results(harness)[0], "") == f"a*2@{MAX_WATERMARK}"


@pytest.mark.parametrize(
    "trigger",
    [hf.EventTimeTrigger(), hf.ContinuousEventTimeTrigger(1_000), hf.PurgingTrigger(hf.EventTimeTrigger())],
    ids=lambda trigger: type(trigger).__name__,
)
def test_a_global_window_whose_timer_an_older_release_set_fires_at_the_end_of_time(
    trigger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(TimeWindow, "max_timestamp", property(lambda window: window.end - 1))
        stored = after(made(hf.Global(), 0, trigger), "a1 b2 w5")
    with harness_of(made(hf.Global(), 0, trigger), [stored]) as harness:
        take(harness, batched("b7", 1))
        before = len(results(harness)[0])
        take(harness, batched("end", 1))
        last = [row for row, at in results(harness)[0][before:] if at == MAX_WATERMARK]
    assert [(row["key"], row["ats"]) for row in last] == [("a", [1]), ("b", [2, 7])]


def test_as_a_job_a_global_window_of_event_time_fires_with_the_input() -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed = job.input("feed", {"key": str, "at": int})
        windows = feed.stream.key_by("key").window(hf.Global()).trigger(hf.EventTimeTrigger())
        out = job.output(windows.process(Seen()).uid("all"))
        job.start()
        feed.add([{"key": "a", "at": 1}, {"key": "b", "at": 2}], at=[1, 2])
        feed.watermark(1_000)
        job.checkpoint()
        job.restart(parallelism=1)
        feed.add({"key": "a", "at": 3}, at=3)
        assert out.take() == []
        feed.end()
        assert sorted((row["key"], row["ats"], time) for row, time in out.take()) == [
            ("a", [1, 3], MAX_WATERMARK), ("b", [2], MAX_WATERMARK)
        ]  # fmt: skip
