"""Scenario group Z, continued: splits, of an enumerator and readers of one source, as data.

A split is a letter, its rows are numbered 0, 1, 2 ... Outside: `+a3` split a has three further rows (and is there, if it was
not), `end:a` the last of its rows is there, `lose:a2` its two oldest rows are gone. `break` the next fetch takes its rows and
fails, `fail` the next discovery fails, `fail9` the next nine; `twice` the connector forgets what it has found. The job:
`find` one discovery; `ask` the requests of the readers reach the enumerator, `hand` splits leave it into the channels, `get`
the readers take them from there, `read` all that is there is read; `go` these four, until nothing moves. A barrier is passed
by none of them. `cut` the enumerator takes the next checkpoint, and its barrier follows the splits; `ack` the readers take
it, `ack0` reader 0 alone; `done1` checkpoint 1 is complete, `abort1` it never will be. `ck` is cut, ack and done; `save` a
plain savepoint: cut and ack. `crash` the attempt ends, and the job goes on from its newest complete checkpoint, `crash*3`
with three readers; `from2` from checkpoint or savepoint 2, also `from2*3`; `mix1-2` with the enumerator's state of 1 and the
readers' of 2. `@y` another job with the same source; `from-x2` it starts from snapshot 2 of job x, which goes on; `@x` x
again.
`|` parts steps. `where`: where each split is after each part: `E` with the enumerator, `>0` on its way to reader 0,
`0` with that reader, which with `-` has said that it is idle, and with `.` that it is at its end; behind it the error by
which the part ended. `kept`: the same of snapshots, with the positions. `rows`, at the end, as something behind the source
counts them that is restored with it. `told`: positions that the outside was told last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    id: str
    what: str
    steps: str
    where: str
    rows: str = ""
    told: str = ""
    kept: dict[int, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """readers (2), splits_max (1), owned, bounded, on_data_loss ("fail")."""


SPLITS = (
    Case("Z30", "what was found waits until a reader asks", "+a1 find | hand get | go", "E a | E a | 0 a, 1 -", "a0"),
    Case(
        "Z31",
        "a request that comes again is no second one",
        "+a1 +b1 +c1 find ask ask hand | ask hand",
        "E c, >0 a, >1 b | E c, >0 a, >1 b",
    ),
    Case(
        "Z32", "assigned in front of a barrier: the reader's", "+a2 find ask hand ck crash go", "0 a, 1 -", "a0-1", kept={1: "0 a"}
    ),
    Case(
        "Z33",
        "assigned behind a barrier: the enumerator's",
        "+a2 find cut ask hand ack | done1 crash | go",
        ">0 a | E a | 0 a, 1 -",
        "a0-1",
        kept={1: "E a"},
    ),
    Case(
        "Z34", "on its way when the first attempt ends: found again", "+a2 find ask hand cut crash | find go", " | 0 a, 1 -", "a0-1"
    ),
    Case(
        "Z35", "a reader fails behind its snapshot", "+a3 find go ck +a2 go crash | go", "0 a | 0 a, 1 -", "a0-4", "a3", {1: "0 a3"}
    ),
    Case(
        "Z36",
        "a reader fails in front of its snapshot, the other behind its own",
        "+a3 +b3 find go ck +a2 +b2 go cut ack0 crash | go",
        "0 a, 1 b | 0 a, 1 b",
        "a0-4 b0-4",
        "a3 b3",
        {1: "0 a3, 1 b3"},
    ),
    Case(
        "Z37",
        "a fetch fails that has taken its rows",
        "+a3 find go ck +a3 break go | crash go",
        "0 a, 1 - OSError | 0 a, 1 -",
        "a0-5",
        "a3",
    ),
    Case(
        "Z38",
        "restored with fewer readers",
        "+a2 +b2 +c2 +d2 find go ck crash*1 | go ck",
        "E c d, 0 a b | E c d, 0 a b",
        "a0-1 b0-1",
        "a2 b2",
        {1: "E c d, 0 a2, 1 b2", 2: "E c d, 0 a2 b2"},
    ),
    Case(
        "Z39",
        "restored with as many: each keeps its own",
        "+a2 +b2 find go end:a go ck crash | +b1 go",
        "1 b | 0 -, 1 b",
        "a0-1 b0-2",
        "a2 b2",
        {1: "1 b2"},
    ),
    Case(
        "Z40",
        "restored with more: those that have none get what waits",
        "+a2 +b2 +c2 find go ck crash*3 | go ck",
        "E c, 0 a, 1 b | 0 a, 1 b, 2 c",
        "a0-1 b0-1 c0-1",
        "a2 b2 c2",
        {2: "0 a2, 1 b2, 2 c2"},
    ),
    Case(
        "Z41",
        "from two to three to one, with splits that have owners",
        "+a1 +b1 +c1 find cut go ack done1 crash*3 | go ck crash*1 | +b1 go ck",
        "E a b c | 0 a b c | 0 a b c",
        "a0 b0-1 c0",
        "a1 b2 c1",
        {1: "E a b c", 2: "0 a1, 1 b1, 2 c1", 3: "0 a1 b2 c1"},
        {"owned": True},
    ),
    Case(
        "Z42",
        "finished in front of a barrier: not found again",
        "+a2 end:a find go ck crash | find go",
        " | 0 -, 1 -",
        "a0-1",
        "a2",
        {1: ""},
    ),
    Case(
        "Z43",
        "finished behind a barrier: read on from there",
        "+a2 find go ck +a1 end:a go | crash go",
        "0 -, 1 - | 0 -, 1 -",
        "a0-2",
        "a2",
        {1: "0 a2"},
    ),
    Case("Z44", "a discovery finds the same again", "+a1 find find | go find", "E a | 0 a, 1 -", "a0"),
    Case("Z45", "a discovery finds none, the next one some", "find | +a1 find", " | E a"),
    Case(
        "Z46", "a discovery fails behind the first: the next one finds what is new", "+a1 find fail +b1 find | find", "E a | E a b"
    ),
    Case("Z47", "ten in a row", "+a1 find fail10 find find find find find find find find find | find", "E a | E a OSError"),
    Case("Z48", "the first one fails", "+a1 fail find", "OSError"),
    Case(
        "Z49", "a split that is found while it waits, by a connector that forgets", "+a1 find twice find", "E a InvalidSplitError a"
    ),
    Case(
        "Z50",
        "readers have as many as they ask for, and another behind each that ends",
        "+a1 +b1 +c1 +d1 +e1 find go | end:b go",
        "E e, 0 a c, 1 b d | 0 a c, 1 d e",
        "a0 b0 c0 d0 e0",
        options={"splits_max": 2},
    ),
    Case("Z51", "nothing is told before a checkpoint is complete", "+a3 find go cut ack", "0 a, 1 -", "a0-2", kept={1: "0 a3"}),
    Case(
        "Z52",
        "of the last complete one, whatever came since",
        "+a3 find go ck +a2 go cut ack",
        "0 a, 1 -",
        "a0-4",
        "a3",
        {2: "0 a5"},
    ),
    Case("Z53", "of an aborted one nothing", "+a3 find go ck +a2 go cut ack abort2", "0 a, 1 -", "a0-4", "a3"),
    Case(
        "Z54",
        "and what finished in front of it is told with the next",
        "+a3 end:a find go cut ack abort1 ck",
        "0 -, 1 -",
        "a0-2",
        "a3",
        {2: ""},
    ),
    Case(
        "Z55",
        "an older notice behind a newer one changes nothing",
        "+a3 find go cut ack +a2 go cut ack done2 done1",
        "0 a, 1 -",
        "a0-4",
        "a5",
    ),
    Case("Z56", "a notice that was lost: told at the restore", "+a3 find go cut ack from1", "0 a", "a0-2", "a3"),
    Case("Z57", "of a plain savepoint nothing", "+a3 find go save", "0 a, 1 -", "a0-2", kept={1: "0 a3"}),
    Case(
        "Z58",
        "a savepoint restored beside the job: each has all splits",
        "+a3 +b1 find go save @y from-x1*1 | +a2 go ck | @x go ck",
        "0 a b | 0 a b | 0 a, 1 b",
        "a0-4 b0",
        "a5 b1",
    ),
    Case(
        "Z59",
        "rows are gone in front of the position: nothing to it",
        "+a5 find go ck lose:a5 +a1 crash go",
        "0 a, 1 -",
        "a0-5",
        "a5",
    ),
    Case(
        "Z60",
        "rows are gone behind it: refused by name",
        "+a5 find go ck +a3 lose:a6 crash | go",
        "0 a | 0 a SourceDataLostError a5",
        "a0-4",
        "a5",
    ),
    Case(
        "Z61",
        "or left out, by policy",
        "+a5 find go ck +a3 lose:a6 crash go ck",
        "0 a, 1 -",
        "a0-4,6-7",
        "a8",
        {2: "0 a8"},
        {"on_data_loss": "earliest"},
    ),
    Case(
        "Z62",
        "a reader without a split is idle, takes part in checkpoints, and comes back",
        "+a1 find go ck | +b1 find go",
        "0 a, 1 - | 0 a, 1 b",
        "a0 b0",
        "a1",
        {1: "0 a1"},
    ),
    Case(
        "Z63",
        "one discovery finds all: the readers end, and do again behind a restore",
        "+a1 +b1 +c1 end:a end:b end:c find go ck | crash go",
        "0 ., 1 . | 0 ., 1 .",
        "a0 b0 c0",
        "a1 b1 c1",
        {1: ""},
        {"bounded": True},
    ),
    Case(
        "Z64",
        "the enumerator's state lacks a split that the reader has",
        "+a1 find go ck +b1 find go ck mix1-2 | find ask hand get",
        "0 a b | 0 a b InvalidSplitError b",
        "a0 b0",
        "a1 b1",
        options={"readers": 1, "splits_max": 3},
    ),
)
