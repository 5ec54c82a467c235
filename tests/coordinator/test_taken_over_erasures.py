"""A leader that dies behind the completion of an erasure: its successor finds in the claims that older checkpoints are to go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.erasure import Erasure
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedCheckpoint, RecordedJob, Unreadable
from holdfast.coordinator.ha.records import ClaimRecord, OwnerRecord, decode_record
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.erasures import find_older
from holdfast.coordinator.ownership.labels import DRILLED
from holdfast.coordinator.restore.plan import derive_setup
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import Crew, leading, submission, wait_until, word_count

ERASURE = Erasure.of([("nobody", "*")], "secret")
"""The doubles store nothing of it."""
Open = Callable[[], CoordinatorService]


@pytest.fixture
def open_service(tmp_path: Path) -> Iterator[Open]:
    opened: list[CoordinatorService] = []

    def make() -> CoordinatorService:
        opened.append(leading(ServiceConfig(str(tmp_path / "state"), seed=len(opened), view_interval_ms=0)))
        return opened[-1]

    yield make
    for service in opened:
        service.close()


def erased(service: CoordinatorService, *, label: str = "") -> tuple[Crew, int]:
    """A job with older checkpoints, one of which may have a label, and the id of the one at whose cut a key left it."""
    graph = word_count(checkpoint_interval_ms=20, retained_checkpoints=5)
    accepted = service.submit(submission(graph))
    crew = Crew(service, accepted.job_id, accepted.slots)
    crew.register()
    crew.until_completed(3)
    if label:
        newest = service.checkpoints(crew.job_id).latest_completed
        assert newest is not None
        service.add_label(crew.job_id, newest.checkpoint_id, label)
    trigger = service.erase_key(crew.job_id, ERASURE)
    crew.until(lambda: not service.trigger_status(crew.job_id, trigger).in_progress, what="the erasure")
    found = service.trigger_status(crew.job_id, trigger)
    assert found.failure is None
    assert found.checkpoint_id is not None
    return crew, found.checkpoint_id


def recorded(root: Path, job_id: str) -> RecordedJob:
    return run_flow(read_job(JobPaths(job_id)), LocalStorage(root / "state"))


def setup_of(job: RecordedJob) -> tuple[int, int]:
    """(newest id that was to erase a key, what is below which is to go) as a new leader finds them."""
    found = derive_setup(job, job.submissions[max(job.submissions)], epoch=9, directory_nonce="n")
    return found.erasing, found.erased


def older(root: Path, job_id: str, number: int) -> dict[str, str]:
    return run_flow(find_older(JobPaths(job_id), number), LocalStorage(root / "state"))


def without_drops(patched: pytest.MonkeyPatch) -> None:
    """A leader that does nothing any more behind the completion of an erasure."""
    drop = CheckpointCoordinator._drop

    def kept(self: CheckpointCoordinator, drops: Any) -> None:
        drop(self, [] if self._newest_erasure else drops)

    patched.setattr(CheckpointCoordinator, "_drop", kept)


def pause() -> None:
    threading.Event().wait(0.02)


def test_the_next_leader_drops_what_may_hold_the_key(open_service: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        without_drops(patched)
        first = open_service()
        crew, number = erased(first)
        first.close()
    assert older(tmp_path, crew.job_id, number), "it died before it had dropped them"
    second = open_service()
    wait_until(lambda: not older(tmp_path, crew.job_id, number), pause, timeout_s=30, what="the drops of older checkpoints")
    job = recorded(tmp_path, crew.job_id)
    assert job.checkpoints[number].fact is CheckpointFact.COMPLETED, "no checkpoint came behind it: retention had nothing to drop"
    crew.service = second
    for worker in crew.workers:
        worker.service = second
        worker.register()
    crew.until_state("RUNNING")
    crew.until_completed(1)


def test_a_claim_says_that_a_key_goes_and_not_which(open_service: Open, tmp_path: Path) -> None:
    crew, number = erased(open_service())
    content = (tmp_path / "state" / crew.job_id / f"chk-{number}" / "_claim").read_bytes()
    assert decode_record(ClaimRecord, content, "_claim").erases
    assert b"secret" not in content
    without = msgspec.json.decode(content)
    del without["erases"]
    assert not decode_record(ClaimRecord, msgspec.json.encode(without), "_claim").erases, "as older versions have written it"


def test_the_next_leader_knows_of_an_erasure_whose_checkpoint_is_gone(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew, number = erased(service)
    crew.until(lambda: number not in recorded(tmp_path, crew.job_id).checkpoints, what="retention drops the one that erased")
    crew.until_completed(1)
    service.close()
    job = recorded(tmp_path, crew.job_id)
    claims = {each.checkpoint_id: each.claim for each in job.with_fact(CheckpointFact.COMPLETED)}
    assert claims
    assert min(claims) > number
    assert {each.erased_below for each in claims.values() if each is not None} == {number}
    assert setup_of(job) == (0, number)

    def as_written_before(entry: RecordedCheckpoint) -> RecordedCheckpoint:
        assert entry.claim is not None
        return msgspec.structs.replace(entry, claim=msgspec.structs.replace(entry.claim, erased_below=0))

    before = {each: as_written_before(entry) for each, entry in job.checkpoints.items()}
    assert setup_of(replace(job, checkpoints=before)) == (0, 0), "claims of older versions say nothing"
    for each in list(claims):
        undecidable = msgspec.structs.replace(job.checkpoints[each], decision=Unreadable("x"))
        job = replace(job, checkpoints={**job.checkpoints, each: undecidable})
    assert setup_of(job) == (0, 0), "the older ones may be all that is left to recover from"


def test_a_labelled_older_one_goes_with_its_label_though_the_one_that_erased_is_gone(open_service: Open, tmp_path: Path) -> None:
    """Whichever leads by then, and however many retention would keep."""
    service = open_service()
    crew, number = erased(service, label="mine")
    crew.until(lambda: number not in recorded(tmp_path, crew.job_id).checkpoints, what="retention drops the one that erased")
    service.close()
    (kept,) = older(tmp_path, crew.job_id, number).values()
    assert kept == "a label keeps it"
    job = recorded(tmp_path, crew.job_id)
    labelled = min(job.checkpoints)
    setup = derive_setup(job, job.submissions[1], epoch=9, directory_nonce="n")
    store = CompletedCheckpointStore(10, setup.completed, erased_below=setup.erased)
    store.note_labels(labelled, labelled=True)
    assert labelled not in {drop.checkpoint_id for drop in store.take_drops()}
    store.note_labels(labelled, labelled=False)
    assert [drop.checkpoint_id for drop in store.take_drops()] == [labelled]


def test_an_older_one_goes_as_soon_as_its_drill_has_ended(open_service: Open, tmp_path: Path) -> None:
    service, drilling = open_service(), f"drilling{'0f' * 8}"
    crew, number = erased(service, label=drilling)

    def reasons() -> set[str]:
        return set(older(tmp_path, crew.job_id, number).values())

    wait_until(lambda: reasons() == {DRILLED}, pause, timeout_s=30, what="the others' drops")
    service.remove_label(crew.job_id, drilling)
    wait_until(lambda: not older(tmp_path, crew.job_id, number), pause, timeout_s=30, what="the drop of the one that was drilled")


def test_a_claim_says_nothing_of_ids_above_its_own(open_service: Open, tmp_path: Path) -> None:
    """A damaged one must not have its own checkpoint dropped."""
    service = open_service()
    crew, number = erased(service)
    service.close()
    job = recorded(tmp_path, crew.job_id)
    entry = job.checkpoints[number]
    assert entry.claim is not None
    above = msgspec.structs.replace(entry, claim=msgspec.structs.replace(entry.claim, erased_below=10**9, erases=False))
    assert setup_of(replace(job, checkpoints={number: above})) == (0, number)


def test_one_that_can_not_be_read_or_is_another_jobs_drops_nothing(open_service: Open, tmp_path: Path) -> None:
    """What a job would recover from then are the older ones."""
    service = open_service()
    crew, number = erased(service)
    service.close()
    job = recorded(tmp_path, crew.job_id)
    assert setup_of(job) == (number, number)
    entry = job.checkpoints[number]
    damaged = msgspec.structs.replace(entry, decision=Unreadable("x"))
    unreadable = replace(job, checkpoints={**job.checkpoints, number: damaged})
    assert setup_of(unreadable) == (number, 0)
    given = OwnerRecord("other", "d", "n")
    assert setup_of(replace(job, given={number: given})) == (number, 0)
