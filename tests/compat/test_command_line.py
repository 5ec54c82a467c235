"""Flink 2.3's command line, as it is, against a coordinator with jobs that run: it does its work, or fails at once and says why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.operators.base import JobPlan
from tests.compat.flink import FlinkCommand
from tests.integration.test_two_processes import TOKEN, Cluster, counting_plan, eventually

pytestmark = pytest.mark.compat

UNKNOWN = "d" * 32
SECONDS = 3_000.0
"""That a job would take: none ends by itself."""


def plan(folder: Path, **settings: Any) -> JobPlan:
    """A job whose savepoints go to a directory of its own, which no setting of the coordinator names."""
    made = counting_plan(600_000, SECONDS, folder / "out", "memory")
    config = msgspec.structs.replace(made.graph.config, savepoint_directory=str(folder / "own"), **settings)
    return dataclasses.replace(made, graph=msgspec.structs.replace(made.graph, config=config))


class Running:
    """A coordinator, a job, and the command line that knows them."""

    def __init__(self, folder: Path, cluster: Cluster, **settings: Any) -> None:
        self.folder, self.cluster = folder, cluster
        self.job = cluster.submit(plan(folder, **settings)).job_id
        eventually(lambda: cluster.completed(self.job) >= 1, "a checkpoint")
        self.flink = FlinkCommand(cluster.coordinator.url, TOKEN, folder)

    def path_told(self, text: str) -> Path:
        found = re.search(r"Savepoint completed\. Path: (\S+)", text)
        assert found is not None, text
        return Path(found[1].removeprefix("file:"))

    def restart_coordinator(self) -> None:
        self.cluster.restart_coordinator()
        self.flink = FlinkCommand(self.cluster.coordinator.url, TOKEN, self.folder)


@contextlib.contextmanager
def run(folder: Path, **settings: Any) -> Iterator[Running]:
    with contextlib.closing(Cluster(folder)) as cluster:
        yield Running(folder, cluster, **settings)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A job that no test ends."""
    with run(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A job of a test's own."""
    with run(tmp_path) as running:
        yield running


def test_list(shared: Running) -> None:
    for words in ((), ("-a",)):
        assert f" : {shared.job} : count (RUNNING)" in shared.flink.done("list", *words)
    assert "missing or wrong bearer token" in shared.flink.fails("list", token="another-token-of-length")


def test_savepoints_are_taken_and_disposed_of(shared: Running) -> None:
    """In the job's own directory, in one that the command names, and in both formats."""
    taken = [
        shared.path_told(shared.flink.done("savepoint", shared.job).text),
        shared.path_told(shared.flink.done("savepoint", "-type", "canonical", shared.job, shared.folder / "named").text),
    ]
    assert [path.parent.name for path in taken] == ["own", "named"]
    for path in taken:
        assert hf.Snapshot(path).verify().is_sound
        assert "disposed" in shared.flink.done("savepoint", "-d", path)
        assert not path.exists()


def test_a_detached_savepoint_is_taken(shared: Running) -> None:
    told = shared.flink.done("savepoint", "-detached", shared.job, shared.folder / "detached").text
    (trigger,) = re.findall(r"\b[0-9a-f]{32}\b", told.replace(shared.job, ""))
    status = f"/jobs/{shared.job}/savepoints/{trigger}"
    eventually(lambda: shared.cluster.client._get(status)["status"]["id"] == "COMPLETED", "the savepoint")


@pytest.mark.parametrize("kind", ["", "-full"])
def test_checkpoints_are_taken(shared: Running, kind: str) -> None:
    before = shared.cluster.completed(shared.job)
    assert re.search(r"Checkpoint\S* \d+ for job", shared.flink.done("checkpoint", shared.job, *filter(None, [kind])).text)
    assert shared.cluster.completed(shared.job) > before


@pytest.mark.parametrize("command", ["savepoint", "stop", "cancel", "checkpoint"])
def test_a_job_that_there_is_not(shared: Running, command: str) -> None:
    assert f"job {UNKNOWN} not found" in shared.flink.fails(command, UNKNOWN)


def test_savepoints_that_cannot_be_written(shared: Running) -> None:
    (shared.folder / "file").write_text("in the way")
    place = shared.folder / "file" / "savepoints"
    for words in (("savepoint", shared.job, place), ("stop", "-p", place, shared.job)):
        assert f"{shared.folder}/file is no directory" in shared.flink.fails(*words)
    assert "is not absolute" in shared.flink.fails("savepoint", shared.job, "relative")
    assert "lies in the directory of job" in shared.flink.fails("savepoint", shared.job, shared.cluster.state / shared.job)
    assert shared.cluster.state_of(shared.job) == "RUNNING"


def test_what_cannot_be_disposed_of(shared: Running) -> None:
    (shared.folder / "own").mkdir(exist_ok=True)
    checkpoints = shared.cluster.state / shared.job
    for path, words in (
        (shared.folder / "own" / "none", "holds no snapshot"),
        (shared.folder / "elsewhere" / "none", "lies in none of the directories"),
        (checkpoints / "chk-1", f"is a checkpoint of job {shared.job}, which deletes it by itself"),
    ):
        assert words in shared.flink.fails("savepoint", "-d", path)


def test_a_savepoint_that_takes_too_long(tmp_path: Path) -> None:
    with run(tmp_path, checkpoint_timeout_ms=2_000) as running:
        assert running.cluster.slots is not None
        pid = running.cluster.slots.pid(0)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert "expired: " in running.flink.fails("savepoint", running.job)
        os.kill(pid, signal.SIGCONT)


def test_stop_with_drain(running: Running) -> None:
    path = running.path_told(running.flink.done("stop", "--drain", "-p", running.folder / "drained", running.job).text)
    assert path.parent == running.folder / "drained"
    eventually(lambda: running.cluster.state_of(running.job) == "FINISHED", "the end")


def test_stop_ends_the_job_and_an_ended_job_takes_nothing_more(running: Running) -> None:
    path = running.path_told(running.flink.done("stop", running.job).text)
    assert path.parent == running.folder / "own"
    eventually(lambda: running.cluster.state_of(running.job) == "FINISHED", "the end")
    for restarted in (False, True):
        if restarted:
            running.restart_coordinator()
        assert f"{running.job} : count (FINISHED)" in running.flink.done("list", "-a")
        assert "No running jobs." in running.flink.done("list")
        words = f"job {running.job} is FINISHED" if restarted else "the job has ended, or is about to: it takes no more snapshots"
        for command in ("stop", "savepoint", "checkpoint"):
            assert words in running.flink.fails(command, running.job)
    assert "disposed" in running.flink.done("savepoint", "-d", path), "by the records of a job that ended before"
    assert not path.exists()


def test_cancel(running: Running) -> None:
    assert f"Cancelled job {running.job}" in running.flink.done("cancel", running.job)
    eventually(lambda: running.cluster.state_of(running.job) == "CANCELED", "the end")
    assert f"{running.job} : count (CANCELED)" in running.flink.done("list", "-a")


def test_cancel_with_a_savepoint(running: Running) -> None:
    """Deprecated by Flink for `stop`, and still there."""
    told = running.flink.done("cancel", "-s", running.folder / "last", running.job).text
    assert "savepoint-" in told
    eventually(lambda: running.cluster.state_of(running.job) == "CANCELED", "the end")
    (path,) = (running.folder / "last").glob("savepoint-*")
    assert hf.Snapshot(path).verify().is_sound
