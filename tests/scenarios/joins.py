"""Scenario group W (joins), as data.

Input: `a5` a left row of key a at time 5, `A5` a right row; `A5/7` has the value 7, others have their time as value; key `n`, `N`:
a null. `w9` a watermark of both sides, `<9` of the left, `>9` of the right; `>idle`, `>active`, `>end` a side is silent, back, at
its end; `end` both are.
Output: `a5.7@9` the pair of the left value 5 and the right value 7 of key a, with time 9; `a5.@9`, `a.7@9` rows without a partner.
Of cogroups `a[0,10):5,6.7@9` the window and the values of both sides, which are in order.
`|` parts both into steps: what comes out of each step of the input. Late: what came out of the late outputs, or was counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import holdfast as hf


@dataclass(frozen=True)
class Join:
    """A method of a stream, and its settings. The table of a lookup travels with the job."""

    method: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    id: str
    join: Join
    input: str
    output: str
    late: str = ""
    counted: int = 0
    """Late rows of a join that has no late outputs."""


def _interval(lower: int = -2, upper: int = 5, how: str = "inner", **settings: Any) -> Join:
    late = {"late_left": "late-left", "late_right": "late-right"}
    return Join("interval_join", {"lower": lower, "upper": upper, "how": how, **late, **settings})


def _regular(retain: Any, how: str = "inner") -> Join:
    return Join("join", {"retain": retain, "how": how, "late_left": "late-left", "late_right": "late-right"})


def _windowed(window: Any, how: str = "inner") -> Join:
    return Join("window_join", {"window": window, "how": how, "late_left": "late-left", "late_right": "late-right"})


def _grouped(window: Any) -> Join:
    return Join("cogroup", {"window": window, "late_left": "late-left", "late_right": "late-right"})


def _temporal(how: str = "inner") -> Join:
    return Join("temporal_join", {"how": how})


def _lookup(how: str = "inner") -> Join:
    table = pa.table({"key": pa.array(["a", "b", "b", None]), "r": pa.array([1, 2, 3, 4], pa.int64())})
    return Join("lookup_join", {"how": how, "table": table})


TEN = hf.Tumbling(10)
SESSION = hf.Session(10)
FULL = _interval(how="full")
OPEN = _interval(how="full", lower_exclusive=True, upper_exclusive=True)
FIVES = _windowed(hf.Sliding(10, slide=5), "full")

JOINS = (
    # Interval joins: a left row at t and right rows of t-2 .. t+5
    Case("W01", _interval(), "a10 | A7 A8 | A15 A16", " | a10.8@10 | a10.15@15"),
    Case("W02", _interval(), "A7 A8 A15 A16 B10 | a10", " | a10.8@10 a10.15@15"),
    Case("W03", _interval(lower_exclusive=True), "a10 | A8 A9 A15", " | a10.9@10 a10.15@15"),
    Case("W04", _interval(upper_exclusive=True), "a10 | A8 A14 A15", " | a10.8@10 a10.14@14"),
    Case("W05", _interval(), "a10 a10 | A11 A11", " | a10.11@11 a10.11@11 a10.11@11 a10.11@11"),
    Case("W06", _interval(), "a10 B10 | w100", " | "),
    Case("W07", _interval(how="left"), "a10 B10 | w14 | w15 | end", " |  | a10.@15 | "),
    Case("W08", _interval(how="right"), "a10 B10 | w11 | w12 | end", " |  | b.10@12 | "),
    Case("W09", FULL, "a10 B10 w11 | w12 | w14 | w15", " | b.10@12 |  | a10.@15"),
    Case("W10", FULL, "a10 w14 | A15 | end", " | a10.15@15 | "),
    Case("W11", OPEN, "a10 B10 w10 | w11 | w14", " | b.10@11 | a10.@14"),
    Case("W12", FULL, "w10 a10 A10 | a11 A11 | end", " | a11.11@11 | ", late="a10 A10"),
    Case("W13", FULL, "n10 N10 w11 | w12 | w15", " | n.10@12 | n10.@15"),
    Case("W14", FULL, "a10 | A11 | a12 | end", " | a10.11@11 | a12.11@12 | "),
    Case("W15", _interval(-10, -5, "full"), "a10 b10 | A5 | C1 | w100", " | a10.5@10 |  | b10.@10 c.1@11"),
    Case("W16", _interval(5, 10, "full"), "a10 b10 | A15 | C40 | w100", " | a10.15@15 |  | b10.@20 c.40@40"),
    Case("W17", FULL, "a10 <100 | >14 | >15", " |  | a10.@15"),
    Case("W18", FULL, "a10 <100 | >idle | >active A20 | A101 | end", " | a10.@15 |  |  | a.101@103", late="A20"),
    Case("W19", FULL, "a10 <20 | >end | a30 <35", " | a10.@15 | a30.@35"),
    Case("W20", FULL, "a-10 A-12 B-1 | w-5 | w1", "a-10.-12@-10 |  | b.-1@1"),
    Case("W21", FULL, "a10 b90 | end", " | a10.@15 b90.@95"),
    # Regular joins: rows are retained for so long
    Case("W22", _regular(5, "full"), "a10 A5 A15 A4 A16 | w9 | w15 | w21", "a10.5@10 a10.15@15 | a.4@9 |  | a.16@21"),
    Case("W23", _regular((3, 7)), "a10 | A3 A2 | A13 A14", " | a10.3@10 | a10.13@13"),
    # Temporal joins: the version that is valid at a left row's time
    Case("W24", _temporal("left"), "A10 A20/7 a9 a10 a19 a20 | w19 | w20", " | a9.@9 a10.10@10 a19.10@19 | a20.7@20"),
    Case("W25", _temporal(), "a9 A10 A20 a12 | w11 | w12 | end", " |  | a12.10@12 | "),
    Case("W26", _temporal("left"), "a12 <100 | >11 | A12/5 | >12", " |  |  | a12.5@12"),
    Case("W27", _temporal(), "A10/1 A10/2 a10 | w10 | a10 | end", " | a10.2@10 |  | ", counted=1),
    Case("W28", _temporal("left"), "A10 | w12 | A11/5 | a13 w13 | A10/6 | a14 w14", " |  |  | a13.5@13 |  | a14.5@14", counted=1),
    Case("W29", _temporal("left"), "N5 n10 a10 | w20", "n10.@10 | a10.@10"),
    Case("W30", _temporal(), "A10 | w1000000 | a1000001 | end", " |  |  | a1000001.10@1000001"),
    # Window joins
    Case("W31", _windowed(TEN), "a1 A9 a10 b3 | w8 | w9 | end", " |  | a1.9@9 | "),
    Case("W32", _windowed(TEN, "full"), "a1 a2 A3 B4 | w9", " | a1.3@9 a2.3@9 b.4@9"),
    Case("W33", _windowed(TEN, "left"), "a-1 A-10 A0 a-11 | w-1", " | a-11.@-11 a-1.-10@-1"),
    Case("W34", FIVES, "a7 A12 | w9 | A8 | w14 | w19", " | a7.@9 |  | a7.8@14 a7.12@14 | a.12@19"),
    Case("W35", _windowed(TEN, "full"), "w9 | a5 A6 a11 A12 | w19", " |  | a11.12@19", late="a5 A6"),
    Case("W36", _windowed(SESSION, "full"), "a0 A9 A30 | w18 | w39", " | a0.9@18 | a.30@39"),
    Case("W37", _windowed(SESSION), "a0 a20 | A10 | w28 | w29", " |  |  | a0.10@29 a20.10@29"),
    Case("W38", _windowed(TEN, "full"), "a1 <100 | >idle | >active A50 A101 | end", " | a1.@9 |  | a.101@109", late="A50"),
    Case("W39", _windowed(TEN, "full"), "n1 N2 a1 | end", "n1.@9 n.2@9 | a1.@9"),
    # Cogroups
    Case("W40", _grouped(TEN), "a1 A2 A3 b4 | w9", " | a[0,10):1.2,3@9 b[0,10):4.@9"),
    Case("W41", _grouped(SESSION), "a0 w5 | A9 w9 | a18 | w27 | a17", " |  |  | a[0,28):0,18.9@27 | ", late="a17"),
    # Lookup joins, in a table: a has 1, b 2 and 3, and a null 4
    Case("W42", _lookup(), "a5 b6 | n7 c8 | end", "a5.1@5 b6.2@6 b6.3@6 |  | "),
    Case("W43", _lookup("left"), "w10 | a5 | n7 c8", " | a5.1@5 | n7.@7 c8.@8"),
)
