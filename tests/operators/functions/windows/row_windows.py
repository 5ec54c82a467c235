"""Windows of row functions under test: how a pipeline gives its operator, and how tables write what goes in and comes out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.windows.bounds import GLOBAL_WINDOW
from holdfast.operators.functions.windows.row_functions import WindowOperator
from tests.operators.harness import OperatorHarness
from tests.scenarios.windows import Case

ROWS = {"key": str, "at": int}
SCHEMA = pa.schema([pa.field("key", pa.string(), False), pa.field("at", pa.int64(), False)])
SEEN = {"key": str, "start": int, "end": int, "ats": list[int]}


class Seen(hf.ProcessWindowFunction):
    """Key, window, and the times of the records."""

    returns = SEEN

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out({"key": key, "start": ctx.window.start, "end": ctx.window.end, "ats": [row["at"] for row in elements]})


def windowed(stream: Any, case: Case) -> Any:
    keyed = stream.key_by("key")
    made = keyed.window(case.windows) if case.count is None else keyed.count_window(*case.count)
    if case.trigger is not None:
        made = made.trigger(case.trigger)
    if case.evictor is not None:
        made = made.evictor(case.evictor)
    return made.allowed_lateness(case.lateness).side_output_late("late")


def operator_of(make: Callable[[Any], Any], *, timestamped: bool = True, types: Any = ROWS) -> Any:
    """The operator that `make(stream)` adds last."""
    environment = hf.Environment("windows")
    row = {"key": "a", "at": 0, "value": 0}
    stream: Any = environment.from_collection([{name: row[name] for name in types}], returns=types)
    if timestamped:
        stream = stream.assign_timestamps("at", max_out_of_orderness_ms=0)
    make(stream)
    return environment.graph.nodes[-1].operator


def shown(row: dict[str, Any], stamp: int | None, *, counted: bool) -> str:
    where = "*" if row["start"] == GLOBAL_WINDOW.start else f"[{row['start']},{row['end']})"
    seen = str(len(row["ats"])) if counted else f"={','.join(map(str, row['ats']))}"
    return f"{row['key']}{where}{seen}@{stamp}"


def fitted(found: list[tuple[dict[str, Any], int | None]], expected: str) -> str:
    """What came out, as the expectation writes it."""
    wanted = expected.split()
    counts = ["=" not in token for token in wanted] + [True] * len(found)
    return " ".join(shown(row, stamp, counted=counted) for (row, stamp), counted in zip(found, counts, strict=False))


def feed(harness: OperatorHarness, token: str) -> None:
    kind, number = (token, 0) if token == "end" else (token[0], int(token[1:]))
    match kind:
        case "end":
            harness.watermark(MAX_WATERMARK)
            for _ in harness.operator.finish():
                pass
        case "w":
            harness.watermark(number)
        case "p":
            harness.processing_time(number)
        case _:
            harness.process([{"key": kind, "at": number}], [number], SCHEMA)


def batched(text: str, rows_max: int) -> list[list[str]]:
    """Tokens, records that follow each other together."""
    steps: list[list[str]] = []
    for token in text.split():
        is_record = bool(re.match(r"[a-c]-?\d", token))
        if is_record and steps and re.match(r"[a-c]-?\d", steps[-1][-1]) and len(steps[-1]) < rows_max:
            steps[-1].append(token)
        else:
            steps.append([token])
    return steps


def take(harness: OperatorHarness, steps: list[list[str]]) -> None:
    for step in steps:
        if len(step) == 1:
            feed(harness, step[0])
        else:
            ats = [int(token[1:]) for token in step]
            harness.process([{"key": token[0], "at": at} for token, at in zip(step, ats, strict=True)], ats, SCHEMA)


def harness_of(operator: WindowOperator, snapshots: Any = None, **settings: Any) -> OperatorHarness:
    made = (
        OperatorHarness(operator, key_type="utf8", **settings)
        if snapshots is None
        else OperatorHarness.restored(operator, snapshots, key_type="utf8", **settings)
    )
    made.output.sides["late"] = []
    return made


def results(harness: OperatorHarness) -> tuple[list[tuple[dict[str, Any], int | None]], list[str]]:
    """(rows with their times, late records)."""
    late = [f"{row['key']}{row['at']}" for batch in harness.output.sides["late"] for row in batch.rows()]
    return list(zip(harness.output.rows(), harness.output.timestamps(), strict=True)), late


def stored_namespaces(harness: OperatorHarness, state: str) -> list[bytes]:
    """Namespaces that the backend has a table for."""
    backend: Any = harness.context.keyed_state
    return [namespace for name, namespace in backend._state_tables if name == state]


def timers_of(harness: OperatorHarness) -> Any:
    return harness.context.timers
