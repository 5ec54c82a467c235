"""A pipeline of the user's own as a workload: `FILE.py:function` or `module:function`.

The function gets an Environment and builds its job on it, with settings of its own if it likes (`env.parallelism`, `env.config`),
or returns an Environment that it made. It is called for every submission, as by a driver, with the module as it was imported here.
The job travels by value: each simulated worker process unpickles classes and globals of its own, imports the user's modules again,
and loses them when it dies (pipelines/modules.py). Installed packages are shared.
Its output is compared with that of the same job without failures, or judged by `hf.chaos.expect` (campaign/user_runs.py).
The job's settings are kept, but a job without periodic checkpoints, or with the default interval, gets one each second: without
checkpoints there is nothing to prove. All paths of sinks are paths in the simulated store; no file is written to them."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import cloudpickle
import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph, Partitioning
from holdfast.chaos.expectations import Expectation, collecting, of_function
from holdfast.chaos.pipelines.modules import importable
from holdfast.chaos.pipelines.rows import UserSink, sink_rows
from holdfast.chaos.workloads.scenario import Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX
from holdfast.operators.base import JobPlan, Source
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.pipelines import build_environment, load_function, refused
from holdfast.operators.datastream.unpicklable import check_pickled_states
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.dataframe import SparkSource
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.sources.parquet import ParquetSource
from holdfast.operators.spark.packaging import user_modules
from holdfast.statebackends.errors import InvalidConfigError

WHAT = "workload"
"""The pipeline's name in errors."""

CHECKPOINT_INTERVAL_MS = 1_000
"""Checkpoint interval of a job without one, ms."""

PARALLELISM = 2
"""Parallelism of the function's Environment."""

ROWS_MAX = 1_000_000
"""Most records of a job; one with more is stopped."""

_ROW_KINDS = frozenset({"map", "filter", "flat_map", "map_batches", "process", "window", "aggregate"})


def load_workload(name: str) -> Workload:
    """The pipeline `FILE.py:function` or `module:function`.

    Raises InvalidConfigError naming the problem: no such file, module or function, a function that can't be called with one
    Environment, a graph that can't be built, no sink with committed output, or a source that needs Spark."""
    known = set(sys.modules)
    with collecting() as said:
        function, module = load_function(name, WHAT)
    if said:
        raise _refused(name, "expect() outside of a pipeline's function: call it inside, or write it as the decorator above")
    _pickle_by_value(module, known)
    _scenario(function, name)  # problems of the job are reported here, not by the first seed
    meaning = (inspect.getdoc(function) or "a pipeline of your own").splitlines()[0]
    return Workload(name, meaning, partial(_make, function, name))


def _pickle_by_value(module: ModuleType, known: set[str]) -> None:
    """Pickle what a pipeline's module defines, and what it imports of the user's other modules, by value, as on a cluster: each
    process that unpickles it gets its own."""
    for each in (module, *(each for each in user_modules() if each.__name__ not in known)):
        if each.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(each)
    importable(module)


def _make(function: Callable[[Any], Any], name: str, rng: random.Random) -> Scenario:
    """The same job for every seed, which draws faults alone."""
    return _scenario(function, name)


def _scenario(function: Callable[[Any], Any], name: str) -> Scenario:
    with collecting() as said:
        environment = _built(function, name, None)
    plan = _plan_of(environment, name)
    _check_sources(plan, name)
    sinks = _sinks(environment, plan, (*of_function(function), *said), name)
    if not sinks:
        raise _refused(name, "no sink has committed output to compare: end a stream with sink_to(hf.ParquetSink(...))")
    records = sum(source.rows for source in plan.sources.values() if isinstance(source, GeneratorSource))
    return Scenario(
        plan=lambda parallelism: _plan_of(_built(function, name, parallelism), name),
        records=records,
        sinks=sinks,
        operators=tuple(
            operator.uid for vertex in plan.graph.vertices for operator in vertex.operators if operator.kind in _ROW_KINDS
        ),
        may_rescale=_may_rescale(plan),
        may_drain=not any(_fires_early(plan.graph)),
        bounded=records <= ROWS_MAX,
        user_modules=frozenset(cloudpickle.list_registry_pickle_by_value()),
    )


def _sinks(environment: Environment, plan: JobPlan, said: tuple[Expectation, ...], name: str) -> tuple[SinkExpectation, ...]:
    """Sinks with committed output, each with its expectations.

    Raises InvalidConfigError for an expectation about a sink or a column that does not exist."""
    found = [sink for sink in environment.sinks if isinstance(sink, ParquetSink)]
    for each in said:
        if each.sink is not None and each.sink not in {sink.sink_id for sink in found}:
            known = ", ".join(sorted(sink.sink_id for sink in found)) or "none"
            raise _refused(name, f"expect(): there is no sink {each.sink!r} with committed output; sinks are {known}")
    return tuple(_sink(sink, plan, said, name) for sink in found)


def _sink(sink: ParquetSink, plan: JobPlan, said: tuple[Expectation, ...], name: str) -> SinkExpectation:
    schema = sink.schema
    assert schema is not None  # the job is built
    columns = tuple(schema.names)
    mine = tuple(each for each in said if each.sink in (None, sink.sink_id))
    for each in mine:
        for column in (*each.last_value_per_key, *each.ignore_columns):
            if column not in columns:
                raise _refused(name, f"expect(): sink {sink.sink_id!r} has no column {column!r}; it has {', '.join(columns)}")
    user = UserSink(sink.sink_id, sink_rows(plan, sink.sink_id, columns), schema, mine)
    return SinkExpectation(sink.path, sink.sink_id, rows=None, user=user)


def _built(function: Callable[[Any], Any], name: str, parallelism: int | None) -> Environment:
    return build_environment(function, name, WHAT, parallelism=parallelism, default_parallelism=PARALLELISM)


def _plan_of(environment: Environment, name: str) -> JobPlan:
    config: JobConfig = environment.config
    if config.checkpoint_interval_ms in (None, JobConfig().checkpoint_interval_ms):
        environment.config = msgspec.structs.replace(config, checkpoint_interval_ms=CHECKPOINT_INTERVAL_MS)
    try:
        plan = environment.build()
        check_pickled_states(plan)
        return plan
    except InvalidConfigError as error:
        raise _refused(name, str(error)) from error


def _check_sources(plan: JobPlan, name: str) -> None:
    for uid, source in sorted(plan.sources.items()):
        if isinstance(source, SparkSource):
            raise _refused(name, f"source {uid!r} is a Spark DataFrame, and there is no Spark here: read Parquet, or generate rows")


def _may_rescale(plan: JobPlan) -> bool:
    """Whether its sources can be redistributed, its max parallelism leaves room, and it has no broadcast, whose copies are as many
    as the subtasks."""
    striped: tuple[type[Source], ...] = (GeneratorSource, ParquetSource)
    return (
        all(isinstance(source, striped) for source in plan.sources.values())
        and all(vertex.max_parallelism in (1, max(PARALLELISM_MAX, vertex.max_parallelism)) for vertex in plan.graph.vertices)
        and not any(edge.partitioning is Partitioning.BROADCAST for edge in plan.graph.edges)
    )


def _fires_early(graph: JobGraph) -> list[str]:
    """Uids of operators whose windows or timers a drain would fire before their time."""
    return [
        operator.uid
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.kind == "window" or operator.properties.get("timers")
    ]


def _refused(name: str, reason: str) -> InvalidConfigError:
    return refused(name, WHAT, reason)
