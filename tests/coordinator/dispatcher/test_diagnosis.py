"""Explanations and health of jobs that a coordinator leads, or has on record."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.barriers.messages import TaskState
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.reading import diagnosis
from holdfast.coordinator.explain.records import CauseKind, Verdict
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.errors import NotFoundError, StorageUnavailableError
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import ListFolder
from tests.coordinator.doubles import Crew, leading, submission, wait_until, word_count

UNKNOWN = "e" * 32


def running(service: CoordinatorService, **settings: Any) -> Crew:
    """A job whose tasks all run."""
    crew = Crew(service, service.submit(submission(word_count(**settings))).job_id, 2)
    crew.register()
    crew.until(lambda: service.job(crew.job_id).vertices[0].state is TaskState.RUNNING, what="running tasks")
    return crew


def test_a_job_from_its_first_checkpoint_to_its_end_and_after_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    root = str(tmp_path / "state")
    service = leading(ServiceConfig(root, seed=1))
    crew = running(service, checkpoint_interval_ms=20, retention_on_cancel="retain", retained_checkpoints=100)
    job_id = crew.job_id
    crew.until_completed(4)
    found = service.explain(job_id, service.checkpoints(job_id).history[-1].checkpoint_id)
    assert (found.is_usual, found.first_cause.kind, found.setting) == (True, CauseKind.USUAL, None)
    assert {view.phase.value for view in found.phases} >= {"start_delay", "sync", "acknowledge", "decide"}
    health = service.health(job_id)
    assert (health.state, health.verdict, health.safe.interval_ms) == ("RUNNING", Verdict.OK, 20)
    newest = service.checkpoint(job_id, health.resume.checkpoint_id)
    assert health.resume.location == f"{root}/{newest.location}"
    assert (Path(health.resume.location) / "_metadata").is_file()
    with pytest.raises(NotFoundError, match="shows no checkpoint 9999"):
        service.explain(job_id, 9_999)
    service.cancel(job_id)
    crew.until_state("CANCELED")
    assert service.explain(job_id).first_cause.kind is CauseKind.STOPPED
    ended = service.health(job_id)
    assert (ended.verdict, ended.resume.checkpoint_id > 0) == (Verdict.OK, True)
    service.close()

    service = leading(ServiceConfig(root, seed=2))
    recorded = service.health(job_id)
    assert (recorded.verdict, recorded.state) == (Verdict.OK, "CANCELED")
    assert recorded.resume.location == ended.resume.location
    assert service.explain(job_id).first_cause.kind is CauseKind.STOPPED
    of_one = service.explain(job_id, recorded.resume.checkpoint_id)
    assert (of_one.is_usual, of_one.compared >= 3) == (True, True), "as the history has it"
    assert {view.phase.value for view in of_one.phases} >= {"start_delay", "sync", "acknowledge", "decide"}
    with pytest.raises(NotFoundError):
        service.explain(job_id, 9_999)
    service.close()


def test_behind_a_stop_the_savepoint_is_what_the_job_keeps(tmp_path: Path) -> None:
    root = str(tmp_path / "state")
    service = leading(ServiceConfig(root, seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_interval_ms=20)
    job_id = crew.job_id
    crew.until_completed(2)
    service.add_label(job_id, service.health(job_id).resume.checkpoint_id, "mine")
    trigger = service.stop(job_id, str(tmp_path / "savepoints"))
    crew.until_state("FINISHED")
    stopped = service.trigger_status(job_id, trigger)
    found = service.health(job_id)
    assert (found.resume.checkpoint_id, found.resume.location) == (stopped.checkpoint_id, stopped.location)
    assert (found.verdict, found.safe.checkpoint_id) == (Verdict.OK, stopped.checkpoint_id)
    assert found.resume.why == f"it keeps stop-savepoint {stopped.checkpoint_id}; the job has ended: FINISHED"
    service.close()
    service = leading(ServiceConfig(root, seed=2))
    recorded = service.health(job_id)
    assert (recorded.resume.why, recorded.resume.location) == (found.resume.why, found.resume.location)
    assert recorded.safe.checkpoint_id == stopped.checkpoint_id
    assert recorded.safe.age_ms < 3_600_000, "since its trigger"
    (Path(found.resume.location) / "_metadata").unlink()
    wait_until(lambda: service.health(job_id).resume.checkpoint_id == -1, lambda: None)
    assert "not in storage any more" in service.health(job_id).safe.why
    service.close()


def test_of_a_job_whose_end_drops_its_checkpoints_only_what_a_label_keeps_is_told(tmp_path: Path) -> None:
    root = str(tmp_path / "state")
    service = leading(ServiceConfig(root, seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_interval_ms=20, retention_on_cancel="delete")
    job_id = crew.job_id
    crew.until_completed(2)
    number = service.health(job_id).resume.checkpoint_id
    service.add_label(job_id, number, "mine")
    crew.until_completed(5)
    service.cancel(job_id)
    crew.until_state("CANCELED")
    found = service.health(job_id).resume
    assert (found.checkpoint_id, found.why) == (number, f"it keeps checkpoint {number}; the job has ended: CANCELED")
    assert (Path(found.location) / "_metadata").is_file()
    service.close()

    service = leading(ServiceConfig(root, seed=2))
    recorded = service.health(job_id).resume
    assert (recorded.why, recorded.location) == (found.why, found.location)
    service.remove_label(job_id, "mine")
    wait_until(lambda: "keeps no checkpoint" in service.health(job_id).resume.why, lambda: None, what="the end of the label")
    service.close()


def test_when_its_last_label_goes_an_ended_job_keeps_nothing(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_interval_ms=20, retention_on_cancel="delete")
    job_id = crew.job_id
    crew.until_completed(2)
    number = service.health(job_id).resume.checkpoint_id
    service.add_label(job_id, number, "mine")
    service.cancel(job_id)
    crew.until_state("CANCELED")
    assert service.health(job_id).resume.checkpoint_id == number
    service.remove_label(job_id, "mine")
    wait_until(lambda: "keeps no checkpoint" in service.health(job_id).resume.why, crew.pump, what="the end of the label")
    assert service.health(job_id).resume.checkpoint_id == -1
    service.close()


def test_paused_checkpoints_are_explained_with_the_command_that_brings_them_back(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(2)
    service.change_settings(crew.job_id, {"checkpoint_interval_ms": None})
    crew.until(lambda: service.checkpoints(crew.job_id).counts.in_progress == 0, what="no pending checkpoint")
    found = service.explain(crew.job_id)
    assert (found.subject, found.first_cause.kind) == ("missing", CauseKind.PAUSED)
    assert found.setting is not None
    assert (found.setting.name, found.setting.old, found.setting.new) == ("checkpoint_interval_ms", None, 20)
    assert service.health(crew.job_id).safe.verdict is Verdict.AT_RISK
    service.change_settings(crew.job_id, {found.setting.name: found.setting.new})
    count = service.checkpoints(crew.job_id).counts.completed
    crew.until_completed(count + 1)
    service.close()


def test_a_checkpoint_whose_acknowledgements_do_not_come(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    crew = running(service, checkpoint_interval_ms=20, checkpoint_timeout_ms=60, tolerable_failed_checkpoints=1_000)
    crew.until_completed(3)
    crew.workers[1].acknowledges = False
    crew.until(lambda: service.checkpoints(crew.job_id).counts.failed >= 1, what="an expired checkpoint")
    latest = service.checkpoints(crew.job_id).latest_failed
    assert latest is not None
    found = service.explain(crew.job_id, latest.checkpoint_id)
    assert (found.subject, found.is_usual) == ("failed", False)
    assert [cause.kind for cause in found.causes][:2] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS]
    assert "subtask 1 on localhost (RUNNING)" in found.causes[1].text
    assert service.health(crew.job_id).safe.verdict is not Verdict.OK, "checkpoints in a row fail"
    service.close()


def test_the_next_leader_explains_what_it_has_not_seen_and_compares_with_it(tmp_path: Path) -> None:
    root = str(tmp_path / "state")
    service = leading(ServiceConfig(root, seed=1))
    crew = running(service, checkpoint_interval_ms=20)
    job_id = crew.job_id
    crew.until_completed(6)
    number = service.checkpoints(job_id).history[-1].checkpoint_id + 3
    service.close()

    again = leading(ServiceConfig(root, seed=2, view_interval_ms=0))
    with pytest.raises(NotFoundError):
        again.checkpoint(job_id, number)
    found = again.explain(job_id, number)
    assert (found.subject, found.checkpoint_id, found.is_usual) == ("completed", number, True)
    assert {view.phase.value for view in found.phases} >= {"start_delay", "sync", "acknowledge", "decide"}
    assert found.compared >= 3
    successors = Crew(again, job_id, 2)
    successors.register()
    successors.until_completed(1)
    again.change_settings(job_id, {"checkpoint_interval_ms": None})
    newest = again.checkpoints(job_id).latest_completed
    assert newest is not None
    assert again.explain(job_id, newest.checkpoint_id).compared >= 6, "its own first one, beside those of the leader before"
    with pytest.raises(NotFoundError, match="nor was it found in the job's history"):
        again.explain(job_id, 9_999)
    again.close()


class HangingHistory(LocalStorage):
    """Storage that stops answering where a history is listed."""

    released = threading.Event()

    def execute(self, operation: Any) -> Any:
        if isinstance(operation, ListFolder) and operation.prefix.endswith("history"):
            self.released.wait(30)
        return super().execute(operation)


def test_a_history_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "HISTORY_WAIT_S", 0.1)
    storage = HangingHistory(str(tmp_path / "state"))
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1), storage)
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(2)
    for _ in range(4):
        with pytest.raises(StorageUnavailableError, match=r"was not read within 0.1 s|histories are being read"):
            service.explain(crew.job_id, 9_999)
    assert service.explain(crew.job_id).checkpoint_id > 0
    storage.released.set()
    wait_until(lambda: _answers(service, crew.job_id), crew.pump, what="a history that is read again")
    service.close()


def _answers(service: CoordinatorService, job_id: str) -> bool:
    try:
        service.explain(job_id, 9_999)
    except NotFoundError:
        return True
    except StorageUnavailableError:
        return False
    return False


def test_a_job_without_workers(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    job_id = service.submit(submission(word_count())).job_id
    assert service.explain(job_id).first_cause.kind is CauseKind.WAITS_FOR_WORKERS
    found = service.health(job_id)
    assert (found.verdict, found.safe.checkpoint_id) == (Verdict.AT_RISK, -1)
    service.close()


def test_an_unknown_job(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    for ask in (service.health, service.explain):
        with pytest.raises(NotFoundError):
            ask(UNKNOWN)
    service.close()
