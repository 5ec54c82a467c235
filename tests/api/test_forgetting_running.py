"""The certificate of a running job: what happens between the erasure and the certificate makes it incomplete."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from holdfast.api.cli.forgetting import run_forget_at
from holdfast.api.client import RestClient
from holdfast.api.snapshots import forgetting_running
from holdfast.api.snapshots.forgetting import Certificate
from holdfast.api.snapshots.forgetting_running import forget_running, judge_running
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.records import ClaimRecord, RestorePoint, SubmissionRecord, encode_record
from holdfast.coordinator.ownership.erasures import SHARED_BY_DRILLED
from holdfast.coordinator.ownership.labels import DRILLED, Mark, add_label, remove_label
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DeleteFolder, PutIfAbsent, run_flow
from tests.api.test_forgetting import EVERY, JOB, KEY, make_job, renumber
from tests.coordinator.doubles import word_count
from tests.statebackends.snapshot_harness import SOME, write

ERASED_AT = 7
PATHS = JobPaths(JOB)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job that runs, with checkpoint 7 as an erasure leaves it: whole, without the key, and no older one."""
    directory = make_job(tmp_path)
    (directory / PATHS.result(1)).unlink()
    for number in (6, ERASED_AT):
        shutil.rmtree(directory / PATHS.checkpoint(number))
    shutil.rmtree(directory / JOB / "shared", ignore_errors=True)
    claim = ClaimRecord(ERASED_AT, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(ERASED_AT), "n")
    LocalStorage(directory).execute(PutIfAbsent(PATHS.claim(ERASED_AT), encode_record(claim)))
    written = write(tmp_path, PATHS.checkpoint(ERASED_AT), SOME, canonical=True, storage=LocalStorage(directory), parallelism=2)
    renumber(written, ERASED_AT)
    return tmp_path


def submit(root: Path, base: RestorePoint | None) -> None:
    graph = word_count(retained_checkpoints=2)
    record = SubmissionRecord(2, 1, Submission(graph, job_id=JOB), base, ERASED_AT + 1, "m")
    LocalStorage(root / "state").execute(PutIfAbsent(PATHS.submission(2), encode_record(record)))


def test_what_an_erasure_leaves_is_certified(root: Path) -> None:
    certificate = forget_running(root / "state", JOB, EVERY, KEY, ERASED_AT)
    assert certificate.is_complete, certificate.kept
    assert certificate.erased_at == ERASED_AT


@pytest.mark.parametrize("base", [None, RestorePoint(ERASED_AT, PATHS.checkpoint(ERASED_AT), 1)])
def test_before_the_newest_submission_has_a_checkpoint_its_states_are_not_known(root: Path, base: RestorePoint | None) -> None:
    """It may have another graph: what an older submission's checkpoint has says nothing of it."""
    with pytest.raises(NotFoundError, match="has no operator 'nope'"):
        judge_running(root / "state", JOB, [("nope", "*")], KEY)
    judge_running(root / "state", JOB, EVERY, KEY)
    submit(root, base)
    judge_running(root / "state", JOB, [("nope", "*")], KEY)


class Answering:
    """A client whose coordinator has made a certificate."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate

    def forget(self, *_: object, **__: object) -> object:
        return msgspec.to_builtins(self._certificate)


def test_the_command_names_no_checkpoint_to_restore_from_that_retention_is_about_to_delete(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = forget_running(root / "state", JOB, EVERY, KEY, ERASED_AT)
    client = cast(RestClient, Answering(certificate))
    assert run_forget_at(client, JOB, EVERY[0], (KEY, None, False), "", None, keep_history=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "erased at      the barrier of checkpoint 7"
    assert lines[1] == "restore from   the job's newest checkpoint (restore='latest'), 7 or a later one"
    assert lines[2] == f"read back      {certificate.result}, which retention deletes as newer ones complete"


DRILLING = f"drilling{'0f' * 8}"
OLDER = f"{JOB}/chk-6"


@pytest.fixture
def labelled(root: Path) -> Path:
    """The same, with an older checkpoint that a drill's label keeps from the leader."""
    storage = LocalStorage(root / "state")
    claim = ClaimRecord(6, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(6), "n")
    storage.execute(PutIfAbsent(PATHS.claim(6), encode_record(claim)))
    renumber(write(root, PATHS.checkpoint(6), SOME, storage=storage, parallelism=2), 6)
    run_flow(add_label(PATHS, 6, DRILLING, Mark("n", 1)), storage)
    return root


def sleep_with(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], object]) -> None:
    """Only the module's own sleep: other threads of the process sleep as they do, py4j's among them."""
    monkeypatch.setattr(forgetting_running, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))


def test_a_drill_of_an_older_one_is_waited_for(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its label goes with it, and then the leader drops the checkpoint."""
    storage, looks = LocalStorage(labelled / "state"), 0

    def passing(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            run_flow(remove_label(PATHS, DRILLING, Mark("n", 2), 6), storage)
        if looks == 4:
            storage.execute(DeleteFolder(PATHS.checkpoint(6)))

    sleep_with(monkeypatch, passing)
    certificate = forget_running(labelled / "state", JOB, EVERY, KEY, ERASED_AT)
    assert certificate.is_complete, certificate.kept
    assert looks == 4


@pytest.mark.parametrize("user", [False, True])
def test_the_certificate_tells_a_drill_from_a_label(labelled: Path, monkeypatch: pytest.MonkeyPatch, *, user: bool) -> None:
    storage = LocalStorage(labelled / "state")
    storage.execute(PutIfAbsent(f"{PATHS.shared}/6-1-op-0-n-000004.sst", b"x"))
    if user:
        run_flow(add_label(PATHS, 6, "audit", Mark("n", 2)), storage)
        sleep_with(monkeypatch, lambda _: pytest.fail("nothing passes here by itself"))
    certificate = forget_running(labelled / "state", JOB, EVERY, KEY, ERASED_AT, drops_seconds_max=60.0 if user else 0.0)
    assert not certificate.is_complete
    checkpoint, shared = (why for place, why in sorted(certificate.kept.items()) if JOB in place)
    assert checkpoint == ("a label keeps it" if user else DRILLED)
    assert shared == ("a checkpoint that is kept refers to it" if user else SHARED_BY_DRILLED)
    assert "audit" not in str(certificate.kept), "the names of labels are users' texts"


@pytest.mark.parametrize("older", ["savepoint", "checkpoint", "another job's"])
def test_a_submission_from_an_older_snapshot_brings_the_key_back(root: Path, older: str) -> None:
    folders = {
        "savepoint": (4, str(root / "savepoints" / "savepoint-4")),
        "checkpoint": (6, PATHS.checkpoint(6)),
        "another job's": (70, str(root / "elsewhere" / "savepoint-70")),
    }
    number, folder = folders[older]
    submit(root, RestorePoint(number, folder, 1, explicit=True))
    certificate = forget_running(root / "state", JOB, EVERY, KEY, ERASED_AT)
    assert not certificate.is_complete
    (why,) = (why for place, why in certificate.kept.items() if place.endswith("/submissions/2.json"))
    assert "from a snapshot that may hold the key" in why


@pytest.mark.parametrize("base", [None, RestorePoint(ERASED_AT, PATHS.checkpoint(ERASED_AT), 1)])
def test_a_submission_that_is_empty_or_goes_on_from_it_does_not(root: Path, base: RestorePoint | None) -> None:
    submit(root, base)
    certificate = forget_running(root / "state", JOB, EVERY, KEY, ERASED_AT)
    assert certificate.is_complete, certificate.kept
