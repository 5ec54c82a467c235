"""A whole job whose state expires: the clock that decides is the cluster's, and a run repeats itself."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.checkers.oracle import counted
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.workloads import find_workload
from holdfast.statebackends.factory import BACKEND_KINDS, BackendKind
from tests.examples import crossed
from tests.simulation.workload_runs import Run

PIPELINE = '''
import pyarrow as pa
import holdfast as hf

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64())])


def make_batch(indices):
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % 3)], schema=SCHEMA)


class First(hf.ProcessFunction):
    """Passes on what hasn't been seen for 100 ms."""

    seen = hf.ValueStateDescriptor("seen", bool, hf.Ttl(100))
    states = (seen,)
    returns = SCHEMA

    def process_element(self, row, ctx, out):
        seen = ctx.state(self.seen)
        if seen.value() is None:
            seen.update(True)
            out(row)


def build(env):
    numbers = env.from_source(hf.GeneratorSource(make_batch, 600, SCHEMA, 400))
    numbers.key_by("key").process(First()).uid("first").sink_to(hf.ParquetSink("/out/first"), uid="sink")
'''


LASTING = '''

class Counts(hf.ProcessFunction):
    """State with a TTL that no simulated job lives to see, so that its output depends on nothing but the input."""

    ttl = hf.Ttl(10**9, update="read")
    count = hf.ValueStateDescriptor("count", int, ttl)
    last = hf.ListStateDescriptor("last", int, ttl)
    seen = hf.MapStateDescriptor("seen", int, int, ttl)
    total = hf.ReducingStateDescriptor("total", int, lambda left, right: left + right, ttl)
    states = (count, last, seen, total)
    returns = SCHEMA

    def process_element(self, row, ctx, out):
        count, last, seen = ctx.state(self.count), ctx.state(self.last), ctx.state(self.seen)
        count.update(count.value(0) + 1)
        last.update([*last.get()[-3:], row["i"]])
        seen.put(row["i"] % 5, seen.get(row["i"] % 5, 0) + 1)
        ctx.state(self.total).add(1)
        counted = {count.value(), sum(seen.values()), ctx.state(self.total).get()}
        if len(counted) == 1 and len(last.get()) == min(count.value(), 4):  # in whatever order the records come
            out({"i": count.value(), "key": row["key"]})


def lasting(env):
    numbers = env.from_source(hf.GeneratorSource(make_batch, 300, SCHEMA, 400))
    numbers.key_by("key").process(Counts()).uid("counts").sink_to(hf.ParquetSink("/out/counts"), uid="sink")
'''


def output(pipeline: Path, folder: Path) -> Counter[tuple[int, ...]]:
    scenario = find_workload(f"{pipeline}:build").make(random.Random(1))
    run = Run(scenario, 7, folder)
    run.start()
    run.go_on(1)
    run.crash_in_the_middle(parallelism=3)
    run.finish()
    (sink,) = scenario.sinks
    return Counter(counted(run.output(sink).files, sink))


@pytest.mark.parametrize("backend", BACKEND_KINDS)
def test_state_expires_by_the_clock_of_the_simulation_also_over_a_crash(tmp_path: Path, backend: BackendKind) -> None:
    pipeline = tmp_path / "ttl_pipeline.py"
    own = f'hf.Environment("ttl", parallelism=2, state_backend="{backend}")'
    job = PIPELINE.replace("def build(env):", f"def build(env):\n    env = {own}")
    pipeline.write_text(job + "    return env\n")
    first, again = (output(pipeline, tmp_path / name) for name in ("one", "two"))
    assert first == again
    assert set(first.values()) == {1}
    emitted = Counter(key for _, key in first)
    assert emitted.keys() == {0, 1, 2}
    # 600 records at 400 a second: 1.5 s, so that each key is new every 100 ms; once if no time passed at all
    assert all(5 <= count <= 16 for count in emitted.values()), emitted


@pytest.mark.parametrize(("backend", "seed"), crossed(["filesystem", "rocksdb"], range(3)))
def test_state_with_a_ttl_is_exact_under_faults(tmp_path: Path, backend: str, seed: int) -> None:
    pipeline = tmp_path / "lasting_pipeline.py"
    pipeline.write_text(PIPELINE + LASTING)
    result = run_seed(RunRequest(seed, f"{pipeline}:lasting", backend=backend)).result
    assert result.violations == ()
    assert result.ended == "FINISHED"
