"""Count windows over columns against a plain model, and the model against the windows of row functions."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.functions import aggregates as of
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Global
from holdfast.operators.functions.windows.columnar_counts import CountWindowOperator, count_window_operator
from holdfast.operators.functions.windows.evictors import CountEvictor
from holdfast.operators.functions.windows.options import RowWindowOptions
from holdfast.operators.functions.windows.triggers import CountTrigger, PurgingTrigger
from holdfast.statebackends.columnar import counted, distinct
from holdfast.statebackends.errors import GraphError, IncompatibleStateError
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.examples import examples
from tests.operators.functions.windows.row_windows import operator_of
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64()), ("w", pa.string()), ("f", pa.float64()), ("at", pa.int64())]))
Row = tuple[str, int, int | None]
"""Key, event time, value."""
AGGREGATES = {
    "n": of.count(), "values": of.count("v"), "total": of.sum("v"), "least": of.min("v"), "most": of.max("v"),
    "kinds": of.count_distinct("v"), "some_kinds": of.count_distinct("v", where=lambda rows: rows["at"].to_numpy() % 2 == 0),
    "early": of.first("w"), "late": of.last("w"), "best": of.arg_max("at", "v"), "worst": of.arg_min("w", "v"),
    "word": of.max("w"), "average": of.mean("v"), "spread": of.stddev("v"), "float": of.sum("f"),
}  # fmt: skip
INEXACT = ("average", "spread", "float")


def options(count: int, slide: int | None) -> RowWindowOptions:
    """As `count_window` sets them."""
    if slide is None:
        return RowWindowOptions(PurgingTrigger(CountTrigger(count)))
    return RowWindowOptions(CountTrigger(slide), CountEvictor(count))


def operator(count: int, slide: int | None = None, aggregates: dict[str, of.Aggregate] | None = None) -> CountWindowOperator:
    return count_window_operator(options(count, slide), aggregates or AGGREGATES, key_selector("k", None, ROWS, "op"), ROWS)


def batch(rows: list[Row], *, timed: bool = True) -> Batch:
    columns = pa.RecordBatch.from_pylist([as_dict(row) for row in rows], schema=ROWS.schema)
    return Batch(columns=columns, timestamps=np.array([at for _, at, _ in rows], np.int64) if timed else None)


def as_dict(row: Row) -> dict[str, Any]:
    key, at, value = row
    return {"k": key, "v": value, "w": None if value is None else f"w{value}", "f": None if value is None else value / 10, "at": at}


def result(rows: list[Row], *, timed: bool) -> dict[str, Any]:
    """What the aggregates say of a window, and the time of its last record."""
    there = [(at if timed else 0, number, at, value) for number, (_, at, value) in enumerate(rows) if value is not None]
    values = [value for *_, value in there]
    by_most = sorted(there, key=lambda each: (-each[3], each[0], each[1]))
    by_least = sorted(there, key=lambda each: (each[3], each[0], each[1]))
    return {
        "k": rows[-1][0], "n": len(rows), "values": len(values), "total": sum(values) if values else None,
        "least": min(values, default=None), "most": max(values, default=None), "kinds": len(set(values)),
        "some_kinds": len({value for *_, at, value in there if at % 2 == 0}),
        "early": f"w{min(there)[3]}" if there else None, "late": f"w{max(there)[3]}" if there else None,
        "best": by_most[0][2] if there else None, "worst": f"w{by_least[0][3]}" if there else None,
        "word": max((f"w{value}" for value in values), default=None),
        "average": statistics.mean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "float": sum(value / 10 for value in values) if values else None,
        "time": rows[-1][1] if timed else None,
    }  # fmt: skip


def windows_of(rows: list[Row], count: int, slide: int | None) -> list[list[Row]]:
    """In the order of the records that fill them."""
    seen: dict[str, list[Row]] = {}
    found = []
    for row in rows:
        own = seen.setdefault(row[0], [])
        own.append(row)
        if len(own) % (slide or count) == 0:
            found.append(own[-count:])
    return found


def shown(harness: OperatorHarness) -> list[dict[str, Any]]:
    return [{**row, "time": at} for row, at in zip(harness.output.rows(), harness.output.timestamps(), strict=True)]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert {name: one[name] for name in one if name not in INEXACT} == {
            name: other[name] for name in other if name not in INEXACT
        }
        for name in INEXACT:
            assert one[name] == (None if other[name] is None else pytest.approx(other[name]))


RECORDS = st.lists(
    st.tuples(st.sampled_from("abbbcccccc"), st.integers(0, 9), st.none() | st.integers(-3, 6)), min_size=1, max_size=40
)
LENGTHS = st.sampled_from(
    [(1, None), (2, None), (3, None), (7, None), (4, 2), (6, 4), (3, 1), (2, 5), (3, 6), (5, 5), (1, 3), (9, 6), (2, 3)]
)


@settings(max_examples=examples(25), deadline=None)
@given(RECORDS, LENGTHS, st.lists(st.integers(0, 40), max_size=6), st.booleans())
@example([("a", 0, 1)] * 30, (3, None), [3, 4, 11, 29], True)
@example([("a", 9 - at % 9, at) for at in range(40)], (6, 4), [1, 2, 3, 17], True)
def test_windows_are_those_of_the_model_wherever_batches_end(
    rows: list[Row], lengths: tuple[int, int | None], cuts: list[int], timed: bool
) -> None:
    expected = [result(window, timed=timed) for window in windows_of(rows, *lengths)]
    found = []
    for bounds in ([], sorted(cuts), list(range(len(rows)))):
        with OperatorHarness(operator(*lengths), key_type="utf8") as harness:
            for start, stop in zip([0, *bounds], [*bounds, len(rows)], strict=True):
                if part := rows[start:stop]:
                    harness.operator.process_batch(batch(part, timed=timed), 0)
            harness.watermark(MAX_WATERMARK)
            found.append(shown(harness))
    assert_same(found[0], expected)
    assert found[1] == found[0]
    assert found[2] == found[0]


class Windows(hf.ProcessWindowFunction):
    """The records that row functions see."""

    returns = {"seen": list[int]}  # noqa: RUF012 - the contract's class attribute

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out({"seen": [row["value"] for row in elements]})


@settings(max_examples=examples(8), deadline=None)
@given(st.lists(st.sampled_from("aab"), max_size=30), LENGTHS)
def test_windows_of_the_model_are_those_of_row_functions(keys: list[str], lengths: tuple[int, int | None]) -> None:
    rows: list[Row] = [(key, number, number) for number, key in enumerate(keys)]
    types = {"key": str, "at": int, "value": int}
    schema = pa.schema([("key", pa.string()), ("at", pa.int64()), ("value", pa.int64())])
    made = operator_of(lambda stream: stream.key_by("key").count_window(*lengths).process(Windows()), types=types)
    with OperatorHarness(made, key_type="utf8") as harness:
        for key, at, value in rows:
            harness.process([{"key": key, "at": at, "value": value}], [at], schema)
        harness.watermark(MAX_WATERMARK)
        expected = [([value for *_, value in window], window[-1][1]) for window in windows_of(rows, *lengths)]
        assert list(zip([row["seen"] for row in harness.output.rows()], harness.output.timestamps(), strict=True)) == expected


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(RECORDS, st.integers(1, 3), st.booleans()), min_size=1, max_size=5), LENGTHS)
def test_windows_go_on_behind_barriers_crashes_and_other_parallelisms(
    steps: list[tuple[list[Row], int, bool]], lengths: tuple[int, int | None]
) -> None:
    """A crash throws away what came out since the barrier; then the records come again. What came behind a barrier is in none."""
    fleet = [OperatorHarness(operator(*lengths), key_type="utf8", max_parallelism=8).open()]
    found: list[dict[str, Any]] = []
    for rows, parallelism, crashes in steps:
        snapshots = [harness.snapshot() for harness in fleet]
        if crashes:
            _process(fleet, rows)
            for harness in fleet:
                harness.close()
            fleet = [
                OperatorHarness.restored(
                    operator(*lengths), snapshots, parallelism=parallelism, subtask=subtask, key_type="utf8", max_parallelism=8
                ).open()
                for subtask in range(parallelism)
            ]
        found += _process(fleet, rows)
    for harness in fleet:
        harness.close()
    everything = [row for rows, _, _ in steps for row in rows]
    expected = [result(window, timed=True) for window in windows_of(everything, *lengths)]
    for key in "abc":
        assert_same([row for row in found if row["k"] == key], [row for row in expected if row["k"] == key])


def _process(fleet: list[OperatorHarness], rows: list[Row]) -> list[dict[str, Any]]:
    whole = batch(rows)
    groups = fleet[0].operator.selector.keys(whole, max_parallelism=8, operator="op").key_groups
    owners = np.array([subtask_of_key_group(group, 8, len(fleet)) for group in groups.tolist()])
    found = []
    for subtask, harness in enumerate(fleet):
        if (part := whole.filter(owners == subtask)).num_rows:
            harness.operator.process_batch(part, 0)
        found += shown(harness)
        harness.output.clear()
    return found


@pytest.mark.parametrize("lengths", [(4, None), (6, 4)], ids=str)
def test_a_barrier_keeps_what_was_there_while_rows_begin_anew(
    lengths: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is written later than it is made, behind further batches."""
    monkeypatch.setattr(distinct, "_RENEWED_MIN", 4)
    monkeypatch.setattr(counted, "_EMPTY_MIN", 4)
    rows: list[Row] = [("ab"[at % 2], at, at % 5) for at in range(200)]
    with OperatorHarness(operator(*lengths), key_type="utf8") as harness:
        harness.operator.process_batch(batch(rows[:101]), 0)
        state: Any = harness.operator._state
        frozen, expected = state.freeze(), state.freeze().columns()
        expected = _sorted(expected)
        harness.operator.process_batch(batch(rows[101:]), 0)
        assert _sorted(frozen.columns()) == expected


def _sorted(columns: Any) -> list[Any]:
    keys, namespaces, parts = columns
    return sorted(zip(namespaces.to_pylist(), *(array.to_pylist() for array in (*keys, *parts)), strict=True), key=repr)


@pytest.mark.parametrize("lengths", [(500, None), (6, 4)], ids=str)
def test_a_batch_that_ends_no_pane_begins_no_row_anew(
    lengths: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few records of very many keys: an increment of sets then has what they gained, and not all of their namespace."""
    monkeypatch.setattr(counted, "_SPREAD_MAX", 0)
    with OperatorHarness(operator(*lengths), key_type="utf8") as harness:
        state: Any = harness.operator._state
        reset = []
        monkeypatch.setattr(state, "slots_of", lambda *asked: reset.append(asked))
        state._epoch = 1  # changes are noted
        harness.operator.process_batch(batch([("a", 0, 1), ("b", 0, 1)]), 0)
        assert not reset
        assert not state._removed


def test_full_windows_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "_EMPTY_MIN", 8)
    with OperatorHarness(operator(2), key_type="utf8") as harness:
        for number in range(100):
            harness.operator.process_batch(batch([(f"k{number}", 0, 1), (f"k{number}", 1, 2), ("open", 0, 5)]), 0)
        assert harness.operator._state.row_count(0) <= 9
        assert sum(row["n"] for row in shown(harness)) == 300


def test_values_of_full_windows_are_let_go() -> None:
    """The sets of count_distinct do not grow with the records of a key."""
    with OperatorHarness(operator(10), key_type="utf8") as harness:
        for start in range(0, 40_100, 2_005):
            harness.operator.process_batch(batch([("a", at, at) for at in range(start, start + 2_005)]), 0)
        accumulator = harness.operator._state.accumulators(0)[6]
        assert accumulator.aggregate.output == "kinds"
        assert accumulator.pairs.count < 2_000
        assert [row["kinds"] for row in shown(harness)] == [10] * (20 * 2_005 // 10)


@pytest.mark.parametrize(("limit", "least"), [("_MERGED_ROWS_MAX", 24), ("_SPREAD_MAX", 0)])
@pytest.mark.parametrize("lengths", [(5, None), (6, 4)], ids=str)
def test_it_makes_no_difference_what_is_looked_at_together(
    lengths: tuple[int, int | None], limit: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches whose windows have many panes are taken in parts; of few records of very many keys each is looked at."""
    monkeypatch.setattr(counted, limit, least)
    rows: list[Row] = [("abc"[at * at % 3], at, at % 7) for at in range(60)]
    with OperatorHarness(operator(*lengths), key_type="utf8") as harness:
        for some in (rows[:35], rows[35:38], rows[38:]):
            harness.operator.process_batch(batch(some), 0)
        assert_same(shown(harness), [result(window, timed=True) for window in windows_of(rows, *lengths)])


# ---------------------------------------------------------------------------------------------------------------- the graph


def keyed() -> Any:
    stream: Any = hf.Environment("counts").from_collection([{"key": "a", "at": 0}], returns={"key": str, "at": int})
    return stream.key_by("key")


class Unpurging(hf.PurgingTrigger):
    """Of a user's."""


REFUSED: dict[str, tuple[Any, str]] = {
    "no trigger": (lambda: keyed().window(Global()), "no trigger"),
    "all records": (lambda: keyed().window(Global()).trigger(hf.CountTrigger(3)), r"key_by\(...\).aggregate"),
    "own trigger": (lambda: keyed().window(Global()).trigger(hf.EventTimeTrigger()), "EventTimeTrigger"),
    "evictor of time": (lambda: keyed().count_window(3).evictor(hf.TimeEvictor(3)), "TimeEvictor"),
    "evictor behind": (lambda: keyed().count_window(3, 2).evictor(hf.CountEvictor(3, after=True)), "CountEvictor"),
    "lateness": (lambda: keyed().count_window(3).allowed_lateness(5), "allowed lateness"),
    "late output": (lambda: keyed().count_window(3).side_output_late("late"), "late output"),
    "subclass": (lambda: keyed().count_window(3, 2).trigger(Unpurging(hf.CountTrigger(3))), "Unpurging"),
    "long": (lambda: keyed().count_window(2**62 + 1), "at most 2\\*\\*62"),
    "long slide": (lambda: keyed().count_window(2**61, 2**63), "at most 2\\*\\*62"),
    "many panes": (lambda: keyed().count_window(1_001, 1), "1001 panes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_building_the_graph_refuses(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(GraphError, match=message) as refused:
        make().aggregate(n=hf.count())
    assert refused.value.operator == "window"


def test_different_values_are_counted_in_windows_of_few_panes() -> None:
    """Each step of merging looks at the values of all of them."""
    made = keyed().count_window(64, 1).aggregate(kinds=hf.count_distinct("at"))
    assert made.environment.graph.nodes[-1].operator.count == 64
    with pytest.raises(GraphError, match=r"65 panes of 1, and count_distinct .* at most 64") as refused:
        keyed().count_window(65, 1).aggregate(n=hf.count(), kinds=hf.count_distinct("at"))
    assert refused.value.operator == "window"


def test_a_result_called_like_what_the_state_needs_is_refused() -> None:
    with pytest.raises(GraphError, match="window_records"):
        keyed().count_window(3).aggregate(window_records=hf.count())
    with pytest.raises(GraphError, match="'key'"):
        keyed().count_window(3).aggregate(key=hf.count())


def test_a_purging_trigger_with_an_evictor_sees_the_last_records_since_it_fired() -> None:
    made = keyed().window(Global()).trigger(PurgingTrigger(CountTrigger(4))).evictor(CountEvictor(9)).aggregate(n=hf.count())
    node = made.environment.graph.nodes[-1]
    assert (node.operator.count, node.operator.slide) == (4, 4)


@pytest.mark.parametrize(("before", "after"), [((3, None), (4, None)), ((4, 2), (4, 1)), ((4, None), (4, 2))], ids=str)
def test_windows_of_another_count_or_slide_are_refused(before: Any, after: Any) -> None:
    with OperatorHarness(operator(*before), key_type="utf8") as harness:
        harness.operator.process_batch(batch([("a", 0, 1)]), 0)
        snapshot = harness.snapshot()
    with pytest.raises(IncompatibleStateError, match="another count or slide"):
        OperatorHarness.restored(operator(*after), [snapshot], key_type="utf8").open()


@pytest.mark.parametrize("state_backend", ["memory", "rocksdb"])
def test_a_job_counts_on_behind_a_restart(state_backend: Literal["memory", "rocksdb"]) -> None:
    job = hf.testing.Job(parallelism=2)
    feed = job.input("rows", {"key": str, "value": int})
    out = job.output(feed.stream.key_by("key").count_window(3).aggregate(n=hf.count(), total=hf.sum("value")).uid("counts"))
    everything = job.output(feed.stream.window_all(Global()).trigger(hf.PurgingTrigger(hf.CountTrigger(4))).aggregate(n=hf.count()))
    with job:
        job.start()
        for value in range(4):
            feed.add({"key": "ab"[value % 2], "value": value}, at=value)
        assert out.take() == []
        assert everything.take() == [({"n": 4}, 3)]
        job.checkpoint()
        job.restart(parallelism=3, state_backend=state_backend)
        feed.add({"key": "b", "value": 9}, at=2)
        assert out.take() == [({"key": "b", "n": 3, "total": 13}, 2)]
        feed.end()
        assert out.take() == [], "what is not full does not fire"
