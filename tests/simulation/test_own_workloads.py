"""A user's own pipeline as a workload: how it is found, built and refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cloudpickle
import msgspec
import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.checkers.oracle import counted
from holdfast.chaos.cluster.worker_host import BACKEND_SETTINGS
from holdfast.chaos.cluster.world import FAILURES_MAX, RunRequest
from holdfast.chaos.workloads import find_workload
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.operators.sources.dataframe import DataFrameSource
from holdfast.operators.task.restore import StateLoader
from holdfast.operators.worker.main import pickle_plan
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.settings import StateBackendSettings
from tests.simulation.workload_runs import Run

PIPELINE = '''
import pyarrow as pa
import holdfast as hf

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64())])
SEEN = []


def make_batch(indices):
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % 3)], schema=SCHEMA)


def remember(row):
    SEEN.append(row["i"])
    return {**row, "i": row["i"] * 2}


def numbers(env):
    return env.from_source(hf.GeneratorSource(make_batch, 120, SCHEMA, 400)).map(remember, returns=SCHEMA).uid("remember")


def build(env):
    """Doubles numbers."""
    numbers(env).sink_to(hf.ParquetSink("/out/mine"), uid="mine")


def windows(env):
    stream = numbers(env).assign_timestamps("i", max_out_of_orderness_ms=0).key_by("key")
    stream.window(hf.Tumbling(milliseconds=50)).aggregate(n=hf.count()).sink_to(hf.ParquetSink("/out/w"))
    stream.sink_to(hf.Blackhole())


def copies(env):
    numbers(env).broadcast().map(remember, returns=SCHEMA).sink_to(hf.ParquetSink("/out/copies"))


def own(env):
    mine = hf.Environment("mine", parallelism=3, checkpoint_interval_ms=250)
    build(mine)
    return mine


def tuned(env):
    own = hf.RocksDBConfig(cache_bytes_max=0, block_cache_bytes=1 << 20)
    mine = hf.Environment("tuned", parallelism=2, checkpoint_interval_ms=100, state_backend="rocksdb", rocksdb=own)
    windows(mine)
    return mine


def no_argument():
    pass


def no_sink(env):
    numbers(env)


def uncommitted(env):
    numbers(env).sink_to(hf.Blackhole())


def raises(env):
    raise RuntimeError("no such thing")


def unlucky(row):
    raise ValueError("no such luck")


def failing(env):
    numbers(env).map(unlucky, returns=SCHEMA).uid("unlucky").sink_to(hf.ParquetSink("/out/never"))


def unknown_column(env):
    numbers(env).key_by("kee")


def endless(env):
    env.from_source(hf.GeneratorSource(make_batch, 2**50, SCHEMA, 400)).sink_to(hf.ParquetSink("/out/mine"))


class Box:
    pass


class Boxes(hf.ProcessFunction):
    boxes = hf.ListStateDescriptor("boxes", hf.Pickled[Box])
    states = (boxes,)

    def process_element(self, row, ctx, out):
        ctx.state(self.boxes).add(Box())
        out(row)


def pickled(env):
    numbers(env).key_by("key").process(Boxes(), returns=SCHEMA).uid("box").sink_to(hf.ParquetSink("/out/boxes"))


not_a_function = 3
'''


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "my_pipeline.py"
    path.write_text(PIPELINE)
    return path


def scenario_of(pipeline: Path, function: str) -> Scenario:
    return find_workload(f"{pipeline}:{function}").make(random.Random(1))


def test_a_function_of_a_file_is_a_workload(pipeline: Path) -> None:
    workload = find_workload(f"{pipeline}:build")
    assert (workload.name, workload.meaning) == (f"{pipeline}:build", "Doubles numbers.")
    scenario = workload.make(random.Random(1))
    assert [(sink.path, sink.sink_id, sink.rows) for sink in scenario.sinks] == [("/out/mine", "mine", None)]
    assert (scenario.records, scenario.operators, scenario.bounded) == (120, ("remember",), True)
    assert (scenario.may_rescale, scenario.may_drain) == (True, True)
    graph = scenario.plan(None).graph
    assert graph.config.checkpoint_interval_ms == 1_000
    assert graph.slots_required == 2
    assert scenario.plan(4).graph.slots_required == 4


def test_it_runs_over_a_crash_and_its_globals_die_with_the_process(pipeline: Path, tmp_path: Path) -> None:
    scenario = scenario_of(pipeline, "build")
    run = Run(scenario, 1, tmp_path)
    run.start()
    run.go_on(1)
    run.crash_in_the_middle()
    run.finish()
    (sink,) = scenario.sinks
    rows = counted(run.output(sink).files, sink)
    assert rows == {(2 * i, i % 3): 1 for i in range(120)}
    function = cloudpickle.loads(pickle_plan(run.plan)).operators["remember"].function
    assert function.__globals__["SEEN"] == []


def test_a_function_may_make_its_own_environment(pipeline: Path) -> None:
    scenario = scenario_of(pipeline, "own")
    assert scenario.plan(None).graph.config.checkpoint_interval_ms == 250
    assert scenario.plan(None).graph.slots_required == 3
    assert scenario.plan(1).graph.slots_required == 1


def test_windows_are_not_drained_and_broadcasts_not_rescaled(pipeline: Path) -> None:
    windows, copies = scenario_of(pipeline, "windows"), scenario_of(pipeline, "copies")
    assert (windows.may_drain, windows.may_rescale) == (False, True)
    assert (copies.may_drain, copies.may_rescale) == (True, False)
    assert [sink.path for sink in windows.sinks] == ["/out/w"]


def test_a_job_that_does_not_end_is_not_awaited(pipeline: Path) -> None:
    assert not scenario_of(pipeline, "endless").bounded


def test_a_job_that_always_fails_by_itself_is_told_soon_and_why(pipeline: Path) -> None:
    result = run_seed(RunRequest(seed=0, workload=f"{pipeline}:failing")).result
    (violation,) = result.violations
    assert violation.invariant == "I30"
    assert violation.message.startswith(f"without any fault each of {FAILURES_MAX + 1} attempts failed, the last one: ")
    assert "ValueError: no such luck" in violation.message
    assert (result.plan, result.steps < 20_000) == ((), True)


def test_settings_of_rocksdb_are_the_jobs_but_for_those_by_which_a_run_would_not_repeat(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[StateBackendSettings] = set()
    load = StateLoader.load

    def watch(loader: StateLoader) -> Callable[[], None]:
        seen.add(loader._settings)
        return load(loader)

    monkeypatch.setattr(StateLoader, "load", watch)
    request = RunRequest(seed=1, workload=f"{pipeline}:tuned", plan=())
    first, second = run_seed(request), run_seed(request)
    (settings,) = seen
    rocksdb = msgspec.structs.replace(BACKEND_SETTINGS.rocksdb, cache_bytes_max=0, block_cache_bytes=1 << 20)
    assert settings == replace(BACKEND_SETTINGS, rocksdb=rocksdb)
    assert (first.result.violations, first.result.backend) == ((), "rocksdb")
    assert list(first.trace.lines()) == list(second.trace.lines())


def test_a_module_is_found_by_name(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipeline.parent)
    assert find_workload("my_pipeline:build").make(random.Random(1)).records == 120


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("missing", "has no function 'missing'"),
        ("not_a_function", "has no function 'not_a_function'"),
        ("no_argument", "must take one argument, the Environment: too many positional arguments"),
        ("no_sink", "the job has no sink"),
        ("uncommitted", "no sink has committed output to compare"),
        ("pickled", "state 'boxes' is declared Pickled, and Box in it is a class of the program itself"),
        ("raises", "the function raised RuntimeError: no such thing"),
        ("unknown_column", "there is no column 'kee'; available: i, key"),
    ],
)
def test_a_pipeline_that_can_not_run_is_refused_with_the_reason(pipeline: Path, function: str, reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason) as refused:
        find_workload(f"{pipeline}:{function}")
    assert f"{pipeline.name}:{function}" in str(refused.value)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"there is no file .*nowhere\.py"):
        find_workload(f"{tmp_path}/nowhere.py:build")
    (tmp_path / "broken_pipeline.py").write_text("def build(env:\n")
    with pytest.raises(InvalidConfigError, match=r"broken_pipeline\.py can't be imported: SyntaxError"):
        find_workload(f"{tmp_path}/broken_pipeline.py:build")
    with pytest.raises(InvalidConfigError, match="no_such_module can't be imported: ModuleNotFoundError"):
        find_workload("no_such_module:build")


def test_a_source_that_needs_spark_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: DataFrameSource) -> None:
        import pyarrow as pa

        self.name, self.manifest_path, self._schema = "dataframe", "", pa.schema([("i", pa.int64())])
        self._dataframe, self.rows_per_second = None, None

    monkeypatch.setattr(DataFrameSource, "__init__", init)
    (tmp_path / "spark_pipeline.py").write_text(
        "import holdfast as hf\n"
        "def build(env):\n"
        "    env.from_source(hf.DataFrameSource()).uid('flights').sink_to(hf.ParquetSink('/out/x'))\n"
    )
    with pytest.raises(InvalidConfigError, match="source 'flights' is a Spark DataFrame, and there is no Spark here"):
        find_workload(f"{tmp_path}/spark_pipeline.py:build")
