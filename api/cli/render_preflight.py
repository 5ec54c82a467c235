"""What `holdfast preflight` prints: tables and lines for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.api.cli import console
from holdfast.coordinator.restore.preflight import OperatorFinding, PreflightReport

TYPE_CHARACTERS_MAX = 32
"""Of a state's type in the table."""


def show_report(report: PreflightReport, *, as_json: bool) -> None:
    """Operators and states first, then what is wrong, then the verdict."""
    if as_json:
        console.show_json({"fits": report.fits, **msgspec.to_builtins(report)})
        return
    found = report.snapshot
    if found is not None:
        when = console.time_text(found.timestamp_ms)
        what = f"{found.kind} {found.checkpoint_id} of {found.job_name} ({found.job_id}), {when}, {console.size_text(found.size)}"
        console.show_line(f"{what}, for job {report.job_name} ({report.job_id})")
        if found.owner is not None:
            console.show_line(f"owned by job {found.owner}")
    columns = ("OPERATOR", "IN BOTH?", "SIZE", "PARALLELISM", "STATE", "STATE SIZE", "VERDICT", "STORED", "DECLARED")
    console.show_table(columns, (row for operator in report.operators for row in _rows(operator)), empty="no operators")
    for operator in report.operators:
        for state in operator.states:
            for change in state.changes:
                console.show_line(f"{change.kind}: operator {operator.uid!r}, state {state.name!r}: {change.text}")
    for file in report.files:
        owner = f"operator {file.operator!r} subtask {file.subtask}: " if file.operator else ""
        console.show_line(f"damaged: {owner}{file.path}: {file.detail}")
    if report.unchecked:
        count = len(report.unchecked)
        console.show_line(f"not checked: {count} files outside its folder, the first: {report.unchecked[0]} (give --state-dir)")
    for skipped in report.skipped:
        console.show_line(f"skipped: checkpoint {skipped.checkpoint_id}: {skipped.reason}")
    for sink in report.sinks:
        if sink.may_repeat:
            console.show_line(f"may repeat: output of sink {sink.sink_id!r} (operator {sink.operator!r})")
        if sink.is_moved:
            before = sink.stored_path or "where it was"
            if sink.stored_id not in (None, sink.sink_id):
                before += f" as sink {sink.stored_id!r}"
            places = f"writes to {sink.path}, no longer to {before}"
            console.show_line(f"elsewhere: sink {sink.sink_id!r} (operator {sink.operator!r}) {places}")
    for note in report.notes:
        console.show_line(f"note: {note}")
    for refusal in report.refusals:
        console.show_line(f"refused: {refusal.message} [{refusal.kind}]")
    console.show_line("fits" if report.fits else f"does not fit: {len(report.refusals)} reasons")


def _rows(operator: OperatorFinding) -> Iterator[tuple[Any, ...]]:
    renamed = f", renamed to {operator.renamed_to}?" if operator.renamed_to else ""
    head = (operator.uid, f"{operator.presence}{renamed}", console.size_text(operator.size), _parallelism(operator))
    for state in operator.states:
        pickled = " (pickled)" if state.pickled else ""
        size = "" if state.size is None else console.size_text(state.size)
        yield (*head, state.name, size, f"{state.verdict}{pickled}", _cut(state.stored), _cut(state.declared))
    if not operator.states:
        yield (*head, "", "", "", "", "")


def _cut(text: str | None) -> str | None:
    """A record's type fills a screen: notes, refusals and JSON have it whole, and the lines below the table what differs in it."""
    return text if text is None or len(text) <= TYPE_CHARACTERS_MAX else f"{text[: TYPE_CHARACTERS_MAX - 1]}…"


def _parallelism(operator: OperatorFinding) -> str:
    """`2 of 128 -> 3 of 128`."""
    sides = [
        f"{parallelism} of {maximum}"
        for parallelism, maximum in (
            (operator.stored_parallelism, operator.stored_max_parallelism),
            (operator.parallelism, operator.max_parallelism),
        )
        if parallelism is not None
    ]
    return " -> ".join(dict.fromkeys(sides))
