"""`hf.Snapshot` and `holdfast snapshot ...`: what they print, their exit codes, and that other tools read what they write."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord, encode_record
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, NotFoundError, UnsupportedVersionError
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import KeyGroupRange, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import encode_metadata
from holdfast.statebackends.state import Pickled, ValueStateDescriptor
from tests.statebackends.snapshot_harness import KEY, SOME, UID, Contents, files_below, write

runner = CliRunner()


def run(*arguments: object, code: int = 0) -> str:
    result = runner.invoke(app, ["snapshot", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result.stdout


def fails(*arguments: object) -> str:
    """Trouble: exit code 2, one line on stderr, nothing on stdout."""
    result = runner.invoke(app, ["snapshot", *map(str, arguments)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (result.output, result.exception)
    return result.stderr


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return Path(write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(write(tmp_path, "job/chk-7", SOME, kind="rocksdb").location)


# ---------------------------------------------------------------------------------------------------------- Python


def test_operators_and_states_are_described(savepoint: Path, checkpoint: Path) -> None:
    operator = hf.Snapshot(savepoint).operators[UID]
    assert (operator.parallelism, operator.max_parallelism) == (2, 8)
    assert operator.states == hf.Snapshot(savepoint).states(UID)
    count, positions = operator.states["count"], operator.states["positions"]
    assert (count.kind, count.key_type, count.value_type, count.format, count.entries) == ("value", "utf8", "int", "parquet", -1)
    assert (positions.kind, positions.key_type, positions.format, positions.entries) == ("operator_list", None, "list", 2)
    assert count.size > 0
    native = hf.Snapshot(checkpoint).states(UID)
    assert (native["count"].format, native["count"].size) == ("rocksdb", -1)
    assert repr(hf.Snapshot(checkpoint / "_metadata")) == f"Snapshot({str(checkpoint)!r})"


def test_a_table_of_some_columns(savepoint: Path, checkpoint: Path) -> None:
    for path in (savepoint, checkpoint):
        snapshot = hf.Snapshot(path)
        table = snapshot.table(UID, "tags", columns=["value", "key"]).read_all()
        assert table.column_names == ["value", "key"]
        assert table.equals(snapshot.table(UID, "tags").read_all().select(["value", "key"]))
        assert snapshot.table(UID, "positions", columns=["value"]).read_all().column_names == ["value"]
        for columns in (["valeu"], ["key", "key"]):
            with pytest.raises(InvalidConfigError, match=r"state 'tags': no column '\w+', or twice; it has: key_group, key, "):
                snapshot.table(UID, "tags", columns=columns)


def test_a_table_is_a_stream_of_arrow_batches(savepoint: Path, checkpoint: Path) -> None:
    for path in (savepoint, checkpoint):
        snapshot = hf.Snapshot(str(path))
        reader = snapshot.table(UID, "count")
        assert isinstance(reader, pa.RecordBatchReader)
        assert reader.schema.equals(snapshot.schema(UID, "count"))
        assert {row["key"]: row["value"] for row in reader.read_all().to_pylist()} == SOME.count
        groups = {KEY.key_group(key, 8) for key in SOME.count}
        some = snapshot.table(UID, "count", key_groups=range(min(groups), min(groups) + 1)).read_all()
        assert set(some.column("key_group").to_pylist()) == {min(groups)}


def test_duckdb_reads_a_stream(checkpoint: Path) -> None:
    totals = hf.Snapshot(checkpoint).table(UID, "count")
    with duckdb.connect() as database:
        database.register("totals", totals)
        assert database.execute("SELECT sum(value) FROM totals").fetchall() == [(6,)]


def test_errors_of_a_stream_keep_their_type(savepoint: Path) -> None:
    (savepoint / "totals-0-1-n-count.parquet").write_bytes(b"?")
    reader = hf.Snapshot(savepoint).table(UID, "count")
    with pytest.raises(CorruptStateError, match=r"operator 'totals' subtask 0: .*: 1 bytes instead of"):
        reader.read_all()


@pytest.mark.parametrize("groups", [range(-1, 2), range(0, 8, 2)])
def test_key_groups_that_are_none(savepoint: Path, groups: range) -> None:
    with pytest.raises(InvalidConfigError, match="are not key groups"):
        hf.Snapshot(savepoint).table(UID, "count", key_groups=groups)
    with pytest.raises(InvalidConfigError, match="are not key groups"):
        hf.Snapshot(savepoint).table(UID, "rules", key_groups=range(1))


def test_unknown_names(savepoint: Path) -> None:
    snapshot = hf.Snapshot(savepoint)
    for uid, state in (("nothing", "count"), (UID, "nothing")):
        for call in (snapshot.table, snapshot.schema):
            with pytest.raises(NotFoundError, match="it has: "):
                call(uid, state)


def test_verify_diff_export_and_copy(savepoint: Path, checkpoint: Path, tmp_path: Path) -> None:
    snapshot = hf.Snapshot(savepoint)
    assert snapshot.verify().is_sound
    assert snapshot.diff(hf.Snapshot(checkpoint)).is_same
    report = snapshot.export(tmp_path / "export", uid=UID, state="count")
    assert [state.rows for state in report.states] == [3]
    copied = hf.Snapshot(checkpoint).copy(f"file://{tmp_path}/copies/one")
    assert copied.location == str(tmp_path / "copies/one")
    assert copied.metadata.kind == "savepoint"
    assert copied.diff(snapshot).is_same


@pytest.mark.parametrize("inside", ["", "new", "a/b"])
def test_nothing_is_written_into_the_snapshot_itself(savepoint: Path, inside: str) -> None:
    before = files_below(savepoint)
    for write_to in (hf.Snapshot(savepoint).copy, hf.Snapshot(savepoint).export):
        with pytest.raises(InvalidConfigError, match="lies in the snapshot itself"):
            write_to(savepoint / inside)
    assert files_below(savepoint) == before


def test_nothing_is_written_into_the_snapshot_through_a_link(savepoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(savepoint)
    with pytest.raises(InvalidConfigError, match="lies in the snapshot itself"):
        hf.Snapshot(savepoint).copy(tmp_path / "link" / "new")
    with pytest.raises(InvalidConfigError, match="lies in the snapshot itself"):
        hf.Snapshot(tmp_path / "link").copy(savepoint / "new")


def test_nothing_is_written_into_the_directory_of_a_job(savepoint: Path, tmp_path: Path) -> None:
    """Its recovery would delete a folder that nobody claimed, and its retention what lies in one of its own."""
    job = tmp_path / "state" / ("ab" * 16)
    (job / "leader").mkdir(parents=True)
    snapshot = hf.Snapshot(savepoint)
    snapshot.copy(job / "chk-1")  # no job yet: an archive may look as it likes
    (job / "leader" / "1").write_bytes(b"{}")
    (tmp_path / "link").symlink_to(job)
    for target in (job / "chk-2", job / "chk-1" / "x", job / "sp", tmp_path / "link" / "y"):
        for write_to in (snapshot.copy, snapshot.export, hf.Savepoint.create(max_parallelism=1).write):
            with pytest.raises(InvalidConfigError, match="lies in the directory of job abab"):
                write_to(target)
        with pytest.raises(InvalidConfigError, match="lies in the directory of job abab"):
            snapshot.edit(target, uid=UID, state="count", function=lambda batch: batch)
    assert sorted(path.name for path in job.iterdir() if path.name != ".tmp") == ["chk-1", "leader"]


@pytest.mark.parametrize("below", ["", "/new"])
def test_a_file_in_place_of_a_target_is_named(savepoint: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    for write_to in (hf.Snapshot(savepoint).copy, hf.Snapshot(savepoint).export, hf.Savepoint.create(max_parallelism=1).write):
        with pytest.raises(InvalidConfigError, match=f"^{tmp_path}/file is no directory: name another folder"):
            write_to(f"{tmp_path}/file{below}")


@pytest.mark.parametrize("target", ["", "/", "ftp://host/folder", "s4://bucket", "file://"])
def test_targets_that_are_none(savepoint: Path, target: str) -> None:
    with pytest.raises(InvalidConfigError):
        hf.Snapshot(savepoint).copy(target)


def test_a_target_called_like_the_file_that_makes_a_snapshot_is_none(savepoint: Path, tmp_path: Path) -> None:
    """Its path would be taken for that of the file, and what is written there never be found again."""
    for target in (tmp_path / "x" / "_metadata", f"{tmp_path}/x/_metadata/"):
        assert "x/_metadata is the name of a snapshot's own file" in fails("copy", savepoint, target)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("location", ["s3://", "file://[x/y", "/a\0b"])
def test_locations_that_are_none_are_called_so(location: str) -> None:
    assert "InvalidConfigError" in fails("inspect", location)


def test_nothing_to_export_is_an_export_of_nothing(tmp_path: Path) -> None:
    """A bootstrapped savepoint without states, and an operator that has none."""
    hf.Savepoint.create(max_parallelism=4).write(tmp_path / "empty")
    run("export", tmp_path / "empty", tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "_export.json").read_text())["states"] == []
    stateless = write(tmp_path, "savepoint-7", Contents(), canonical=True)
    operator = msgspec.structs.replace(stateless.metadata.operators[0], subtasks=(OperatorSubtaskState(),))
    metadata = msgspec.structs.replace(stateless.metadata, operators=(operator,))
    Path(stateless.location, "_metadata").write_bytes(encode_metadata(metadata))
    report = hf.Snapshot(stateless.location).export(tmp_path / "of-one", uid=UID)
    assert report.states == ()
    assert sorted(files_below(tmp_path / "of-one")) == ["_export.json"]


def test_a_copied_checkpoint_restores_on_its_backend(checkpoint: Path, tmp_path: Path) -> None:
    copied = hf.Snapshot(checkpoint).copy(tmp_path / "copies/one")
    stored = copied._stored
    count = ValueStateDescriptor("count", int)
    backend = create_keyed_backend(
        "rocksdb",
        descriptors=(count,),
        key_type=KEY,
        key_groups=KeyGroupRange(0, 8),
        max_parallelism=8,
        operator=UID,
        subtask=0,
        local_dir=str(tmp_path / "restored"),
        allow_unclaimed_state=True,
    )
    backend.restore(copied.metadata.operators[0].subtasks[0].keyed, stored.storage, stored.folder)
    for key, value in SOME.count.items():
        backend.set_current_key(KEY.encode(key), KEY.key_group(key, 8))
        assert backend.get_state(count).value() == value
    backend.dispose()


# ----------------------------------------------------------------------------------------------------------- command line


def test_inspect_is_the_same_command(savepoint: Path) -> None:
    shown = run("inspect", savepoint)
    assert shown == runner.invoke(app, ["inspect", str(savepoint)]).stdout
    assert "it has: totals" in fails("inspect", savepoint, "--state", "nothing", "count")


def test_verify_says_what_is_wrong(savepoint: Path) -> None:
    assert run("verify", savepoint).endswith("of state: sound\n")
    (file,) = savepoint.glob("totals-0-1-n-count.parquet")
    (other,) = savepoint.glob("totals-1-1-n-tags.parquet")
    file.write_bytes(file.read_bytes() + b"!")
    other.unlink()
    lines = run("verify", savepoint, code=1).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"operator 'totals' subtask 0: savepoint-7/{file.name}: ")
    assert lines[1] == f"operator 'totals' subtask 1: savepoint-7/{other.name}: the file is missing"
    assert lines[2].endswith(": 2 problems")
    document = json.loads(run("verify", savepoint, "--json", code=1))
    assert document["sound"] is False
    assert [(p["kind"], p["operator"], p["subtask"]) for p in document["problems"]] == [
        ("length", UID, 0),
        ("missing", UID, 1),
    ]


def test_verify_of_a_damaged_metadata(savepoint: Path) -> None:
    file = savepoint / "_metadata"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert str(file) in run("verify", savepoint, code=1)
    (problem,) = json.loads(run("verify", savepoint, "--json", code=1))["problems"]
    assert (problem["kind"], str(file) in problem["detail"]) == ("metadata", True)
    file.write_bytes(content.replace(b'"version":1', b'"version":9', 1))
    assert "version 9 is not supported" in fails("verify", savepoint)


def test_verify_names_what_it_could_not_check(savepoint: Path) -> None:
    metadata = msgspec.structs.replace(hf.Snapshot(savepoint).metadata, external=("job/sources/x",))
    (savepoint / "_metadata").write_bytes(encode_metadata(metadata))
    assert run("verify", savepoint).splitlines()[-1] == (
        "not checked: 1 files outside its folder, the first: job/sources/x: "
        "relative to the state directory of its job, which a savepoint does not name"
    )


def test_diff_has_the_exit_codes_of_diff(savepoint: Path, checkpoint: Path, tmp_path: Path) -> None:
    lines = run("diff", savepoint, checkpoint).splitlines()
    assert lines[0].split() == ["OPERATOR", "STATE", "KIND", "ADDED", "REMOVED", "CHANGED", "SAME", "NOTE"]
    assert lines[-1] == "same"
    other = write(tmp_path, "job/chk-8", replace(SOME, count={"AA": 1, "UA": 5, "DL": 3})).location
    shown = run("diff", savepoint, other, "--state", UID, "count", "--keys", 2, code=1)
    assert shown.splitlines()[-1] == "different"
    assert "CHANGE" in shown
    document = json.loads(run("diff", savepoint, other, "--operator", UID, "--keys", 9, "--json", code=1))
    (count,) = [state for state in document["states"] if state["state"] == "count"]
    assert (count["added"], count["removed"], count["changed"], count["same"]) == (1, 1, 1, 1)
    keys = {each["key"]: (each["change"], each["before"], each["after"]) for each in count["keys"]}
    assert keys == {"UA": ("changed", 2, 5), "DL": ("added", None, 3), "WN": ("removed", 3, None)}
    assert "neither snapshot has an operator" in fails("diff", savepoint, other, "--operator", "nothing")
    assert "holds no snapshot" in fails("diff", savepoint, tmp_path / "nothing")


def test_diff_says_which_side_a_state_is_on(savepoint: Path, tmp_path: Path) -> None:
    found = hf.Snapshot(savepoint).metadata
    renamed = msgspec.structs.replace(found, operators=(msgspec.structs.replace(found.operators[0], uid="other"),))
    (tmp_path / "state/other").mkdir()
    (tmp_path / "state/other/_metadata").write_bytes(encode_metadata(msgspec.structs.replace(renamed, operators=())))
    assert "only before" in run("diff", savepoint, tmp_path / "state/other", code=1)
    assert "only after" in run("diff", tmp_path / "state/other", savepoint, code=1)


def test_operator_and_state_exclude_each_other(savepoint: Path, tmp_path: Path) -> None:
    run("export", savepoint, tmp_path / "new", "--operator", UID, "--state", UID, "count", code=2)
    assert not (tmp_path / "new").exists()


def test_copy_prints_where(savepoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("copy", savepoint, "new/one") == f"{tmp_path}/new/one\n"
    assert json.loads(run("copy", savepoint, "new/two", "--json"))["location"] == f"{tmp_path}/new/two"
    assert "holds a snapshot: nothing is overwritten" in fails("copy", savepoint, "new/one")
    assert run("diff", "new/one", savepoint).splitlines()[-1] == "same"


@pytest.mark.parametrize("command", ["inspect", "verify", "copy", "export", "diff", "dispose"])
def test_a_folder_of_snapshots_is_told_with_what_is_in_it(tmp_path: Path, checkpoint: Path, command: str) -> None:
    more = {"copy": [tmp_path / "new"], "export": [tmp_path / "new"], "diff": [checkpoint]}.get(command, [])
    folder = tmp_path / "sp"
    for name in ("chk-9", "chk-10", "savepoint-ab-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "_claim").write_bytes(b"{}")
    said = f"{folder} holds no snapshot: it is a folder of snapshots: {folder}/chk-10, and 2 more"
    assert said in fails(command, folder, *more)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "_holdfast").write_bytes(b"x")
    assert "it is a state directory" in fails(command, tmp_path / "jobs", *more)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_bytes(b"x")
    assert "there is no _metadata file; it holds 1 other files [" in fails(command, tmp_path / "other", *more)


@pytest.mark.parametrize("command", ["inspect", "verify", "copy", "export", "diff"])
def test_what_is_no_snapshot_is_named(tmp_path: Path, checkpoint: Path, command: str) -> None:
    more = {"copy": [tmp_path / "new"], "export": [tmp_path / "new"], "diff": [checkpoint]}.get(command, [])
    half = tmp_path / "half"
    half.mkdir()
    (half / "_claim").write_bytes(b"{}")
    assert f"{half} holds no snapshot: there is no _metadata file; it holds 1 other files" in fails(command, half, *more)
    assert f"{tmp_path}/missing holds no snapshot" in fails(command, tmp_path / "missing", *more)
    (half / "_metadata").write_bytes(encode_record(AbortRecord(7, FailureReason.EXPIRED, 1, "n", "too slow")))
    assert "checkpoint 7 was aborted (expired): too slow" in fails(command, half, *more)
    (half / "_metadata").write_bytes(encode_record(SavepointRecord(7, "s4://b/sp", CheckpointKind.SAVEPOINT, 0, 1, "n")))
    assert "'s4' is not supported" in fails(command, half, *more)
    assert "is not the folder of a snapshot" in fails(command, "/", *more)
    if command != "verify":
        (half / "_metadata").write_bytes(b"\x00\x00\x00\x04 a checkpoint of Flink")
        assert "no snapshot header" in fails(command, half, *more)
    assert not (tmp_path / "new").exists()


def test_a_savepoints_pointer_is_followed(savepoint: Path, tmp_path: Path) -> None:
    pointer = tmp_path / "state/job/chk-9"
    pointer.mkdir(parents=True)
    for location in (str(savepoint), f"file://{savepoint}", "savepoint-7"):
        (pointer / "_metadata").write_bytes(encode_record(SavepointRecord(9, location, CheckpointKind.SAVEPOINT, 0, 1, "n")))
        assert hf.Snapshot(pointer).location == str(savepoint)
    file = savepoint / "_metadata"
    file.write_bytes(file.read_bytes().replace(b'"version":1', b'"version":9', 1))
    with pytest.raises(UnsupportedVersionError):
        hf.Snapshot(pointer)


# ------------------------------------------------------------------------------------------------- other tools, and pickles


def alone(program: str, folder: Path) -> Any:
    """What a program prints as JSON, in a process that has none of our packages."""
    guard = "import sys, json; sys.path = [p for p in sys.path if p]\n"
    check = "\nassert not {'holdfast', 'statebackends', 'api'} & set(sys.modules)"
    # Arrow's thread pool may still be starting when so short a process ends, and aborts it: this one ends without waiting.
    check += "\nsys.stdout.flush()\nimport os\nos._exit(0)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", guard + program + check], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DUCKDB = """
import duckdb
sql = lambda text: duckdb.sql(text).fetchall()
print(json.dumps({{
    "count": sql("SELECT key, value FROM '{count}' ORDER BY key"),
    "seen": sql("SELECT key, position, value FROM '{seen}' ORDER BY key, position"),
    "tags": sql("SELECT key, map_key, value FROM '{tags}' ORDER BY key, map_key"),
    "windows": sql("SELECT key, namespace, sum_v FROM '{windows}' ORDER BY key, namespace"),
    "timers": sql("SELECT key, time FROM '{timers}' ORDER BY key"),
    "labels": sql("SELECT key, list_sort(value['x']) FROM '{labels}' ORDER BY key"),
    "groups": sql("SELECT bool_and(key_group BETWEEN 0 AND 7) FROM '{count}'"),
}}))
"""
PANDAS = """
import glob, pandas
def rows(pattern, *columns):
    table = pandas.concat([pandas.read_parquet(file) for file in sorted(glob.glob(pattern))])
    return sorted(table[list(columns)].values.tolist())
print(json.dumps({{
    "count": rows("{count}", "key", "value"),
    "seen": rows("{seen}", "key", "position", "value"),
    "tags": rows("{tags}", "key", "map_key", "value"),
    "windows": rows("{windows}", "key", "namespace", "sum_v"),
    "timers": rows("{timers}", "key", "time"),
}}))
"""
EXPECTED = {
    "count": [["AA", 1], ["UA", 2], ["WN", 3]],
    "seen": [["AA", 0, "one"], ["WN", 0, "two"], ["WN", 1, "three"]],
    "tags": [["AA", "t", 1], ["AA", "u", 2], ["UA", "t", 3]],
    "windows": [["AA", 60, 5], ["AA", 120, 6], ["WN", 60, 7]],
    "timers": [["AA", 1_000], ["UA", -5]],
}
STATES = {"count": "count", "seen": "seen", "tags": "tags", "windows": "windows", "timers": "_timers", "labels": "labels"}


@pytest.mark.parametrize("form", ["savepoint", "export of a checkpoint"])
def test_duckdb_alone_and_pandas_alone_read_it(savepoint: Path, checkpoint: Path, tmp_path: Path, form: str) -> None:
    if form == "savepoint":
        place, patterns = savepoint, {name: f"totals-*-{state}.parquet" for name, state in STATES.items()}
    else:
        run("export", checkpoint, tmp_path / "export")
        place, patterns = tmp_path / "export", {name: f"totals/{state}/*.parquet" for name, state in STATES.items()}
    found = alone(DUCKDB.format(**patterns), place)
    assert found.pop("labels") == [["AA", ["a", "b"]], ["UA", None]]
    assert found.pop("groups") == [[True]]
    assert found == EXPECTED
    assert alone(PANDAS.format(**patterns), place) == EXPECTED


def test_operator_state_is_exported_with_its_json(checkpoint: Path, tmp_path: Path) -> None:
    run("export", checkpoint, tmp_path / "export", "--state", UID, "positions")
    query = "SELECT subtask, position, json FROM 'totals/positions/*.parquet'"
    program = f'import duckdb; print(json.dumps(duckdb.sql("{query}").fetchall()))'
    assert alone(program, tmp_path / "export") == [[0, 0, '["a.parquet",10]'], [0, 1, '["b.parquet",0]']]


def test_export_prints_what_it_wrote(savepoint: Path, tmp_path: Path) -> None:
    lines = run("export", savepoint, tmp_path / "new").splitlines()
    assert lines[0].split() == ["OPERATOR", "STATE", "KIND", "ROWS", "FILES", "SIZE", "FOLDER"]
    assert lines[-1] == str(tmp_path / "new")
    document = json.loads(run("export", savepoint, tmp_path / "again", "--json"))
    assert {state["state"]: state["rows"] for state in document["states"]}["count"] == 3
    assert "is not empty" in fails("export", savepoint, tmp_path / "new")


@dataclass
class Unpickled:
    """Leaves a mark when it is unpickled."""

    path: str
    version: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path), 0o600 + self.version)


@pytest.mark.parametrize(("kind", "canonical"), [("filesystem", False), ("filesystem", True), ("rocksdb", False)])
def test_pickled_values_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, canonical: bool) -> None:
    mark = tmp_path / "mark"
    evil = ValueStateDescriptor("count", Pickled[Unpickled])
    monkeypatch.setattr("tests.statebackends.snapshot_harness.COUNT", evil)
    monkeypatch.setattr("tests.statebackends.snapshot_harness.DESCRIPTORS", (evil,))
    folders = []
    for version in (1, 2):
        values: Any = {"AA": Unpickled(str(mark), 1), "UA": Unpickled(str(mark), version)}
        folder = f"savepoint-{version}" if canonical else f"job/chk-{version}"
        folders.append(write(tmp_path, folder, Contents(count=values), kind=kind, canonical=canonical).location)
    mark.unlink(missing_ok=True)  # the backend may have looked at its own values
    document = json.loads(run("diff", *folders, "--keys", 5, "--json", code=1))
    (count,) = [state for state in document["states"] if state["state"] == "count"]
    assert (count["added"], count["changed"], count["same"]) == (0, 1, 1)
    assert bytes.fromhex(count["keys"][0]["after"]) == pickle.dumps(Unpickled(str(mark), 2), protocol=5)
    assert (hf.Snapshot(folders[0]).schema(UID, "count").field("value").type) == pa.binary()
    run("verify", folders[0])
    run("inspect", folders[0], "--state", UID, "count")
    run("export", folders[0], tmp_path / "export")
    run("copy", folders[0], tmp_path / "copy")
    assert not mark.exists()
