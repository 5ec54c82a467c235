"""What may leave an operator behind its watermark, and where the records of windows may be."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np

from holdfast.barriers.elements import Batch, LatencyMarker, Watermark
from holdfast.chaos.cluster.forwarded import watch_watermarks
from holdfast.chaos.workloads import latecomers
from tests.operators.runtime import Bench, Recording


def stamped(*times: int) -> Batch:
    return Batch(rows=list(times), timestamps=np.array(times, np.int64))


def watched(**fields: Any) -> tuple[Bench, Recording, list[tuple[str, int, int]]]:
    head, found = Recording("a", []), list[tuple[str, int, int]]()
    bench = Bench([head, Recording("b", [])], channels=1, **fields)
    watch_watermarks(bench.subtask, lambda *fact: found.append(fact))
    return bench.started(), head, found


def test_a_row_behind_a_forwarded_watermark_is_found() -> None:
    bench, head, found = watched()
    bench.gate.offer(0, stamped(5, 11))
    bench.events(0, Watermark(10))
    bench.gate.offer(0, stamped(12))
    bench.run()
    assert found == []
    head.output.collect(stamped(11, 10))
    assert found == [("op0", 10, 10), ("op1", 10, 10)], "each operator of the chain has forwarded it"
    found.clear()
    head.output.collect_side("late", stamped(3))
    assert found == [("op0", 3, 10)]


def test_a_late_record_may_bring_rows_as_old_as_itself() -> None:
    bench, head, found = watched()
    bench.events(0, Watermark(10), LatencyMarker(1, "v", 0))
    bench.gate.offer(0, stamped(7, 20))
    bench.run()
    assert found == []
    head.output.collect(stamped(7, 9))
    assert found == []
    head.output.collect(stamped(6))
    assert found == [("op0", 6, 10), ("op1", 6, 10)]


def test_what_a_watermark_fires_leaves_in_front_of_it() -> None:
    bench, head, found = watched()

    def fire(watermark_ms: int) -> Any:
        head.output.collect(stamped(watermark_ms))
        yield

    head.fire = fire
    bench.events(0, Watermark(10))
    bench.run()
    bench.events(0, Watermark(20))
    bench.run()
    assert found == []


def test_each_latecomer_is_in_one_place() -> None:
    scenario = latecomers.make(random.Random(1))
    assert scenario.accounts is not None
    problem = scenario.accounts.problem
    numbers = [feed.first + index for feed in partial_feeds(problem) for index in range(feed.rows)]
    first, second, third, *rest = numbers
    results = [(0, 0, f"{first}"), (0, 0, f"{first} {second}"), (1, 0, " ".join(map(str, rest)))]
    late = [(third, 0, 0, 0)]
    assert problem({"results": results, "late": late}, 0) is None
    assert problem({"results": results}, 1) is None, "dropped, and counted"
    assert "1 records are in no result" in str(problem({"results": results}, 0))
    assert "1 are counted" in str(problem({"results": results, "late": late}, 1))
    assert f"the records [{second}]" in str(problem({"results": results, "late": [*late, (second, 0, 0, 0)]}, 0))
    assert "2 records are in no result" in str(problem({"results": [results[0], *results[2:]]}, 1)), "the last result counts"


def partial_feeds(problem: Any) -> Any:
    assert isinstance(problem, partial)
    return problem.args[0]
