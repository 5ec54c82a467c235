"""Scenario group X (broadcast state, asynchronous calls), as data.

Broadcast, two subtasks. Input: `a5` adds 5 to the sum of key a, `a0` tries to write broadcast state. Broadcast are `+7` (the rule
is 7), `-` (there is none), `!` (each key's sum comes out, and begins again), `=` (each subtask tells how many rules it has). `cut`
is a checkpoint and a restore at one subtask more. Output: `a5:7` the sum of a, and the rule that it met (0: none); `a5!`; `#1`.

Async. Input: `1` row 1; `!1` its oldest call returns, `x1` raises; `w5` a watermark; `p100` the wall clock; `cut` a checkpoint and
a restore. Output: `?1` row 1 is asked for, `1` its result leaves, `w5` the watermark does. Of a step, calls stand before results.

`|` parts input and output into steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import holdfast as hf


@dataclass(frozen=True)
class Case:
    """One row of the tables."""

    id: str
    input: str
    output: str
    settings: dict[str, Any] = field(default_factory=dict)
    raises: type[hf.HoldfastError] | None = None
    """What the last step of the input raises."""


BROADCAST = (
    Case("X01", "a1 | +7 a1", "a1:0 | a2:7"),
    Case("X02", "a1 +7 | a1 +9 | a1 b1", "a1:0 | a2:7 | a3:9 b1:9"),
    Case("X03", "+7 a1 - a1", "a1:7 a2:0"),
    Case("X04", "a1 b2 a3 | ! | a5 b1", "a1:0 b2:0 a4:0 | a4! b2! | a5:0 b1:0"),
    Case("X05", "! | a1", " | a1:0"),
    Case("X06", "a1 ! | ! | a2 !", "a1:0 a1! |  | a2:0 a2!"),
    Case("X07", "= +7 | = | - =", "#0 #0 | #1 #1 | #0 #0"),
    Case("X08", "+7 a1 cut b1 a1 | =", "a1:7 b1:7 a2:7 | #1 #1 #1"),
    Case("X09", "a1 b1 c1 d1 +3 cut | a1 b1 c1 d1", "a1:0 b1:0 c1:0 d1:0 | a2:3 b2:3 c2:3 d2:3"),
    Case("X10", "a1 b2 c3 d4 cut | ! cut | ! d1", "a1:0 b2:0 c3:0 d4:0 | a1! b2! c3! d4! | d1:0"),
    Case("X11", "+7 cut - cut | a1", " | a1:0"),
    Case("X12", "+7 | a0", " | ", raises=hf.ReadOnlyStateError),
)

UNORDERED = {"ordered": False}
AGAIN = hf.RetryStrategy(attempts_max=2, delay_ms=100)

ASYNC = (
    Case("X13", "1 2 3 | !3 !2 | !1", "?1 ?2 ?3 |  | 1 2 3"),
    Case("X14", "1 2 3 | !3 | !1 | !2", "?1 ?2 ?3 | 3 | 1 | 2", UNORDERED),
    Case("X15", "1 w5 2 | !2 | !1", "?1 ?2 |  | 1 w5 2"),
    Case("X16", "1 2 w5 3 | !3 | !2 | !1", "?1 ?2 ?3 |  | 2 | 1 w5 3", UNORDERED),
    Case("X17", "1 w5 2 w6 3 | !3 | !1 | !2", "?1 ?2 ?3 |  | 1 w5 | 2 w6 3", UNORDERED),
    Case("X18", "w5 | 1 w6 | !1", "w5 | ?1 | 1 w6"),
    Case("X19", "1 2 | cut 3 | !3 !1 | !2", "?1 ?2 | ?1 ?2 ?3 | 1 | 2 3"),
    Case("X20", "1 2 | cut 3 | !3 | !2 | !1", "?1 ?2 | ?1 ?2 ?3 | 3 | 2 | 1", UNORDERED),
    Case("X21", "1 w5 2 !2 | cut 3 | !2 | !1", "?1 ?2 | ?1 ?2 ?3 |  | 1 w5 2", UNORDERED),
    Case("X22", "1 w5 cut | !1", "?1 ?1 | 1 w5"),
    Case("X23", "1 !1 cut | 2 | !2", "?1 1 | ?2 | 2"),
    Case("X24", "1 2 3 | !1 | cut | !2 | !3", "?1 | ?2 1 | ?2 | ?3 2 | 3", {"capacity": 1}),
    Case("X25", "1 x1 | p99 | p100 | !1", "?1 |  | ?1 | 1", {"retry": AGAIN}),
    Case("X26", "1 2 x1 !2 | p100 | !1", "?1 ?2 | ?1 | 1 2", {"retry": AGAIN}),
    Case("X27", "1 2 x1 !2 | p100 | !1", "?1 ?2 2 | ?1 | 1", {"retry": AGAIN, **UNORDERED}),
    Case("X28", "1 | p1000 | p1100 | !1 | !1", "?1 |  | ?1 |  | 1", {"retry": AGAIN}),
    Case("X29", "1 x1 | p50 cut | !1", "?1 | ?1 | 1", {"retry": AGAIN}),
    Case("X30", "1 2 !2 | p999 | p1000", "?1 ?2 |  | 2", {"skips": True}),
    Case("X31", "1 | p999 | p1000", "?1 |  | ", raises=hf.AsyncTimeoutError),
    Case("X32", "1 x1 | p100 | x1", "?1 | ?1 | ", {"retry": AGAIN}, raises=hf.UserFunctionError),
)
