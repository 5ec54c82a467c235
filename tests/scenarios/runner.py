"""Runs every row of a scenario file: dispatches on the group, counts, and says what was not run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.scenarios.gates import check_gate_row
from tests.scenarios.hooks import check_hook_row
from tests.scenarios.keygroups import check_case_row, check_hash_row, check_string_row, check_uid_row
from tests.scenarios.outcome import Covered, Failed, Outcome, Passed, Unparsed
from tests.scenarios.overtaking import check_overtaking_row
from tests.scenarios.redistribution import check_redistribution_row
from tests.scenarios.tables import NOTATION_GROUPS, Row, UnparsedError, parse_rows
from tests.scenarios.valves import check_valve_row

REPOSITORY = Path(__file__).resolve().parents[2]


def checker_of(row: Row) -> Callable[[Row], Outcome]:
    if row.group in ("A", "E"):
        return check_gate_row
    if row.group in ("C", "D", "Y"):
        return check_overtaking_row
    if row.group == "I":
        return check_hook_row
    if row.group == "M":
        return check_valve_row
    if row.group == "P":
        return check_redistribution_row
    by_first_column = {"input hash": check_hash_row, "string key": check_string_row, "uid": check_uid_row}
    return by_first_column.get(row.header[0] if row.header else "", check_case_row)


def run_row(row: Row) -> Outcome:
    """What became of a row of a group that is built. Whatever goes wrong is the row's failure, never the runner's end."""
    try:
        outcome = checker_of(row)(row)
    except UnparsedError as error:
        return Unparsed(str(error))
    except Exception as error:
        return Failed(" | ".join(row.cells[1:]), f"{type(error).__name__}: {error}")
    if isinstance(outcome, Covered) and not exists(outcome.test):
        return Failed(f"a test {outcome.test}", "there is none")
    return outcome


def exists(test: str) -> bool:
    """True if the test that a requirement row relies on is there."""
    file, _, name = test.partition("::")
    path = REPOSITORY / file
    return path.is_file() and re.search(rf"^\s*def {re.escape(name)}\(", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


@dataclass
class Report:
    """Lines for the reader, and the counts."""

    lines: list[str] = field(default_factory=list)
    passed: int = 0
    failed: int = 0

    def add(self, row: Row, outcome: Outcome) -> None:
        match outcome:
            case Passed():
                self.passed += 1
            case Covered(test=test, remark=remark):
                self.lines.append(f"{row.id}: requirement row, not counted, covered by {test}{remark and f' ({remark})'}")
            case Unparsed(reason=reason):
                self.failed += 1
                self.lines.append(f"UNPARSED {row.id} (line {row.line}): {reason}")
            case Failed(expected=expected, got=got):
                self.failed += 1
                self.lines.append(f"FAILED {row.id} (line {row.line}): expected {expected} | got {got}")


def run_rows(rows: Iterable[Row]) -> Report:
    report = Report()
    skipped: Counter[str] = Counter()
    for row in rows:
        if row.group not in NOTATION_GROUPS:
            skipped[row.group] += 1
        else:
            report.add(row, run_row(row))
    for group, count in sorted(skipped.items()):
        report.lines.append(f"group {group}: requirements in prose, {count} rows not run here")
    return report


def run_files(paths: Iterable[Path]) -> Report:
    total = Report()
    for path in paths:
        rows = list(parse_rows(path.read_text(encoding="utf-8")))
        if not rows:
            total.failed += 1
            total.lines.append(f"UNPARSED {path}: no rows found")
        report = run_rows(rows)
        total.lines += report.lines
        total.passed += report.passed
        total.failed += report.failed
    return total
