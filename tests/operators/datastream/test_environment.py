"""The environment hands a plan and its options to a launcher, and nothing before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.barriers.jobgraph import JobConfig, RestartStrategy
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.launcher import JobHandle, LaunchOptions
from holdfast.operators.sinks.simple import Blackhole
from holdfast.statebackends.errors import GraphError, InvalidConfigError, JobExistsError
from tests.operators.ends import NamedSink, NamedSource


class Handle(str):
    """What can be referred to weakly, as a job's handle can."""


class Recorder:
    """A launcher that launches nothing."""

    def __init__(self) -> None:
        self.launched: list[tuple[JobPlan, LaunchOptions]] = []

    def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
        self.launched.append((plan, options))
        handle: Any = Handle("handle")
        return handle


def test_execute_passes_plan_and_options_on() -> None:
    launcher = Recorder()
    env = Environment("job", coordinator="http://host:1", token="t", ca="ca.pem", state_dir="/state", launcher=launcher)
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    assert env.execute(restore="latest", allow_non_restored_state=True, progress=False) == "handle"
    plan, options = launcher.launched[0]
    assert plan.graph.name == "job"
    assert options == LaunchOptions(
        restore="latest",
        allow_non_restored_state=True,
        coordinator_url="http://host:1",
        token="t",
        ca="ca.pem",
        state_directory="/state",
        progress=False,
    )
    assert [sink.sink_id for sink in env.sinks] == ["out"]


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (None, None),
        ("latest", "latest"),
        ("41", "41"),
        ("latest-readable", "latest-readable"),
        ("sp", "{cwd}/sp"),
        ("./latest", "{cwd}/latest"),
        (Path("41"), "{cwd}/41"),
        ("Latest", "{cwd}/Latest"),
        ("/savepoints/savepoint-7/", "/savepoints/savepoint-7"),
        ("savepoints/savepoint-7", "{cwd}/savepoints/savepoint-7"),
        ("./savepoint-7", "{cwd}/savepoint-7"),
        (Path("savepoint-7"), "{cwd}/savepoint-7"),
        ("file:///savepoints/a%20b", "/savepoints/a b"),
        ("s3://bucket/savepoint-7", "s3://bucket/savepoint-7"),
    ],
)
def test_a_snapshot_is_named_as_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, passed_on: str | None
) -> None:
    """As for a preflight: the coordinator's working directory is another one."""
    monkeypatch.chdir(tmp_path)
    for name in ("latest", "41", "sp"):
        (tmp_path / name).mkdir()  # what lies there changes nothing
    launcher = Recorder()
    env = Environment("job", launcher=launcher)
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    env.execute(restore=given)
    assert launcher.launched[0][1].restore == (passed_on and passed_on.format(cwd=tmp_path))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("checkpoint_intervall_ms", "did you mean 'checkpoint_interval_ms'"),
        ("checkpoint-interval-ms", "did you mean 'checkpoint_interval_ms'"),
        ("backend", "did you mean 'state_backend'"),
        ("paralelism", "did you mean 'parallelism'"),
        ("colour", "settings are "),
    ],
)
def test_an_unknown_setting_is_told_which_one_is_near(setting: str, said: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"there is no setting '{setting}'; {said}"):
        Environment("job", **{setting: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["none", RestartStrategy("none"), JobConfig(restart=RestartStrategy("none"))])
def test_a_restart_strategy_is_given_by_its_name(given: Any) -> None:
    env = Environment("job", config=given) if isinstance(given, JobConfig) else Environment("job", restart=given)
    assert env.config.restart == RestartStrategy("none")
    assert Environment("job").config.restart == RestartStrategy("exponential_delay", delay_ms=1_000, delay_max_ms=60_000)
    assert Environment("job", restart="fixed-delay").config.restart == RestartStrategy("fixed_delay")  # type: ignore[arg-type]


@pytest.mark.parametrize("restore", [5, b"/x", "", "/a\0b", Path("/a\0b")])
def test_what_names_no_snapshot_is_refused_here(restore: Any) -> None:
    env = Environment("job", launcher=Recorder())
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    with pytest.raises(InvalidConfigError, match=r"neither a text nor a path|is no path"):
        env.execute(restore=restore)


@pytest.mark.parametrize(
    ("options", "setting", "said"),
    [
        ({"restore": "/sp/savepoint-1", "fresh": True}, "fresh", "restore= and fresh=True exclude each other"),
        ({"restore": "/sp/savepoint-1", "fresh": True, "branch": "b", "mute": True}, "fresh", "exclude each other"),
        ({"without_channel_state": "x"}, "without_channel_state", "must be the id of a snapshot, .* got 'x'"),
        ({"without_channel_state": 0}, "without_channel_state", "must be the id of a snapshot"),
        ({"without_channel_state": True}, "without_channel_state", "must be the id of a snapshot"),
        ({"fresh": "yes"}, "fresh", "must be True or False, got 'yes'"),
        ({"allow_output_repeat": 1}, "allow_output_repeat", "must be True or False"),
        ({"allow_non_restored_state": None}, "allow_non_restored_state", "must be True or False"),
        ({"job_id": 5}, "job_id", "job_id must be a text"),
        ({"branch": "", "mute": True}, "branch", "the name of a branch is"),
        ({"branch": "a b", "mute": True}, "branch", "the name of a branch is"),
    ],
)
def test_options_that_no_job_can_have_are_refused_by_name_and_nothing_is_launched(options: Any, setting: str, said: str) -> None:
    launcher = Recorder()
    env = Environment("job", launcher=launcher)
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    with pytest.raises(InvalidConfigError, match=said) as caught:
        env.execute(**options)
    assert caught.value.setting == setting
    assert launcher.launched == []


def test_a_refused_job_shows_the_users_line_and_not_ours() -> None:
    class Refuser:
        def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
            raise JobExistsError("job 'job' has ended", job_id="job", state="FINISHED")

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


def test_an_environment_and_its_streams_say_what_they_are() -> None:
    launcher = Recorder()
    env = Environment("job", parallelism=2, launcher=launcher)
    assert repr(env) == "<Environment 'job': no streams; parallelism 2; not executed>"
    rows = env.from_source(NamedSource())
    schema = pa.schema([pa.field("user", pa.string(), nullable=False), ("n", pa.int64())])
    mapped = rows.map(dict, returns=schema)
    assert repr(mapped) == "<Stream 'map', without uid: (user: string, n: int64)>"
    assert repr(mapped.map(dict)) == "<Stream 'map', without uid: undeclared rows>"
    assert repr(mapped.rebalance()) == "<Stream of 'map': (user: string, n: int64)>"
    keyed = mapped.key_by("user")
    assert repr(keyed) == "<KeyedStream by user (utf8) of 'map': (user: string, n: int64)>"
    assert repr(mapped.sink_to(Blackhole("out"), uid="out")) == "<StreamSink 'blackhole', uid 'out': Blackhole('out')>"
    env.execute()
    assert repr(env).startswith("<Environment 'job': 1 source, 2 operators, 1 sink; parallelism 2;")


def test_an_environment_says_what_became_of_its_job_without_holding_it() -> None:
    class Keeping(Recorder):
        def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
            self.handle = super().launch(plan, options)
            return self.handle

    launcher = Keeping()
    env = Environment("job", launcher=launcher)
    env.from_source(NamedSource()).sink_to(NamedSink(), uid="out")
    env.execute()
    assert repr(env) == "<Environment 'job': 1 source, 1 sink; parallelism 1; executed: 'handle'>"
    del launcher.handle
    assert repr(env).endswith("parallelism 1; executed>")


def test_a_job_takes_checkpoints_unless_told_not_to(caplog: pytest.LogCaptureFixture) -> None:
    env = Environment("job", launcher=Recorder())
    env.from_source(NamedSource()).uid("rows").sink_to(NamedSink(), uid="out")
    assert env.config.checkpoint_interval_ms == 10_000
    env.execute()
    assert caplog.messages == []
    env = Environment("job", launcher=Recorder(), checkpoint_interval_ms=None)
    env.from_source(NamedSource()).uid("rows").sink_to(NamedSink(), uid="out")
    env.execute()
    assert [message.partition(":")[0] for message in caplog.messages] == ["job"]
    assert "no periodic checkpoints, since checkpoint_interval_ms is None" in caplog.text


def test_operators_without_uid_are_named_in_one_line_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    launcher = Recorder()
    env = Environment("job", launcher=launcher)
    env.from_source(NamedSource()).map(dict).uid("parse").filter(bool).sink_to(Blackhole())
    env.execute()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("job: 3 operators without uid (source-0, filter-2, sink-3): ")
    env.require_uids = True
    with pytest.raises(GraphError, match=r"3 operators without uid \(source-0, filter-2, sink-3\), and require_uids is set"):
        env.execute()
    assert len(launcher.launched) == 1
    strict = Environment("job", launcher=launcher, require_uids=True)
    strict.from_source(NamedSource()).uid("rows").sink_to(NamedSink(), uid="out")
    strict.execute()
    assert len(launcher.launched) == 2
