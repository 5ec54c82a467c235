"""`holdfast preflight`, `env.preflight` and POST /v1/preflight: the same report, the same verdict."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.ha.records import OwnerRecord, encode_record
from holdfast.coordinator.restore.preflight import PreflightReport, Refusal
from holdfast.coordinator.service import CoordinatorService
from holdfast.operators.datastream.pipelines import build_environment, load_function
from holdfast.statebackends.errors import InvalidConfigError, UnclaimedStateError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from tests.api.fakes import FakeCoordinator, Served, make_graph

runner = CliRunner()

PIPELINE = """
import pyarrow as pa
import holdfast as hf

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64())])
TOTAL = hf.ValueStateDescriptor("total", TYPE)


class Count(hf.ProcessFunction):
    states = (TOTAL,)

    def process_element(self, value, ctx, out):
        out(value)


def make_batch(indices):
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % 3)], schema=SCHEMA)


def pipeline(env):
    stream = env.from_source(hf.GeneratorSource(make_batch, 12, SCHEMA, 400))
    stream.key_by("key").process(Count(), returns=SCHEMA).uid("UID").sink_to(hf.Blackhole())


def other(env):
    own = hf.Environment("another", parallelism=2)
    pipeline(own)
    return own
"""


def write_pipeline(folder: Path, *, uid: str = "totals", kind: str = "int") -> Path:
    path = folder / f"job_{uid}_{kind}.py"
    path.write_text(PIPELINE.replace("UID", uid).replace("TYPE", kind))
    return path


def graph_of(path: Path) -> JobGraph:
    name = f"{path}:pipeline"
    return build_environment(load_function(name, "job")[0], name, "job").build().graph


def write_savepoint(folder: Path, graph: JobGraph) -> Path:
    """A savepoint as the job would take it: one handle for each keyed operator with state."""
    operators = []
    for vertex in graph.vertices:
        for operator in vertex.operators:
            states = tuple(state for state in operator.states if state.key_type is not None)
            parts = tuple(InlineHandle(b"PAR1 rows PAR1") for _ in states)
            handle = KeyedStateHandle(KeyGroupRange(0, vertex.max_parallelism), "parquet", states, parts)
            subtask = OperatorSubtaskState(keyed=(handle,) if states else ())
            operators.append(
                OperatorState(operator.uid, operator.operator_id, operator.name, 1, vertex.max_parallelism, (subtask,))
            )
    metadata = SnapshotMetadata(
        job_id="ab" * 16,
        job_name="pipeline",
        checkpoint_id=3,
        kind="savepoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=1,
        completion_timestamp_ms=2,
        operators=tuple(operators),
    )
    folder.mkdir(parents=True)
    (folder / "_metadata").write_bytes(encode_metadata(metadata))
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_pipeline(tmp_path)


@pytest.fixture
def savepoint(tmp_path: Path, job: Path) -> Path:
    return write_savepoint(tmp_path / "savepoints" / "savepoint-1", graph_of(job))


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["preflight", *arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout if code < 2 else result.stderr


def test_a_snapshot_that_fits_is_exit_code_0(job: Path, savepoint: Path) -> None:
    lines = run(str(savepoint), f"{job}:pipeline").splitlines()
    assert lines[0].startswith("savepoint 3 of pipeline (abab")
    assert any("totals" in line and "matched" in line and "as is" in line for line in lines)
    assert lines[-1] == "fits"


def test_a_renamed_operator_is_exit_code_1_and_the_rename_is_proposed(tmp_path: Path, savepoint: Path) -> None:
    renamed = write_pipeline(tmp_path, uid="sums")
    output = run(str(savepoint), f"{renamed}:pipeline", code=1)
    assert "removed, renamed to sums?" in output
    assert "refused: the snapshot holds state of operators that the job lacks: 'totals'" in output
    assert output.splitlines()[-1] == "does not fit: 1 reasons"
    allowed = run(str(savepoint), f"{renamed}:pipeline", "--allow-non-restored-state")
    assert "note: operator 'totals' is not in the job: its state is dropped" in allowed


def test_both_schemas_are_shown_and_json_is_the_report(tmp_path: Path, savepoint: Path) -> None:
    retyped = write_pipeline(tmp_path, kind="str")
    told = json.loads(run(str(savepoint), f"{retyped}:pipeline", "--json", code=1))
    report = msgspec.convert(told, PreflightReport)
    assert told["fits"] is False
    (operator,) = [each for each in report.operators if each.uid == "totals"]
    (state,) = [each for each in operator.states if each.name == "total"]
    assert (state.verdict, state.stored, state.declared) == ("incompatible", "value of int by int64", "value of str by int64")
    assert [refusal.kind for refusal in report.refusals] == ["IncompatibleStateError"]


def test_a_damaged_snapshot_is_exit_code_1_with_its_file(job: Path, savepoint: Path) -> None:
    content = (savepoint / "_metadata").read_bytes()
    (savepoint / "_metadata").write_bytes(content[:-7])
    assert "refused: " in (output := run(str(savepoint), f"{job}:pipeline", code=1))
    assert "corrupt at" in output
    assert json.loads(run(str(savepoint), f"{job}:pipeline", "--json", code=1))["refusals"][0]["kind"] == "CorruptStateError"


def test_an_environment_of_its_own_and_another_parallelism(job: Path, savepoint: Path) -> None:
    assert "for job another (" in run(str(savepoint), f"{job}:other")
    assert "does not fit" in run(str(savepoint), f"{job}:other", "--parallelism", "200", code=1)


@pytest.mark.parametrize(
    ("job_name", "reason"),
    [("{}:nothing", "has no function 'nothing'"), ("{}", "name a function as"), ("nowhere.py:x", "there is no file nowhere.py")],
)
def test_a_job_that_can_not_be_loaded_is_exit_code_2(job: Path, savepoint: Path, job_name: str, reason: str) -> None:
    assert reason in run(str(savepoint), job_name.format(job), code=2)


def test_storage_that_fails_says_nothing_of_the_snapshot_and_is_exit_code_2(job: Path, savepoint: Path) -> None:
    """1 is a verdict: whoever waits for it would take the snapshot for one that does not fit."""
    (savepoint / "_metadata").unlink()
    os.mkfifo(savepoint / "_metadata")
    for command in (
        ["preflight", str(savepoint), f"{job}:pipeline"],
        ["inspect", str(savepoint)],
        ["snapshot", "inspect", str(savepoint)],
    ):
        result = runner.invoke(app, command)
        assert (result.exit_code, result.stdout) == (2, ""), command
        assert "not a regular file" in result.stderr
        assert "[StorageUnavailableError]" in result.stderr


def test_latest_needs_a_state_directory(tmp_path: Path, job: Path) -> None:
    assert "Give --state-dir" in run("latest", f"{job}:pipeline", code=2)
    assert "is no state directory" in run("latest", f"{job}:pipeline", "--state-dir", str(tmp_path), code=2)


def test_a_checkpoint_is_judged_with_the_state_directory_around_it(tmp_path: Path, job: Path) -> None:
    state = tmp_path / "state"
    chk = write_savepoint(state / ("ab" * 16) / "chk-3", graph_of(job))
    metadata = msgspec.structs.replace(hf.Snapshot(chk).metadata, kind="checkpoint", external=("x/manifest.json",))
    (chk / "_metadata").write_bytes(encode_metadata(metadata))
    assert "not checked: 1 files outside its folder, the first: x/manifest.json" in run(str(chk), f"{job}:pipeline")
    (state / "_holdfast").write_text("nonce")
    assert "damaged: x/manifest.json: the external file is missing" in run(str(chk), f"{job}:pipeline", code=1)
    (state / "x").mkdir()
    (state / "x" / "manifest.json").write_text("{}")
    assert "not checked" not in run(str(chk), f"{job}:pipeline")
    assert "fits" in run(str(chk), f"{job}:pipeline", "--state-dir", str(state))


# ---------------------------------------------------------------------------------------------------------- Python and REST


def test_an_environment_asks_storage_or_its_coordinator(tmp_path: Path, job: Path, savepoint: Path) -> None:
    function, _ = load_function(f"{job}:pipeline", "job")
    env = hf.Environment("pipeline")
    function(env)
    assert env.preflight(savepoint).fits
    env.state_dir = str(tmp_path / "state")
    service = CoordinatorService(ServiceConfig(env.state_dir))
    service.close()
    assert env.preflight(str(savepoint)).fits
    assert [refusal.kind for refusal in env.preflight("latest").refusals] == ["RestoreError"]


def test_a_refusal_travels_through_rest(job: Path, served: Served, coordinator: FakeCoordinator) -> None:
    client = RestClient(served.url, str(served.token))
    assert client.preflight(Submission(make_graph())).fits
    coordinator.refusals = (Refusal("UnclaimedStateError", "no operator 'x'", {"operators": {"x": 3}}),)
    report = client.preflight(Submission(make_graph()))
    with pytest.raises(UnclaimedStateError) as caught:
        report.check()
    assert caught.value.operators == {"x": 3}
    env = hf.Environment("mine", coordinator=served.url, token=str(served.token))
    load_function(f"{job}:pipeline", "job")[0](env)
    assert not env.preflight("latest").fits
    client.close()


def test_an_environment_without_anything_needs_a_path(job: Path) -> None:
    env = hf.Environment("pipeline")
    load_function(f"{job}:pipeline", "job")[0](env)
    with pytest.raises(InvalidConfigError, match="which job's"):
        env.preflight("latest")


# ----------------------------------------------------------------------------------------------------------------- dispose


def dispose(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["snapshot", "dispose", *arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout if code == 0 else result.stderr


def test_r21_a_savepoint_is_disposed_of_and_a_claimed_one_is_not(tmp_path: Path, job: Path, savepoint: Path) -> None:
    owner = OwnerRecord("cd" * 16, "directory", "n")
    (savepoint / "_owner").write_bytes(encode_record(owner))
    assert f"was claimed by job {owner.job_id}" in dispose(str(savepoint), code=2)
    assert f"owned by job {owner.job_id}" in run(str(savepoint), f"{job}:pipeline")
    assert "SnapshotClaimedError" in run(str(savepoint), f"{job}:pipeline", "--claim", code=1)
    (savepoint / "_owner").unlink()
    assert "fits" in run(str(savepoint), f"{job}:pipeline", "--claim")
    assert json.loads(dispose(str(savepoint / "_metadata"), "--json")) == {"disposed": str(savepoint)}
    assert not savepoint.exists()
    assert savepoint.parent.exists()
    assert "holds no snapshot" in dispose(str(savepoint), code=2)
    assert "holds no snapshot" in dispose("/", code=2)


@pytest.mark.parametrize("nowhere", ["/", "//", "/_metadata", "/."])
def test_r21_the_root_is_not_where_one_happens_to_be(savepoint: Path, monkeypatch: pytest.MonkeyPatch, nowhere: str) -> None:
    monkeypatch.chdir(savepoint)
    assert "/ holds no snapshot" in dispose(nowhere, code=2)
    assert (savepoint / "_metadata").exists()


def test_r21_a_link_is_followed_before_it_is_said_what_lies_there(tmp_path: Path, savepoint: Path) -> None:
    link = tmp_path / "newest"
    link.symlink_to(savepoint)
    (savepoint / "_claim").write_bytes(b"a job's")
    assert "by another name" in dispose(str(link), code=2)
    (savepoint / "_claim").unlink()
    assert dispose(str(link)) == f"disposed of {savepoint}\n"
    assert not savepoint.exists()


def test_a_claim_mode_that_is_none_is_refused(job: Path) -> None:
    env = hf.Environment("pipeline")
    load_function(f"{job}:pipeline", "job")[0](env)
    with pytest.raises(InvalidConfigError, match="claim_mode is 'LEGACY', must be one of NO_CLAIM, CLAIM"):
        env.preflight("/s", claim_mode="LEGACY")
    with pytest.raises(InvalidConfigError, match="must be one of"):
        env.execute(restore="/s", claim_mode="claim")


# ------------------------------------------------------------------------------------------------- the report in docs/

BEFORE = """
import msgspec
import holdfast as hf

class Last(msgspec.Struct):
    delay: int
    gate: str
    note: str | None = None

LAST = hf.ValueStateDescriptor("last", Last)
TOTAL = hf.ValueStateDescriptor("total", int)
SEEN = hf.MapStateDescriptor("seen", str, int)
"""
AFTER = """
import msgspec
import pyarrow as pa
import holdfast as hf

SCHEMA = pa.schema([("i", pa.int64()), ("carrier", pa.string())])

class Last(msgspec.Struct):
    delay: float                       # was int
    gate: str
    city: str = "?"                    # new; note is gone

LAST = hf.ValueStateDescriptor("last", Last)
TOTAL = hf.ValueStateDescriptor("total", int)

class Delays(hf.ProcessFunction):
    states = (LAST, TOTAL)             # seen is gone

    def process_element(self, value, ctx, out):
        out(value)

def make_batch(indices):
    carriers = pa.array(["AA"] * len(indices))
    return pa.RecordBatch.from_arrays([pa.array(indices), carriers], schema=SCHEMA)

def flights(env):
    stream = env.from_source(hf.GeneratorSource(make_batch, 12, SCHEMA, 400)).uid("source")
    stream.key_by("carrier").process(Delays(), returns=SCHEMA).uid("delays").sink_to(hf.Blackhole()).uid("discard")
"""


def test_the_report_that_the_documentation_shows_is_what_is_printed(tmp_path: Path) -> None:
    before: dict[str, Any] = {}
    exec(BEFORE, before)
    keys = ["AA", "UA"]
    last = pa.table({"key": keys, "value": [{"delay": 5, "gate": "B1", "note": None}, {"delay": 0, "gate": "C2", "note": "late"}]})
    seen = pa.table({"key": keys, "map_key": ["JFK", "JFK"], "value": [1, 2]})
    savepoint = (
        hf.Savepoint.create(max_parallelism=128, parallelism=2, job_name="flights")
        .with_state("delays", before["LAST"], last)
        .with_state("delays", before["TOTAL"], pa.table({"key": keys, "value": [10, 20]}))
        .with_state("delays", before["SEEN"], seen)
        .with_state("routes", before["TOTAL"], pa.table({"key": keys, "value": [1, 2]}))
        .write(tmp_path / "savepoints" / "savepoint-7")
    )
    (tmp_path / "flights.py").write_text(AFTER)
    printed = run(savepoint.location, f"{tmp_path / 'flights.py'}:flights", code=1)
    page = (Path(__file__).parents[2] / "docs" / "restore.md").read_text()
    command = "$ holdfast preflight /data/savepoints/savepoint-7 flights.py:flights\n"
    shown = page.partition(command)[2].partition("```")[0]
    assert _comparable(printed) == _comparable(shown), printed


def _comparable(report: str) -> list[str]:
    """Without sizes, times and ids, which another version of Arrow or another day changes, and the spaces of tables."""
    told = re.sub(r"\b[\d.]+ (B|KiB|bytes)\b", "SIZE", re.sub(r"\([0-9a-f.]{7,32}\)", "(ID)", report))
    return [" ".join(line.split()) for line in re.sub(r"\d{4}-\d\d-\d\d [\d:]+Z", "WHEN", told).splitlines()]
