"""Joins against the table W, step by step: wherever batches end, through a restore at any place, and some as whole jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.barriers.alignment.valve import MultiInputValve
from holdfast.barriers.elements import MAX_WATERMARK, Watermark, WatermarkStatus
from holdfast.operators.functions.schema import declared_type
from tests.operators.harness import OperatorHarness
from tests.scenarios.joins import JOINS, Case

LEFT = {"key": str | None, "l": int}
RIGHT = {"key": str | None, "r": int}
SCHEMAS = declared_type(LEFT, "left").schema, declared_type(RIGHT, "right").schema
GROUPS = {"key": str, "start": int, "end": int, "l": list[int], "r": list[int]}
ROW = re.compile(r"([a-cnA-CN])(-?\d+)(?:/(\d+))?")
Rows = list[tuple[int, dict[str, Any], int]]
"""Side, row, event time."""


def grouped(key: str, window: hf.TimeWindow, left: list[Any], right: list[Any]) -> Iterator[dict[str, Any]]:
    lists = {"l": sorted(row["l"] for row in left), "r": sorted(row["r"] for row in right)}
    yield {"key": key, "start": window.start, "end": window.end, **lists}


def joined(case: Case, left: Any, right: Any) -> Any:
    settings = dict(case.join.settings)
    match case.join.method:
        case "lookup_join":
            return left.lookup_join(settings.pop("table"), on="key", **settings)
        case "cogroup":
            return left.cogroup(right, grouped, on="key", returns=GROUPS, **settings)
        case method:
            return getattr(left, method)(right, on="key", **settings)


def operator_of(case: Case) -> Any:
    environment = hf.Environment("joins")
    sides = [
        environment.from_collection([{"key": "a", name: 0}], returns=types).assign_timestamps(name, max_out_of_orderness_ms=0)
        for name, types in (("l", LEFT), ("r", RIGHT))
    ]
    joined(case, *sides)
    return environment.graph.nodes[-1].operator


def late_tags(case: Case) -> list[str]:
    return [case.join.settings[name] for name in ("late_left", "late_right") if name in case.join.settings]


# ----------------------------------------------------------------------------------------------------------- the notation


def steps_of(text: str) -> list[str]:
    return [step.strip() for step in text.split("|")]


def parts_of(step: str, *, at_once: bool) -> Iterator[Rows | str]:
    """Marks, and rows: those of one side that follow each other, or each by itself."""
    rows: Rows = []
    for token in step.split():
        found = ROW.fullmatch(token)
        if rows and not (found and at_once and rows[-1][0] == int(found[1].isupper())):
            yield rows
            rows = []
        if found:
            rows.append(_row(found))
        else:
            yield token
    if rows:
        yield rows


def _row(found: re.Match[str]) -> tuple[int, dict[str, Any], int]:
    key, at, side = found[1].lower(), int(found[2]), int(found[1].isupper())
    return side, {"key": None if key == "n" else key, "lr"[side]: int(found[3] or at)}, at


def mark_of(token: str) -> tuple[tuple[int, ...], str]:
    """(sides, "idle", "active", "end" or a number)."""
    sides = {"<": (0,), ">": (1,)}.get(token[0], (0, 1))
    return sides, token if token == "end" else token[1:]


def shown(row: dict[str, Any], time: int | None) -> str:
    window = f"[{row['start']},{row['end']}):" if "start" in row else ""
    return f"{row['key'] or 'n'}{window}{_value(row['l'])}.{_value(row['r'])}@{time}"


def _value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def late_shown(row: dict[str, Any]) -> str:
    key = row["key"] or "n"
    return f"{key}{row['l']}" if "l" in row else f"{key.upper()}{row['r']}"


def expected(case: Case) -> list[list[str]]:
    return [sorted(step.split()) for step in steps_of(case.output)]


# ------------------------------------------------------------------------------------------------------------- one subtask


class Run:
    """A subtask of the join behind a valve, whose event time a restore does not lower: its inputs say it again."""

    def __init__(self, case: Case, operator: Any) -> None:
        self.case, self.operator = case, operator
        self.found: list[str] = []
        self.valve = MultiInputValve([0, 1])
        self.late: list[str] = []
        self.counted = 0
        self.harness = self._ready(OperatorHarness(self.operator, key_type=self._key_type))

    @property
    def _key_type(self) -> str | None:
        return None if self.case.join.method == "lookup_join" else "utf8"

    def _ready(self, harness: OperatorHarness) -> OperatorHarness:
        harness.output.sides = {tag: [] for tag in late_tags(self.case)}
        return harness.open()

    def take(self, part: Rows | str) -> None:
        if not isinstance(part, str):
            side, times = part[0][0], [at for _, _, at in part]
            self.harness.process([row for _, row, _ in part], times, SCHEMAS[side], side)
            return
        sides, what = mark_of(part)
        for side in sides:
            if what in ("idle", "active"):
                signal: Any = WatermarkStatus(idle=what == "idle")
            else:
                signal = Watermark(MAX_WATERMARK if what == "end" else int(what))
            for forwarded in self.valve.handle(side, signal):
                if isinstance(forwarded, Watermark):
                    self.harness.watermark(forwarded.timestamp_ms)

    def restart(self) -> None:
        snapshot = self.harness.snapshot()
        self.found = self.taken()
        self.close()
        self.harness = self._ready(OperatorHarness.restored(self.operator, [snapshot], key_type=self._key_type))
        if self.valve.watermark_ms > -(2**63):
            self.harness.watermark(self.valve.watermark_ms)

    def taken(self) -> list[str]:
        """What came out since the last call."""
        output = self.harness.output
        self.found += [shown(row, time) for row, time in zip(output.rows(), output.timestamps(), strict=True)]
        output.clear()
        found, self.found = sorted(self.found), []
        return found

    def close(self) -> None:
        self.late += [late_shown(row) for side in self.harness.output.sides.values() for batch in side for row in batch.rows()]
        self.counted += self.harness.context.counters.late_dropped
        self.harness.close()


def check(case: Case, operator: Any, *, at_once: bool, restarts: bool) -> None:
    run, found = Run(case, operator), []
    for step in steps_of(case.input):
        for part in parts_of(step, at_once=at_once):
            run.take(part)
            if restarts:
                run.restart()
        found.append(run.taken())
    run.close()
    assert (found, sorted(run.late), run.counted) == (expected(case), sorted(case.late.split()), case.counted)


@pytest.mark.parametrize("case", JOINS, ids=lambda case: case.id)
def test_a_scenario_comes_out_wherever_batches_end_and_through_a_restore_behind_each_row_and_watermark(case: Case) -> None:
    operator = operator_of(case)
    check(case, operator, at_once=True, restarts=False)
    check(case, operator, at_once=False, restarts=True)


# ------------------------------------------------------------------------------------------------------------- whole jobs

AS_JOBS = ("W18", "W24", "W38", "W41", "W43")


@pytest.mark.parametrize("case", [case for case in JOINS if case.id in AS_JOBS], ids=lambda case: case.id)
def test_a_job_gives_a_scenario_through_a_restore_at_another_parallelism(case: Case) -> None:
    steps, found = steps_of(case.input), []
    last: dict[int, int] = {}
    with hf.testing.Job(parallelism=1) as job:
        feeds = [job.input("left", LEFT), job.input("right", RIGHT)]
        stream = joined(case, *(feed.stream for feed in feeds)).uid("joined")
        out, late = job.output(stream), [job.output(stream.side_output(tag)) for tag in late_tags(case)]
        if case.join.method == "lookup_join":
            job.output(feeds[1].stream)
        job.start()
        for number, step in enumerate(steps):
            if number == len(steps) // 2:
                job.checkpoint()
                job.restart(parallelism=2, state_backend="filesystem")
                for side, at in last.items():
                    feeds[side].watermark(at)
            for part in parts_of(step, at_once=True):
                if not isinstance(part, str):
                    feeds[part[0][0]].add([row for _, row, _ in part], at=[at for _, _, at in part])
                    continue
                sides, what = mark_of(part)
                for side in sides:
                    if what in ("idle", "active", "end"):
                        getattr(feeds[side], what)()
                        last.pop(side, None)
                    else:
                        last[side] = int(what)
                        feeds[side].watermark(last[side])
            found.append(sorted(shown(row, time) for row, time in out.take()))
        assert found == expected(case)
        assert [late_shown(row) for each in late for row in each.rows()] == case.late.split()
