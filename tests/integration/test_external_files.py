"""A job with a sink outside the state directory, cut off: its last checkpoint names staged files, which every tool checks there."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.statebackends.handles import external_places
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DeleteFile, ListFolder, PutIfAbsent, ReadFile, StatFile, Storage
from tests.api.fakes import FakeCoordinator, Served, serving
from tests.integration.test_two_processes import Cluster, counting_plan, eventually
from tests.s3_server import S3Server
from tests.s3_server import connection as connection
from tests.s3_server import server as server

pytestmark = pytest.mark.slow

runner = CliRunner()


class Left(NamedTuple):
    """What is left of a job that was cut off."""

    state_dir: str
    checkpoint: str
    """The newest one."""


def cut_off(folder: Path, output: str, state_url: str | None = None) -> Left:
    """Run the job until it has checkpoints, then kill its workers and stop its coordinator."""
    folder.mkdir(exist_ok=True)
    with contextlib.closing(Cluster(folder, state_url)) as cluster:
        job = cluster.submit(counting_plan(600_000, 3_000.0, output, "memory")).job_id
        eventually(lambda: cluster.completed(job) >= 3, "three checkpoints")
    state_dir = state_url or str(cluster.state)
    storage = open_storage(f"{state_dir}/{job}")
    numbers = [int(name.strip("/").removeprefix("chk-")) for name in storage.execute(ListFolder("")) if name.startswith("chk-")]
    newest = max(number for number in numbers if is_complete(storage, number))
    return Left(state_dir, f"{state_dir}/{job}/chk-{newest}")


def is_complete(storage: Storage, number: int) -> bool:
    path = f"chk-{number}/_metadata"
    return storage.execute(StatFile(path)) is not None and b'"holdfast-snapshot"' in storage.execute(ReadFile(path, 0, 100))


def command(*arguments: str, code: int) -> Any:
    result = runner.invoke(app, ["snapshot", *arguments, "--json"])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return json.loads(result.stdout)


def reports(left: Left, served: Served, *, sound: bool) -> list[tuple[list[tuple[str, str]], list[str]]]:
    """(problems, places that were not checked) as the command line, Python and REST say, of verify and of fsck."""
    code = 0 if sound else 1
    verified = hf.Snapshot(left.checkpoint).verify()
    checked = hf.fsck(left.state_dir, checksums=True)
    assert (verified.is_sound, checked.is_clean) == (sound, sound)
    documents = [
        command("verify", left.checkpoint, code=code),
        command("fsck", left.state_dir, "--checksums", code=code),
        served.json("POST", "/v1/snapshots/verify", {"path": left.checkpoint}),
    ]
    told = [([(each["kind"], each["path"]) for each in document["problems"]], document["unchecked"]) for document in documents]
    found = [(problems, [each["path"] for each in unchecked]) for problems, unchecked in told]
    for report in (verified, checked):
        found.append(([(each.kind.value, each.path) for each in report.problems], [each.path for each in report.unchecked]))
    return found


def examine(left: Left, output: str, served_state: Path, state_url: str | None = None) -> None:
    entries = [entry for entry in hf.Snapshot(left.checkpoint).metadata.external if entry.startswith(output)]
    assert entries, "the checkpoint names what its sink has staged"
    with serving(FakeCoordinator(), served_state, state_url=state_url) as served:
        assert {str(report) for report in reports(left, served, sound=True)} == {str(([], []))}
        sink = open_storage(output)
        for place in external_places(entries[0]):
            path = place.removeprefix(f"{sink.root}/")
            if sink.execute(StatFile(path)) is not None:
                content: bytes = sink.execute(ReadFile(path, 0, None))
                sink.execute(DeleteFile(path))
                sink.execute(PutIfAbsent(path, content[:-1]))
        for problems, unchecked in reports(left, served, sound=False):
            ((kind, path),) = problems
            assert (kind, path in external_places(entries[0]), unchecked) == ("format", True, [])
        for place in external_places(entries[0]):
            sink.execute(DeleteFile(place.removeprefix(f"{sink.root}/")))
        assert {str(report) for report in reports(left, served, sound=False)} == {str(([("missing", entries[0])], []))}


def test_in_a_directory(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    left = cut_off(tmp_path / "job", output)
    examine(left, output, tmp_path / "job" / "state")


@pytest.mark.endurance
def test_on_s3(tmp_path: Path, server: S3Server, connection: Any) -> None:
    bucket = f"s3://{server.new_bucket(connection)}"
    output = f"s3://{server.new_bucket(connection)}/out"
    left = cut_off(tmp_path / "job", output, f"{bucket}/state")
    examine(left, output, tmp_path / "served", f"{bucket}/state")


def test_a_sink_on_s3_that_cannot_be_reached_is_named_and_is_no_damage(
    tmp_path: Path, server: S3Server, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = f"s3://{server.new_bucket(connection)}/out"
    left = cut_off(tmp_path / "job", output)
    entries = list(hf.Snapshot(left.checkpoint).metadata.external)
    assert hf.Snapshot(left.checkpoint).verify().unchecked == ()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with serving(FakeCoordinator(), tmp_path / "job" / "state") as served:
        for problems, unchecked in reports(left, served, sound=True):
            assert (problems, unchecked[: len(entries)]) == ([], entries)
    shown = runner.invoke(app, ["snapshot", "verify", left.checkpoint])
    assert (shown.exit_code, "not checked: " in shown.stdout, "boto3" in shown.stdout) == (0, True, True)
    shown = runner.invoke(app, ["snapshot", "fsck", left.state_dir, "--checksums"])
    assert (shown.exit_code, f"not checked: {entries[0]}: " in shown.stdout) == (0, True)
