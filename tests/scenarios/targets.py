"""Scenario groups Q (sinks) and Z (positions), on a `StagedSink` in front of a target, as data.

Steps: `+2` two rows, which are numbered 0, 1, 2 ... as a source reads them; `snap` the next checkpoint is taken and completed,
`done1` the sink hears of it; `ck` both; `save` a plain savepoint; `abort` a checkpoint that is aborted; `stop` a stop with one.
`crash` the process dies, and the job comes back from its newest checkpoint; `from2` it starts from checkpoint or savepoint 2
instead, `fresh` without state; `from2!`, `fresh!` with `allow_output_repeat`. `again` the process that died last wakes up and hears
once more of what is complete.
`@y` a job in another state directory goes on from here, of the same name, `@z:b` of the name b; `from-x2` from snapshot 2 of x.
`mute` the next call takes effect, and has no answer; `deaf` the next calls have none and no effect, until the job gives up, `half`
those behind the next one; `empty` the target loses rows and position, `keep` and `backup` it goes back to what it was at `keep`;
`lose` staged files are gone; `later` a second goes by.
`|` parts steps: what is outside after each, in order; or the error by which the last of them ends, with what is outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    id: str
    what: str
    steps: str
    outside: str
    options: dict[str, Any] = field(default_factory=dict)


def _in_steps(rows: int) -> dict[str, Any]:
    return {"rows_per_commit": rows}


SINKS = (
    Case("Q01", "nothing is visible before a checkpoint is complete", "+1 snap +1", ""),
    Case("Q02", "rows in front of it are, once it is", "+1 snap +1 done1", "0"),
    Case("Q03", "all up to it, in the order of ids", "+1 snap +1 snap +1 snap done2", "0 1"),
    Case("Q04", "an older notice behind a newer one changes nothing", "+1 snap +1 snap done2 | done1", "0 1 | 0 1"),
    Case("Q05", "rows of an aborted checkpoint belong to the next one", "+1 abort +1 snap done2", "0 1"),
    Case("Q06", "the notice was lost: committed at the restore", "+1 snap | crash", " | 0"),
    Case("Q07", "a commit is repeated, and there once", "+1 ck | crash", "0 | 0"),
    Case("Q08", "rows behind the checkpoint are written again, and are there once", "+1 ck +1 crash | +1 ck", "0 | 0 1"),
    Case("Q09", "rows of no checkpoint are never seen", "+1 crash | +1 ck", " | 0"),
    Case(
        "Q10", "a commit that fails is tried again by the next attempt", "+1 snap deaf done1 | crash", "StorageUnavailableError | 0"
    ),
    Case("Q11", "no downtime is too long: nothing outside waits", "+1 save +1 crash | from1", " | 0"),
    Case("Q14", "no rows: no commit", "ck ck +1 ck", "0", {"commits": 1}),
    Case("Q15", "a plain savepoint commits nothing by itself", "+1 save | +1 ck", " | 0 1"),
    Case("Q16", "a stop with a savepoint commits all, and its restore nothing again", "+2 stop | from1", "0 1 | 0 1"),
    Case("Q17", "likewise without a drain, with a checkpoint before", "+1 ck +1 stop | from2 +1 ck", "0 1 | 0 1 2"),
    Case("Q19", "two jobs on one sink", "+1 ck | @y:b fresh", "0 | 0 FencedError"),
    Case("Q20", "an older checkpoint, refused", "+1 ck +1 ck | from1", "0 1 | 0 1 OutputMayRepeatError"),
    Case("Q20a", "an older checkpoint, allowed: rows behind it come again", "+1 ck +1 ck | from1! +1 ck", "0 1 | 0 1 1"),
    Case("Q21", "an answer that is lost: looked up, never taken for a failure", "+1 snap mute done1 | +1 ck", "0 | 0 1"),
    Case("Q21a", "likewise while the target is opened", "+1 snap mute crash", "0"),
)

POSITIONS = (
    Case("Z01", "two state directories, one name: the second is refused", "+1 ck | @y fresh", "0 | 0 FencedError"),
    Case("Z02", "also where the first has no rows yet", "+1 | @y fresh", " | FencedError"),
    Case("Z03", "also by its attempts, whatever their number", "+1 ck crash crash | @y fresh", "0 | 0 FencedError"),
    Case(
        "Z04",
        "and if it is allowed to, the first ends: no row passes for another's",
        "+1 ck +1 snap | @y fresh! +1 ck | @x done2",
        "0 | 0 0 | 0 0 FencedError",
    ),
    Case(
        "Z05", "a job goes on in a new state directory, from a stop", "+1 ck crash crash +1 stop | @y from-x2 +1 ck", "0 1 | 0 1 2"
    ),
    Case("Z06", "and there over restarts", "+1 ck crash +1 stop @y from-x2 | crash +1 ck crash +1 ck", "0 1 | 0 1 2 3"),
    Case("Z07", "the first state directory is behind it", "+1 ck +1 stop @y from-x2 +1 ck | @x crash", "0 1 2 | 0 1 2 FencedError"),
    Case(
        "Z08", "and may come back from a savepoint of the second", "+1 ck stop @y from-x2 +1 stop | @x from-y3 +1 ck", "0 1 | 0 1 2"
    ),
    Case(
        "Z09",
        "a savepoint with staged rows goes to an heir, and the job that took it ends",
        "+1 ck +2 save | @y:b from-x2 | @x +1 ck",
        "0 | 0 1 2 | 0 1 2 FencedError",
    ),
    Case("Z10", "a third job behind the heir", "+1 ck +1 save @y:b from-x2 | @z:c from-x2", "0 1 | 0 1 FencedError"),
    Case("Z11", "an attempt that wakes behind its successor", "+1 snap crash | again", "0 | 0 FencedError"),
    Case("Z12", "and behind its successor's next commit", "+1 snap crash +1 ck | again", "0 1 | 0 1 FencedError"),
    Case(
        "Z13",
        "gone back by mistake, and forward again: nothing lost, nothing twice",
        "+1 ck +1 ck from1! | from2 +1 ck",
        "0 1 | 0 1 2",
    ),
    Case(
        "Z14",
        "gone back, rows came again: the way forward would repeat them",
        "+1 ck +1 ck from1! +1 ck | from2",
        "0 1 1 | 0 1 1 OutputMayRepeatError",
    ),
    Case(
        "Z15",
        "gone back, failed over before the first checkpoint, and behind it",
        "+1 ck +1 ck from1! crash! +1 snap crash! | +1 ck",
        "0 1 1 | 0 1 1 2",
    ),
    Case(
        "Z16",
        "an attempt of a savepoint of a line that ended: its rows come, and no other's pass for them",
        "+1 ck +2 save crash +1 ck | from2!",
        "0 1 | 0 1 1 2",
    ),
    Case("Z17", "a fresh start over rows", "+1 ck | fresh", "0 | 0 OutputMayRepeatError"),
    Case("Z18", "a fresh start over rows, allowed", "+1 ck | fresh! +1 ck", "0 | 0 0"),
    Case("Z19", "a target that was emptied", "+1 ck ck empty | crash", " | CommitPositionLostError"),
    Case("Z20", "a target from a backup", "+1 ck keep +1 ck ck backup | crash", "0 | 0 CommitPositionLostError"),
    Case(
        "Z20a", "also where the state does not know yet that they were committed", "+1 ck empty | crash", " | CommittableLostError"
    ),
    Case("Z21", "a target that was emptied before its first row", "+1 empty | crash +1 ck", " | 0"),
    Case("Z22", "staged rows that are gone, and not committed", "+1 save lose | from1", " | CommittableLostError"),
    Case("Z23", "staged rows that are gone since they were committed, gone back", "+1 ck +1 ck | from2! +1 ck", "0 1 | 0 1 2"),
    Case("Z24", "a checkpoint in steps", "+5 snap done1", "0 1 2 3 4", _in_steps(2) | {"commits": 3}),
    Case("Z25", "and an answer lost in the middle", "+5 snap mute done1", "0 1 2 3 4", _in_steps(2)),
    Case(
        "Z26", "and given up in the middle", "+5 snap half done1 | crash", "0 1 StorageUnavailableError | 0 1 2 3 4", _in_steps(2)
    ),
    Case("Z27", "several checkpoints in one step", "+1 snap +1 snap +1 snap done3", "0 1 2", {"commits": 1}),
    Case(
        "Z28",
        "at an interval: what completes meanwhile is committed in one step",
        "+1 ck +1 ck +1 ck | later",
        "0 | 0 1 2",
        {"commit_interval_ms": 1_000, "commits": 2},
    ),
    Case("Z29", "at an interval, stopped: at once", "+1 ck +1 ck +1 stop", "0 1 2", {"commit_interval_ms": 1_000, "commits": 2}),
)
