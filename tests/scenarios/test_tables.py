"""Every row of the project's own tables, one test each; and that the runner can't be fooled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scenarios.__main__ import OWN_TABLES, main
from tests.scenarios.outcome import Covered, Failed, Passed, Unparsed
from tests.scenarios.runner import Report, run_row, run_rows
from tests.scenarios.tables import NOTATION_GROUPS, Row, parse_rows

ROWS = list(parse_rows(OWN_TABLES.read_text(encoding="utf-8")))
RUN = [row for row in ROWS if row.group in NOTATION_GROUPS]


@pytest.mark.parametrize("row", RUN, ids=lambda row: re.sub(r"\W+", "-", row.id))
def test_row(row: Row) -> None:
    assert isinstance(outcome := run_row(row), Passed | Covered), outcome


def test_every_group_and_vector_was_found() -> None:
    counts = {group: sum(row.group == group for row in ROWS) for group in NOTATION_GROUPS}
    assert counts == {"A": 18, "C": 14, "D": 14, "E": 8, "I": 10, "M": 10, "O": 33, "P": 8, "Y": 11}


def run(table: str) -> Report:
    return run_rows(parse_rows(table))


HEAD_A = "## A. Gate\n\n| id | n | input | expected trace | cut | what |\n|---|---|---|---|---|---|\n"


@pytest.mark.parametrize(
    ("row", "failure"),
    [
        ("| A90 | 2 | `B1.a B1.b` | `[T2]` | — | |", Failed("[T2]", "[T1]")),
        ("| A91 | 2 | `a1 B1.a B1.b` | `a1 [T1]` | T1: a2 b0 | |", Failed("cut of 1: {'a': 2, 'b': 0}", "{'a': 1, 'b': 0}")),
        ("| A92 | 2 | `B1.a a1` | `(pending 1) (held: a2)` | — | |", Failed("held: a2", "a1")),
        ("| A93 | 2 | `B1.a a1` | `(pending 2) (held: a1)` | — | |", Failed("pending (2,)", "(1,)")),
        ("| A94 | 2 | `a1 b1` | `b1 a1` | — | |", Failed("b1 a1", "a1 b1")),
        ("| A95 | 2 | `a1 Q.a` | `a1` | — | |", Unparsed("unknown event 'Q.a'")),
        ("| A96 | 2 | `a1` | `a1 (as ever)` | — | |", Unparsed("unknown note (as ever)")),
        ("| A97 | 2, with sugar | `a1` | `a1` | — | |", Unparsed("unknown option 'with sugar'")),
        ("| A98 | 1 | `b1` | `b1` | — | |", Unparsed("channel b is beyond n=1")),
        ("| A99 | 1 | `a1` | `a1` | cut of a | |", Unparsed("a cut must begin with its checkpoint: 'cut of a'")),
    ],
)
def test_a_wrong_row_of_a_fails(row: str, failure: Failed | Unparsed) -> None:
    (parsed,) = parse_rows(HEAD_A + row + "\n")
    assert run_row(parsed) == failure
    assert run_rows([parsed]).failed == 1


@pytest.mark.parametrize(
    "row",
    [
        "| A70 | 3 , after-finish off | E.c, B1.a, a1, B1.b, b1 | E.c, [T1], a1, b1 | T1: a0, b0, c0 | no quotes, commas |",
        "| A71 | 3 (after-finish off) | `B1.a a1 E.c B1.b b1` | `E.c [A1 end-of-input] a1 b1` | — | |",
        "| A72 | 2 | `B1.a a1 b1 E.b a2` | `b1 E.b [T1] a1 a2` | T1: a0 b1 | |",
        "| A73 | 2 | `B1…B3.a B1…B3.b a1…a3` | `[T1] [T2] [T3] a1 a2 a3` | | ranges |",
        "| A76 | 2 | `B1.a a1 B2.a` | `(pending 1; held a1 B2.a)` | — | |",
        "| A77 | 2 | `B1.a a1 B1.b` | `[T1] a1` (nothing held) (nothing pending) | — | |",
        "| A74 | — | `B7.a b1 B7.b` | `b1 [T7]` | — | no n |",
        "| **A75** | 1 | `X3.a B3.a B4.a a1` | `[A3 cancelled] [T4] a1` | T4: a0 | |",
    ],
)
def test_variants_of_the_notation_of_a(row: str) -> None:
    report = run(HEAD_A + row + "\n")
    assert (report.passed, report.failed, report.lines) == (1, 0, [])


def test_a_row_without_a_header_is_still_run() -> None:
    assert run("| A70 | 1 | `a1 B1.a` | `a1 [T1]` | T1: a1 | |\n").passed == 1


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        ("| E70 | 2 | first barriers of ids 1…60 on a only, then `B1.b`, then `B60.b` | `[T60]` | |", 1),
        ("| E71 | 2 | barriers of ids 1…60 on a, then `B10.b` `B11.b` | `[T11]` | |", 1),
        ("| E72 | 2 | barriers 1 to 50 on a only, followed by B1.b | `[T1]` | |", 1),
        ("| E73 | 3 | barriers 1…3 on a and b, cancel marker 2 on c, then `B3.c` | `[A1 cancelled] [A2 cancelled] [T3]` | |", 1),
        ("| E74 | 2, after-finish off | `B1.a B2.a a1 E.b` | `a1 E.b [A1 end-of-input] [A2 end-of-input]` | |", 1),
        ("| E75 | 2 | a storm of barriers | `[T60]` | |", 0),
    ],
)
def test_rows_of_e(row: str, passed: int) -> None:
    head = "| id | n | input | expected trace | what |\n|---|---|---|---|---|\n"
    report = run(head + row + "\n")
    assert (report.passed, report.failed) == (passed, 1 - passed), report.lines


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        ("| M70 | 2 | `a-10 b−5→W-10 -a→W-5` | `W-10 W-5` | |", 1),
        ("| M71 | 1 | a5 → W5, -a → IDLE | W5, IDLE | |", 1),
        ("| M72 | 1 | `a5→W5` | `W5 W6` | |", 0),
        ("| M73 | 1 | `a5` | `W5` | |", 0),
        ("| M74 | 1 | `a5→W5 a5→W5` | `W5 W5` | |", 0),
        ("| M75 | 2 | `a5 b5→W5 -a -b→IDLE` | `W5 IDLE` | |", 1),
        ("| M76 | 1 | `a!` | — | |", 0),
        ("| M77 | 2 | `a1 a2` | — | |", 1),
    ],
)
def test_rows_of_m(row: str, passed: int) -> None:
    head = "| id | n | input → output | all output | what |\n|---|---|---|---|---|\n"
    report = run(head + row + "\n")
    assert (report.passed, report.failed) == (passed, 1 - passed), report.lines


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        ("| O70 | p=2,maxP=128 | 0–63, 64–127 |", 1),
        ("| O71 | p=2, maxP=128 | 0–62, 63–127 |", 0),
        ("| O72 | p=200,maxP=128 | refused |", 1),
        ("| O73 | p=2,maxP=128 | refused |", 0),
        ("| O74 | maxP=32768, p=-1 | refused |", 0),
        ("| O75 | default maxP for p=3,200 | 128,512 |", 1),
        ("| O76 | default maxP for p=3 | 256 |", 0),
        ("| O77 | rescale 4→2 (maxP 128) | new reads old: [0,1],[2,3] |", 1),
        ("| O78 | rescale 4→2 (128) | [0,1],[1,2,3] |", 0),
        ("| O79 | all p≤maxP≤20 | disjoint |", 1),
        ("| O80 | the moon | is full |", 0),
        ("| O81 | p=1,maxP=1 | 0 |", 1),
        ("| O82 | p=128,maxP=128 | accepted |", 1),
    ],
)
def test_rows_of_o(row: str, passed: int) -> None:
    report = run("| id | case | expected |\n|---|---|---|\n" + row + "\n")
    assert (report.passed, report.failed) == (passed, 1 - passed), report.lines


def test_vector_tables_follow_their_headers() -> None:
    table = "| input hash | spread value | group of 16 |\n|---|---|---|\n| 42 | 1134849565 | 13 |\n| −1 | 1 | 0 |\n\n"
    table += '| string key | group of 4096 | subtask at p=2/3 |\n|---|---|---|\n| "a" | 3025 | 1/2 |\n| "a" | 3025 | 1/1 |\n\n'
    table += "uid → operator id: `source` e5a72f353fc1e6bbf3bd96a41384998c · `sauce` e5a72f353fc1e6bbf3bd96a41384998c\n"
    report = run(table)
    assert (report.passed, report.failed) == (3, 3), report.lines


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        ("| P70 | split | a: x1..x3 / ∅ | 1 | x1,x2,x3 |", 1),
        ("| P71 | split | x1, x2 / x3 | 3 | x1 / x2 / x3 |", 1),
        ("| P72 | split | x1,x2 / x3 | 3 | x2 / x1 / x3 |", 0),
        ("| P73 | split, two names | x: x1; y: y1,y2 (one old) | 2 | x1 + y2 / y1 |", 1),
        ("| P74 | union | u1 / u2 | 2 | u1,u2 / u1,u2 |", 1),
        ("| P75 | union | u1 / u2 | 3 | u1 at each |", 0),
        ("| P76 | broadcast | identical copies at 2 | 3 | new i reads old i mod 2: 0,1,0 |", 1),
        ("| P77 | broadcast | identical copies at 2 | 3 | 0,1,1 |", 0),
        ("| P78 | split | x1,x2 / x3 | same | unchanged |", 1),
        ("| P79 | shuffle | x1 | 2 | x1 / ∅ |", 0),
        ("| P80 | split | x1..x2 (two old) | 2 | x1 / x2 |", 0),
    ],
)
def test_rows_of_p(row: str, passed: int) -> None:
    report = run("| id | mode | old | new p | expected |\n|---|---|---|---|---|\n" + row + "\n")
    assert (report.passed, report.failed) == (passed, 1 - passed), report.lines


def test_groups_in_prose_are_said_and_not_counted() -> None:
    report = run("| id | n | input | expected trace |\n|---|---|---|---|\n| F01 | 1 | x | y |\n")
    assert (report.passed, report.failed) == (0, 0)
    assert report.lines == ["group F: requirements in prose, 1 rows not run here"]


def test_command_prints_failures_and_counts_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.md"
    file.write_text(HEAD_A + "| A70 | 1 | `a1` | `a1` | | |\n| A71 | 1 | `a1` | `a2` | | |\n", encoding="utf-8")
    assert main([str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == ["FAILED A71 (line 6): expected a2 | got a1", "1 passed, 1 failed"]


def test_command_without_rows_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.md"
    file.write_text("nothing here\n", encoding="utf-8")
    assert main([str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"
    assert main([str(tmp_path / "missing.md")]) == 2
