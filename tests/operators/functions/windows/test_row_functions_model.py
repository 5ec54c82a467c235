"""Windows of row functions against a plain model, as whole jobs: lateness, merges, crashes, restarts at another parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from tests.examples import examples
from tests.operators.functions.windows.row_windows import ROWS, Seen

SIZE, SLIDE, GAP = 10, 4, 6
ASSIGNERS: dict[str, Any] = {
    "tumbling": hf.Tumbling(SIZE, offset=3),
    "sliding": hf.Sliding(SIZE, slide=SLIDE),
    "session": hf.Session(GAP),
}


@dataclass
class Model:
    """Windows of all keys, as a list; the words of the rules, and no state but this."""

    kind: str
    lateness: int
    watermark: int = -(10**9)
    open: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    fired: set[tuple[str, int, int]] = field(default_factory=set)
    results: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    late: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, key: str, at: int) -> None:
        entered = False
        for start, end in self._windows(key, at):
            if end - 1 + self.lateness <= self.watermark:
                continue
            entered = True
            self._merge(key, start, end)
            self.open.setdefault((key, start, end), []).append(at)
            if end - 1 <= self.watermark:
                self._fire(key, start, end)
        if not entered:
            self.late[key, at] += 1

    def _windows(self, key: str, at: int) -> list[tuple[int, int]]:
        match self.kind:
            case "tumbling":
                return [(start, start + SIZE) for start in range(at - SIZE + 1, at + 1) if (start - 3) % SIZE == 0]
            case "sliding":
                return [(start, start + SIZE) for start in range(at - SIZE + 1, at + 1) if start % SLIDE == 0]
        start, end = at, at + GAP
        while beyond := [w for w in self.open if w[0] == key and w[1] <= end and w[2] >= start and (w[1] < start or w[2] > end)]:
            start, end = min(start, beyond[0][1]), max(end, beyond[0][2])
        return [(start, end)]

    def _merge(self, key: str, start: int, end: int) -> None:
        if self.kind != "session":
            return
        inside = sorted(window for window in self.open if window[0] == key and start <= window[1] <= window[2] <= end)
        rows = [at for window in inside for at in self.open.pop(window)]
        if rows:
            self.open[key, start, end] = rows

    def _fire(self, key: str, start: int, end: int) -> None:
        self.results[key, start, end, len(self.open[key, start, end])] += 1

    def advance(self, watermark: int) -> None:
        before, self.watermark = self.watermark, max(self.watermark, watermark)
        for window in sorted(self.open):
            if before < window[2] - 1 <= self.watermark:
                self._fire(*window)
        self.open = {window: rows for window, rows in self.open.items() if window[2] - 1 + self.lateness > self.watermark}


RECORDS = st.tuples(st.sampled_from("abc"), st.integers(0, 60))
ACTIONS = st.lists(
    st.one_of(RECORDS, RECORDS, RECORDS, st.integers(0, 70), st.sampled_from(["checkpoint", "fail", "restart 1", "restart 3"])),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
@pytest.mark.parametrize("kind", ASSIGNERS)
@settings(max_examples=examples(6), deadline=None)
@given(actions=ACTIONS, lateness=st.sampled_from([0, 5, 1000]), batch_rows=st.sampled_from([1, 7, 65_536]))
def test_windows_are_those_of_the_model(kind: str, backend: Any, actions: list[Any], lateness: int, batch_rows: int) -> None:
    model = Model(kind, lateness)
    subtasks = 1
    with hf.testing.Job(parallelism=1, state_backend=backend, batch_rows=batch_rows) as job:
        feed = job.input("events", ROWS)
        windowed = feed.stream.key_by("key").window(ASSIGNERS[kind]).allowed_lateness(lateness).side_output_late("late")
        made = windowed.process(Seen()).uid("windows")
        out, late = job.output(made), job.output(made.side_output("late"), "late")
        job.start()
        for action in actions:
            match action:
                case (key, at):
                    feed.add([{"key": key, "at": at}], at=at)
                    model.add(key, at)
                case int(watermark):
                    if watermark > model.watermark:
                        feed.watermark(watermark)
                        model.advance(watermark)
                case "checkpoint":
                    job.checkpoint()
                case "fail":
                    if subtasks > 1:  # what several subtasks read again may come in another order, and be late or not
                        job.checkpoint()
                    job.fail()
                case restart:
                    subtasks = int(restart[-1])
                    job.checkpoint()
                    job.restart(parallelism=subtasks)
        feed.end()
        model.advance(10**9)
        found = Counter((row["key"], row["start"], row["end"], len(row["ats"])) for row, _ in out.committed())
        assert (found, Counter((row["key"], row["at"]) for row, _ in late.committed())) == (model.results, model.late)
