"""Windows of row functions: the tables U and V, wherever batches end and a barrier falls; and what building the graph refuses."""

from __future__ import annotations

import operator
from typing import Any

import pytest

import holdfast as hf
from holdfast.statebackends.backends import keyed
from holdfast.statebackends.errors import GraphError, InvalidConfigError, StateValueError, UndeclaredStateError, UserFunctionError
from tests.operators.functions.windows.row_windows import (
    ROWS,
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
from tests.scenarios.windows import TRIGGERS, WINDOWS, Case

CASES = [*WINDOWS, *TRIGGERS]


def made(case: Case) -> Any:
    return operator_of(lambda stream: windowed(stream, case).process(Seen()))


@pytest.mark.parametrize("rows_max", [1, 7, 65_536])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_scenario_comes_out_wherever_batches_end(case: Case, rows_max: int) -> None:
    with harness_of(made(case)) as harness:
        take(harness, batched(case.input, rows_max))
        found, late = results(harness)
        assert (fitted(found, case.output), " ".join(late)) == (case.output, case.late)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_scenario_comes_out_through_a_restore_at_any_place(case: Case) -> None:
    steps = batched(case.input, 1)
    for cut in range(1, len(steps)):
        with harness_of(made(case)) as first:
            take(first, steps[:cut])
            snapshot, now_ms = first.snapshot(), first.clock.now_ms
            before, late_before = results(first)
        with harness_of(made(case), [snapshot], now_ms=now_ms) as second:
            take(second, steps[cut:])
            found, late = results(second)
        shown = fitted(before + found, case.output)
        assert (shown, " ".join(late_before + late)) == (case.output, case.late), f"cut behind {steps[:cut]}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_state_is_left_of_windows_that_are_gone(case: Case) -> None:
    if case.count is not None or isinstance(case.windows, hf.Global):
        pytest.skip("a global window never goes")
    with harness_of(made(case)) as harness:
        take(harness, batched(f"{case.input} end", 65_536))
        left = {
            (state.name, namespace): list(harness.context.keyed_state.keys(state.name, namespace))
            for state in harness.operator.declared_states()
            if state.kind != "operator_union"
            for namespace in stored_namespaces(harness, state.name)
        }
        assert {place: keys for place, keys in left.items() if keys} == {}
        assert (len(timers_of(harness).event), len(timers_of(harness).processing)) == (0, 0)


def test_a_late_record_without_a_late_output_is_counted() -> None:
    late = operator_of(lambda stream: stream.key_by("key").window(hf.Tumbling(10)).process(Seen()))
    with harness_of(late) as harness:
        take(harness, batched("a1 w30 a2 a29 a3", 7))
        counters = harness.context.counters
        assert (counters.late_dropped, counters.late_ms_max) == (3, 28)


def test_what_was_due_at_the_cut_fires_before_the_first_record_behind_it() -> None:
    case = Case("", hf.Tumbling(10), "", "", lateness=100)
    with harness_of(made(case)) as first:
        timers_of(first)._fired_per_slice_max = 1
        take(first, batched("a1 b1 c1", 7))
        next(first.watermark_slices(9))
        snapshot = first.snapshot()
    with harness_of(made(case), [snapshot]) as second:
        take(second, batched("a2 b2 c2", 7))
        found, _ = results(second)
    assert fitted(found, "") == "b[0,10)1@9 c[0,10)1@9 a[0,10)2@9 b[0,10)2@9 c[0,10)2@9"


class Largest:
    """An AggregateFunction."""

    def create_accumulator(self) -> int:
        return -1

    def add(self, value: Any, accumulator: int) -> int:
        return max(accumulator, value["at"])

    def get_result(self, accumulator: int) -> dict[str, int]:
        return {"largest": accumulator}

    def merge(self, left: int, right: int) -> int:
        return max(left, right)


@pytest.mark.parametrize("evictor", [None, hf.CountEvictor(10)])
@pytest.mark.parametrize("windows", [hf.Tumbling(100), hf.Session(10)])
def test_rows_are_reduced_and_aggregated(windows: Any, evictor: Any) -> None:
    def latest(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return {"key": one["key"], "at": one["at"] + other["at"]}

    def base(stream: Any) -> Any:
        made = stream.key_by("key").window(windows)
        return made if evictor is None else made.evictor(evictor)

    reduced = operator_of(lambda stream: base(stream).reduce(latest))
    aggregated = operator_of(
        lambda stream: base(stream).aggregate(Largest(), accumulator_type=int, returns={"largest": int})
    )
    for tested, expected in ((reduced, [{"key": "a", "at": 30}]), (aggregated, [{"largest": 20}])):
        with harness_of(tested) as harness:
            take(harness, batched("a0 a20 a10 w200", 7))
            assert harness.output.rows() == expected


def test_a_window_function_gets_the_result_and_the_window() -> None:
    class Named(hf.ProcessWindowFunction):
        returns = {"key": str, "start": int, "largest": int}  # noqa: RUF012

        def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
            (element,) = elements
            out({"key": key, "start": ctx.window.start, **element})

    tested = operator_of(
        lambda stream: stream.key_by("key")
        .window(hf.Tumbling(10))
        .aggregate(Largest(), accumulator_type=int, window_function=Named())
    )
    with harness_of(tested) as harness:
        take(harness, batched("a1 a5 b17 end", 7))
        assert harness.output.rows() == [{"key": "a", "start": 0, "largest": 5}, {"key": "b", "start": 10, "largest": 17}]


class Remembers(hf.ProcessWindowFunction):
    """How often the window, and the key, has fired."""

    here = hf.ValueStateDescriptor("here", int)
    ever = hf.ValueStateDescriptor("ever", int)
    window_states = (here,)
    states = (ever,)

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        here, ever = ctx.window_state(self.here), ctx.global_state(self.ever)
        here.update(here.value(0) + 1)
        ever.update(ever.value(0) + 1)
        out((ctx.window.start, here.value(), ever.value()))


def test_state_of_a_window_goes_with_it_and_that_of_the_key_stays() -> None:
    tested = operator_of(lambda stream: stream.key_by("key").window(hf.Tumbling(10)).allowed_lateness(5).process(Remembers()))
    with harness_of(tested) as harness:
        take(harness, batched("a1 w9 a2 a11 w19", 1))
        assert harness.output.rows() == [(0, 1, 1), (0, 2, 2), (10, 1, 3)]
        namespaces = stored_namespaces(harness, "here")
        assert [len(list(harness.context.keyed_state.keys("here", space))) for space in namespaces] == [0, 1]


class EveryOther(hf.Trigger):
    """Fires for every other record; of merged windows the counts are added."""

    seen = hf.ReducingStateDescriptor("seen", int, operator.add)
    states = (seen,)

    def on_element(self, row: Any, timestamp: int | None, window: hf.TimeWindow, ctx: hf.TriggerContext) -> hf.TriggerResult:
        seen = ctx.state(self.seen)
        seen.add(1)
        return hf.TriggerResult.FIRE if seen.get() % 2 == 0 else hf.TriggerResult.CONTINUE

    def on_merge(self, window: hf.TimeWindow, ctx: hf.TriggerContext) -> None:
        ctx.merge_state(self.seen)

    def clear(self, window: hf.TimeWindow, ctx: hf.TriggerContext) -> None:
        ctx.state(self.seen).clear()


def test_a_trigger_of_the_users_own_keeps_state_through_merges_and_restores() -> None:
    case = Case("", hf.Session(10), "a0 a20 a10 a11 w100 a200 a201", "a[0,30)4@29 a[200,211)2@210", trigger=EveryOther())
    test_a_scenario_comes_out_through_a_restore_at_any_place(case)


class Plain(hf.Trigger):
    """Can't merge."""

    def on_element(self, row: Any, timestamp: int | None, window: hf.TimeWindow, ctx: hf.TriggerContext) -> hf.TriggerResult:
        return hf.TriggerResult.FIRE


class Stateful(Seen):
    window_states = (hf.ValueStateDescriptor("x", int),)


class Clashing(Seen):
    states = (hf.ValueStateDescriptor("trigger_count", int),)


def _bad_gap(row: Any) -> int:
    return 0


REFUSED: dict[str, Any] = {
    "size": lambda keyed: keyed.window(hf.Tumbling(0)),
    "slide": lambda keyed: keyed.window(hf.Sliding(10, slide=0)),
    "gap": lambda keyed: keyed.window(hf.Session(-1)),
    "time": lambda keyed: keyed.window(hf.Tumbling(10, time="ingestion")),  # type: ignore[arg-type]
    "lateness": lambda keyed: keyed.window(hf.Tumbling(10)).allowed_lateness(-1),
    "count": lambda keyed: keyed.count_window(0),
    "window": lambda keyed: keyed.window("10 s"),
    "global without trigger": lambda keyed: keyed.window(hf.Global()).process(Seen()),
    "no trigger": lambda keyed: keyed.window(hf.Tumbling(10)).trigger(10),
    "no evictor": lambda keyed: keyed.window(hf.Tumbling(10)).evictor(10),
    "no on_merge": lambda keyed: keyed.window(hf.Session(10)).trigger(Plain()),
    "trigger over columns": lambda keyed: keyed.window(hf.Tumbling(10)).trigger(hf.CountTrigger(1)).aggregate(n=hf.count()),
    "evictor over columns": lambda keyed: keyed.window(hf.Tumbling(10)).evictor(hf.CountEvictor(1)).aggregate(n=hf.count()),
    "window state of sessions": lambda keyed: keyed.window(hf.Session(10)).process(Stateful()),
    "two states of one name": lambda keyed: keyed.window(hf.Tumbling(10)).trigger(hf.CountTrigger(1)).process(Clashing()),
    "no function": lambda keyed: keyed.window(hf.Tumbling(10)).process(print),
    "no aggregate function": lambda keyed: keyed.window(hf.Tumbling(10)).aggregate(object(), accumulator_type=int),
    "no accumulator type": lambda keyed: keyed.window(hf.Tumbling(10)).aggregate(Largest()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_building_the_graph_refuses(what: str) -> None:
    stream: Any = hf.Environment("windows").from_collection([{"key": "a", "at": 0}], returns=ROWS)
    keyed = stream.assign_timestamps("at", max_out_of_orderness_ms=0).key_by("key")
    with pytest.raises((GraphError, InvalidConfigError)):
        REFUSED[what](keyed)


def test_an_event_time_window_needs_event_times_and_one_of_processing_time_does_not() -> None:
    stream: Any = hf.Environment("windows").from_collection([{"key": "a", "at": 0}], returns=ROWS)
    with pytest.raises(GraphError, match="event times"):
        stream.key_by("key").window(hf.Session(10))
    stream.key_by("key").window(hf.Session(10, time="processing")).process(Seen())


def test_rows_of_undeclared_type_need_one_to_be_kept() -> None:
    stream: Any = hf.Environment("windows").from_collection([{"key": "a", "at": 0}], returns=ROWS)
    keyed = stream.map(lambda row: row).key_by(lambda row: row["key"], key_type=str)
    clock = keyed.window(hf.Tumbling(10, time="processing"))
    with pytest.raises(GraphError, match="row_type"):
        clock.process(Seen())
    clock.process(Seen(), row_type=dict[str, int])


def test_a_gap_that_is_none_fails_with_operator_and_record() -> None:
    tested = operator_of(lambda stream: stream.key_by("key").window(hf.Session(_bad_gap)).process(Seen()))
    with harness_of(tested) as harness, pytest.raises(UserFunctionError, match=r"operator 'op'.*gap of a session.*at least 1"):
        take(harness, batched("a1", 1))


def test_undeclared_state_of_a_window_is_refused() -> None:
    class Asks(Seen):
        def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
            ctx.window_state(hf.ValueStateDescriptor("y", int))

    tested = operator_of(lambda stream: stream.key_by("key").window(hf.Tumbling(10)).process(Asks()))
    with harness_of(tested) as harness, pytest.raises(UndeclaredStateError, match="window_states"):
        take(harness, batched("a1 w9", 1))


def test_a_merged_session_leaves_no_timers_of_its_trigger_behind() -> None:
    case = Case("", hf.Session(10), "", "", trigger=hf.ContinuousEventTimeTrigger(5))
    with harness_of(made(case)) as harness:
        take(harness, batched("a0 a4 a8", 1))
        assert len(timers_of(harness).event) == 2, "the next multiple, and the end of [0, 18)"


def test_a_session_has_one_timer_however_long_it_grows() -> None:
    with harness_of(made(Case("", hf.Session(10), "", ""))) as harness:
        take(harness, batched(" ".join(f"a{at}" for at in range(0, 1000, 5)), 7))
        assert len(timers_of(harness).event) == 1
        harness.watermark(500)
        assert (len(timers_of(harness).event), results(harness)[0]) == (1, [])
        harness.watermark(1004)
        assert fitted(results(harness)[0], "") == "a[0,1005)200@1004"
        assert len(timers_of(harness).event) == 0


@pytest.mark.parametrize(("before", "behind"), [(0, 20), (20, 0)])
@pytest.mark.parametrize("windows", [hf.Tumbling(10), hf.Session(10)])
def test_another_lateness_after_a_restore_loses_no_window_and_leaves_no_state(windows: Any, before: int, behind: int) -> None:
    with harness_of(made(Case("", windows, "", "", lateness=before))) as first:
        take(first, batched("a1 a4 b3", 1))
        snapshot = first.snapshot()
    with harness_of(made(Case("", windows, "", "", lateness=behind)), [snapshot]) as second:
        take(second, batched("w100", 1))
        assert sorted((row["key"], len(row["ats"])) for row in second.output.rows()) == [("a", 2), ("b", 1)]
        state = second.context.keyed_state
        assert [list(state.keys("window_contents", space)) for space in stored_namespaces(second, "window_contents")] == [[]] * len(
            stored_namespaces(second, "window_contents")
        )
        assert len(timers_of(second).event) == 0


def test_a_reduce_without_a_return_names_it_also_where_records_come_together() -> None:
    tested = operator_of(lambda stream: stream.key_by("key").window(hf.Tumbling(10)).reduce(lambda one, other: None))
    with harness_of(tested) as harness, pytest.raises(StateValueError, match="does it lack a `return`"):
        take(harness, batched("a1 a2 a3", 7))


def test_windows_that_come_and_go_leave_no_state_tables_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of each ms, and no checkpoint."""
    monkeypatch.setattr(keyed, "NAMESPACES_MIN", 100)
    with harness_of(made(Case("", hf.Tumbling(1), "", ""))) as harness:
        most = 0
        for at in range(0, 8_000, 4):
            harness.process([{"key": "a", "at": at + more} for more in range(4)], [at, at + 1, at + 2, at + 3], SCHEMA)
            harness.watermark(at + 2)
            most = max(most, len(stored_namespaces(harness, "window_contents")))
        assert most < 3_500, "some thousand windows are at hand; 8,000 have been there"
