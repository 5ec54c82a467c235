"""The environment hands a plan and its options to a launcher, and nothing before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from operators.base import JobPlan
from operators.environment import Environment
from operators.launcher import JobHandle, LaunchOptions
from statebackends.errors import GraphError, JobExistsError
from tests.operators.ends import NamedSink, NamedSource


class Recorder:
    """A launcher that launches nothing."""

    def __init__(self) -> None:
        self.launched: list[tuple[JobPlan, LaunchOptions]] = []

    def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
        self.launched.append((plan, options))
        handle: Any = "handle"
        return handle


def test_execute_passes_plan_and_options_on() -> None:
    launcher = Recorder()
    env = Environment("job", coordinator="http://host:1", token="t", state_dir="/state", launcher=launcher)
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    assert env.execute(restore="latest", allow_non_restored_state=True, progress=False) == "handle"  # type: ignore[comparison-overlap]
    plan, options = launcher.launched[0]
    assert plan.graph.name == "job"
    assert options == LaunchOptions(
        restore="latest",
        allow_non_restored_state=True,
        coordinator_url="http://host:1",
        token="t",
        state_directory="/state",
        progress=False,
    )
    assert [sink.sink_id for sink in env.sinks] == ["out"]


def test_a_refused_job_shows_the_users_line_and_not_ours() -> None:
    class Refuser:
        def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
            raise JobExistsError("job 'job' has ended")

    env = Environment("job", launcher=Refuser())
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    with pytest.raises(JobExistsError) as caught:
        env.execute()
    assert [entry.name for entry in caught.traceback][1:] == ["execute"]


def test_a_graph_that_is_wrong_is_not_launched() -> None:
    launcher = Recorder()
    env = Environment("job", launcher=launcher)
    env.from_source(NamedSource())
    with pytest.raises(GraphError):
        env.execute()
    assert launcher.launched == []


def test_from_parquet_declares_the_columns_of_the_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "f.parquet")
    stream = Environment("job").from_parquet(str(tmp_path), rows_per_second=10, name="files")
    assert stream.schema is not None
    assert stream.schema.names == ["a", "b"]
    assert stream._own("test").name == "files"
