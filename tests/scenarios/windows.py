"""Scenario groups U (windows of row functions) and V (triggers, evictors), as data.

Input: `a5` a record of key a at time 5; `w9` a watermark; `p20` the wall clock; `end` the maximum watermark and the end of input.
Output: `a[0,10)2@9` the window [0, 10) of key a fired with two records, and the result has time 9; `a*2@9` a global window.
`a[0,10)=1,5@9` gives the times of the records that the function saw. Late: what came out of the late output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import holdfast as hf

FOREVER = 2**63 - 1


@dataclass(frozen=True)
class Case:
    """One row of the tables."""

    id: str
    windows: Any
    input: str
    output: str
    late: str = ""
    lateness: int = 0
    trigger: hf.Trigger | None = None
    evictor: hf.Evictor | None = None
    count: tuple[int, int | None] | None = None
    """Of `count_window`, instead of `windows`."""


def _gap(row: dict[str, Any]) -> int:
    return 5 if row["at"] < 10 else 20


def _apart(row: dict[str, Any], last: dict[str, Any]) -> float:
    return abs(row["at"] - last["at"])


TEN = hf.Tumbling(10)
SLIDING = hf.Sliding(10, slide=5)
SESSION = hf.Session(10)
CLOCK = hf.Tumbling(10, time="processing")
PURGING = hf.PurgingTrigger(hf.EventTimeTrigger())

WINDOWS = (
    Case("U01", TEN, "a1 a9 b3 w8 w9 a12 w30", "a[0,10)2@9 b[0,10)1@9 a[10,20)1@19"),
    Case("U02", TEN, "a-1 a-10 a-11 w-11 w0", "a[-20,-10)1@-11 a[-10,0)2@-1"),
    Case("U03", TEN, "a1 w9 a2 a10 w19", "a[0,10)1@9 a[10,20)1@19", late="a2"),
    Case("U04", TEN, "a1 w9 a2 w13 a3 w14 a4", "a[0,10)1@9 a[0,10)2@9 a[0,10)3@9", late="a4", lateness=5),
    Case("U05", TEN, "a1 w9 w1000000 a2", "a[0,10)1@9 a[0,10)2@9", lateness=FOREVER),
    Case("U06", TEN, "a1 w20 a2 w40", "a[0,10)1@9 a[0,10)2@9", lateness=12),
    Case("U07", TEN, "w12 a5 a6 w14 a7", "a[0,10)1@9 a[0,10)2@9", late="a7", lateness=5),
    Case("U08", hf.Tumbling(10, offset=3), "a2 a3 w30", "a[-7,3)1@2 a[3,13)1@12"),
    Case("U09", SLIDING, "a7 w30", "a[0,10)1@9 a[5,15)1@14"),
    Case("U10", SLIDING, "a7 w9 a6 w14 a6", "a[0,10)1@9 a[5,15)2@14", late="a6"),
    Case("U11", hf.Sliding(10, slide=4), "a9 w40", "a[0,10)1@9 a[4,14)1@13 a[8,18)1@17"),
    Case("U12", hf.Sliding(5, slide=10), "a3 a7 a12 w40", "a[0,5)1@4 a[10,15)1@14"),
    Case("U13", SESSION, "a0 a5 a30 w60", "a[0,15)2@14 a[30,40)1@39"),
    Case("U14", SESSION, "a0 a10 w60", "a[0,20)2@19"),
    Case("U15", SESSION, "a0 a20 b0 a10 w60", "b[0,10)1@9 a[0,30)=0,20,10@29"),
    Case("U16", SESSION, "a0 w9 a5 w14 a4", "a[0,10)1@9 a[5,15)1@14", late="a4"),
    Case("U17", SESSION, "a0 a9 w12 a-5 w18", "a[-5,19)3@18"),
    Case("U18", SESSION, "a0 w9 a5 w14", "a[0,10)1@9 a[0,15)2@14", lateness=20),
    Case("U19", SESSION, "a0 w9 a0 a-3 w14", "a[0,10)1@9 a[0,10)2@9 a[-3,10)3@9", lateness=20),
    Case("U20", hf.Session(_gap), "a0 a4 a10 w40", "a[0,9)2@8 a[10,30)1@29"),
    Case("U21", SESSION, "a0 a20 w5 w15 a10 w29", "a[0,10)1@9 a[0,30)3@29", lateness=10),
    Case("U22", CLOCK, "p3 a100 a200 p9 p10 a300 p25", "a[0,10)2@9 a[10,20)1@19"),
    Case("U23", CLOCK, "p3 a100 p12 a200 end", "a[0,10)1@9 a[10,20)1@19"),
    Case("U24", hf.Session(10, time="processing"), "p3 a0 p9 a0 p19 p20 a0 end", "a[3,19)2@18 a[20,30)1@29"),
    Case("U25", TEN, "a1 a12 end", "a[0,10)1@9 a[10,20)1@19"),
)

TRIGGERS = (
    Case("V01", TEN, "a1 a2 a3 w9", "a[0,10)2@9", trigger=hf.CountTrigger(2)),
    Case("V02", TEN, "a1 a2 a3 a4 w9", "a[0,10)=1,2@9 a[0,10)=3,4@9", trigger=hf.PurgingTrigger(hf.CountTrigger(2))),
    Case("V03", SESSION, "a0 a20 a10 w60", "a[0,30)3@29", trigger=hf.CountTrigger(3)),
    Case("V04", SESSION, "a0 a5 a30 a31 a60", "a[0,15)2@14 a[30,41)2@40", trigger=hf.CountTrigger(2)),
    Case("V05", TEN, "a1 w9 a2 w12 a3", "a[0,10)=1@9 a[0,10)=2@9 a[0,10)=3@9", lateness=10, trigger=PURGING),
    Case("V06", SESSION, "a0 w9 a3 w15", "a[0,10)=0@9 a[0,13)=3@12", lateness=10, trigger=PURGING),
    Case("V07", hf.Global(), "a1 a5 b2 a7 a9", "a*2@5 a*4@9", trigger=hf.CountTrigger(2)),
    Case("V08", None, "a1 a5 a7 a3 a9 end", "a*=1,5@5 a*=7,3@3", count=(2, None)),
    Case("V09", None, "a1 a2 a3 a4 a5 a6", "a*=1,2@2 a*=2,3,4@4 a*=4,5,6@6", count=(3, 2)),
    Case(
        "V10", hf.Tumbling(20), "a1 w5 a6 w12 w19", "a[0,20)1@19 a[0,20)2@19 a[0,20)2@19 a[0,20)2@19",
        trigger=hf.ContinuousEventTimeTrigger(5),
    ),
    Case(
        "V11", hf.Tumbling(20, time="processing"), "p1 a0 p6 a0 p11 p30", "a[0,20)1@19 a[0,20)2@19 a[0,20)2@19 a[0,20)2@19",
        trigger=hf.ContinuousProcessingTimeTrigger(5),
    ),
    Case("V12", hf.Global(), "p1 a7 p6 end", "a*1@5", trigger=hf.ContinuousProcessingTimeTrigger(5)),
    Case("V13", hf.Global(), "p1 a7 end", "", trigger=hf.ContinuousProcessingTimeTrigger(5)),
    Case("V14", TEN, "a1 a2 a3 w9", "a[0,10)=2,3@9", evictor=hf.CountEvictor(2)),
    Case("V15", TEN, "a1 a2 a3 w9 a4", "a[0,10)=1,2,3@9 a[0,10)=2,3,4@9", lateness=5, evictor=hf.CountEvictor(2, after=True)),
    Case("V16", TEN, "a1 a5 a8 w9", "a[0,10)=5,8@9", evictor=hf.TimeEvictor(5)),
    Case("V17", SESSION, "a0 a20 a10 w60", "a[0,30)=20,10@29", evictor=hf.CountEvictor(2)),
    Case("V18", SESSION, "a0 a4 a8 w60", "a[0,18)3@17 a[0,18)3@17", trigger=hf.ContinuousEventTimeTrigger(15)),
    Case(
        "V19", hf.Global(), f"a1 b5 a2 w{FOREVER - 1} a7 end", f"a*=1,2,7@{FOREVER} b*=5@{FOREVER}",
        trigger=hf.EventTimeTrigger(),
    ),
    Case("V20", hf.Global(), "a1 w9 a7 end", f"a*=1@5 a*=1,7@10 a*=1,7@{FOREVER}", trigger=hf.ContinuousEventTimeTrigger(5)),
    Case("V21", hf.Global(), "p1 a1 p9 end", "", trigger=hf.ProcessingTimeTrigger()),
    Case("V22", TEN, "a1 a9 a3 a4 a7 w9", "a[0,10)=9,4,7@9", evictor=hf.DeltaEvictor(4, _apart)),
)
