"""Checkpoints are explained when they end, and shown so later: by the leader that saw it and by those behind it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import (
    CodeLine,
    QuestionKind,
    RegisterWorker,
    SampledStack,
    SubtaskKey,
    TaskState,
    WorkerAnswer,
    WorkerQuestion,
)
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher import job_explanations
from holdfast.coordinator.dispatcher.job_explanations import EndedCheckpoint, JobExplanations
from holdfast.coordinator.dispatcher.published import PublishedJob, capture
from holdfast.coordinator.dispatcher.reading import explainer
from holdfast.coordinator.dispatcher.reading.explainer import EndedCheckpointExplainer
from holdfast.coordinator.dispatcher.reading.recollection import SETTLED_MS, Recollection
from holdfast.coordinator.dispatcher.reading.situations import answers_of
from holdfast.coordinator.explain import schedule
from holdfast.coordinator.explain.records import Cause, CauseKind, Explanation
from holdfast.coordinator.history.checkpoints import EXPLAINED_WITHIN_MS
from holdfast.coordinator.history.records import encode_line
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.coordinator.service import CoordinatorService
from holdfast.coordinator.views import AnswerView
from holdfast.statebackends.errors import StorageUnavailableError, WorkerSilentError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.coordinator.doubles import Crew, FakeWorker, leading, submission, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB, DictStorage

CODE = (
    CodeLine("main", "/spark/worker.py", 7),
    CodeLine("Worker.run_once", "/p/loop.py", 10, own=True),
    CodeLine("Prices.look_up", "/jobs/prices.py", 42),
)
NAMED = "was in Prices.look_up (/jobs/prices.py:42) in 20 of 20 looks over 950 ms"


class AskedWorker(FakeWorker):
    """A worker whose control thread answers questions for stacks: a step of its second vertex does not end."""

    answers_questions = True

    def registration(self) -> RegisterWorker:
        message = super().registration()
        return RegisterWorker(**{**{name: getattr(message, name) for name in message.__struct_fields__}, "questions": ("stacks",)})

    def pump(self, timeout_s: float = 0.005) -> None:
        if self.stream is None:
            return
        numbered = self.stream.get(timeout_s)
        while numbered is not None:
            if numbered.command is not None:
                self._follow(numbered.command)
            elif isinstance(numbered.question, WorkerQuestion) and self.answers_questions:
                self._say(numbered.question)
            numbered = self.stream.get(0)

    def _say(self, question: WorkerQuestion) -> None:
        assert self.registered is not None
        vertex = self.deployment.graph.vertices[1].vertex_id if self.deployment is not None else ""
        stack = SampledStack("MainThread", (0, 1, 2), 20, 0, 20, vertex, self.slot)
        answer = WorkerAnswer(
            self.registered.epoch,
            self.slot,
            self.registered.session,
            self.attempt,
            question.id,
            QuestionKind.STACKS.value,
            samples=20,
            sampled_ms=950,
            code=CODE,
            stacks=(stack,),
        )
        self.service.answer_async(self.job_id, answer)


def running(service: CoordinatorService, **settings: Any) -> Crew:
    """A job whose tasks all run, and that has completed some checkpoints."""
    crew = Crew(service, service.submit(submission(word_count(checkpoint_interval_ms=20, **settings))).job_id, 2)
    crew.workers = [AskedWorker(service, crew.job_id, slot) for slot in range(2)]
    crew.register()
    crew.until(lambda: service.job(crew.job_id).vertices[0].state is TaskState.RUNNING, what="running tasks")
    crew.until_completed(4)
    return crew


def newest_failed(service: CoordinatorService, crew: Crew) -> int:
    crew.until(lambda: service.checkpoints(crew.job_id).counts.failed >= 1, what="a failed checkpoint")
    found = service.checkpoints(crew.job_id).latest_failed
    assert found is not None
    return found.checkpoint_id


def until_kept(service: CoordinatorService, crew: Crew, number: int) -> Explanation:
    crew.until(lambda: service.explain(crew.job_id, number).explained_ms >= 0, what="a kept explanation")
    return service.explain(crew.job_id, number)


def recorded(service: CoordinatorService, job_id: str) -> list[int]:
    """Ids of explanations that were recorded, written or not."""
    lines = [json.loads(each.line) for each in service.feed.read(0, 10_000).records if each.job_id == job_id]
    return [each["facts"]["id"] for each in lines if each["kind"] == "explanation"]


@pytest.mark.parametrize("tolerable", [0, 1_000], ids=["its end fences the attempt", "the attempt goes on"])
def test_one_that_expired_since_a_function_hung_names_it_in_the_morning_too(tmp_path: Path, tolerable: int) -> None:
    root = str(tmp_path / "state")
    service = leading(ServiceConfig(root, seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=2_500, tolerable_failed_checkpoints=tolerable)
    job_id = crew.job_id
    crew.workers[1].acknowledges = False
    number = newest_failed(service, crew)
    crew.workers[1].acknowledges = True
    found = until_kept(service, crew, number)
    assert [cause.kind for cause in found.causes][:2] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS]
    assert (found.first_cause.kind, found.first_cause.text.endswith(NAMED)) == (CauseKind.IN_FUNCTION, True)
    assert (found.subject, found.is_usual, found.job_name) == ("failed", False, "word count")
    view = service.checkpoint(job_id, number)
    assert view.trigger_ms < found.explained_ms < view.failure_ms, "what was seen before its end"
    count = service.checkpoints(job_id).counts.completed
    crew.until_completed(count + 5)
    assert service.explain(job_id, number) == found
    service.close()

    again = leading(ServiceConfig(root, seed=2))
    assert again.explain(job_id, number) == found, "the same from the history, by another leader"
    kinds = [each.kind for each in again.history(job_id, HistoryQuery(kinds=frozenset({"explanation"}))).entries]
    assert kinds == ["explanation"]
    again.close()


def test_a_worker_that_does_not_answer_harms_nothing(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=2_500, tolerable_failed_checkpoints=1_000)
    for worker in crew.workers:
        assert isinstance(worker, AskedWorker)
        worker.answers_questions = False
    crew.workers[1].acknowledges = False
    found = until_kept(service, crew, newest_failed(service, crew))
    assert CauseKind.IN_FUNCTION not in {cause.kind for cause in found.causes}
    assert [cause.kind for cause in found.causes][:2] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS]
    service.close()


def test_a_slow_one_is_kept_and_those_that_are_well_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "KEPT_INTERVAL_MS", 0)  # a busy machine may have made another one slow before
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service)
    job_id, late = crew.job_id, crew.workers[1]
    late.acknowledges = False
    triggered = len(late.triggered)
    crew.until(lambda: len(late.triggered) > triggered, what="a trigger")
    number = late.triggered[-1].checkpoint_id
    crew.until(lambda: service.job(job_id).now_ms - service.checkpoint(job_id, number).trigger_ms > 1_200, what="a long time")
    late.acknowledge(number)
    late.acknowledges = True
    found = until_kept(service, crew, number)
    assert (found.subject, found.causes[0].kind, found.checkpoint_id) == ("completed", CauseKind.SLOW, number)
    crew.until_completed(service.checkpoints(job_id).counts.completed + 10)
    kept = recorded(service, job_id)
    assert kept.count(number) == 1
    assert {service.explain(job_id, each).causes[0].kind for each in kept} == {CauseKind.SLOW}, "on a busy machine others may be"
    assert service.explain(job_id, number).causes == found.causes
    service.close()


def test_a_job_that_fails_all_the_time_is_explained_once(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=400, tolerable_failed_checkpoints=1_000)
    crew.workers[1].acknowledges = False
    crew.until(lambda: len(recorded(service, crew.job_id)) == 1, what="an explanation")
    failed = service.checkpoints(crew.job_id).counts.failed
    crew.until(lambda: service.checkpoints(crew.job_id).counts.failed >= failed + 5, what="further failures")
    assert len(recorded(service, crew.job_id)) == 1
    service.close()


def test_a_leader_that_died_before_its_record_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndedCheckpointExplainer, "explain", lambda *_: None)
    root = str(tmp_path / "state")
    service = leading(ServiceConfig(root, seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=400, tolerable_failed_checkpoints=1_000)
    crew.workers[1].acknowledges = False
    number = newest_failed(service, crew)
    assert service.explain(crew.job_id, number).explained_ms == -1
    service.close()
    again = leading(ServiceConfig(root, seed=2))
    found = again.explain(crew.job_id, number)
    assert (found.explained_ms, found.first_cause.kind) == (-1, CauseKind.NOT_KNOWN)
    assert found.first_cause.text == "what they did then is not on record"
    again.close()


@pytest.mark.parametrize("broken", ["capture", "explain"])
def test_an_error_of_explaining_is_not_the_job_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(job_explanations if broken == "capture" else explainer, broken, fail)
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=400, tolerable_failed_checkpoints=1_000)
    crew.workers[1].acknowledges = False
    number = newest_failed(service, crew)
    crew.workers[1].acknowledges = True
    crew.until_completed(service.checkpoints(crew.job_id).counts.completed + 5)
    assert service.explain(crew.job_id, number).explained_ms == -1, "among the newest 20"
    records = [json.loads(each.line) for each in service.feed.read(0, 10_000).records]
    assert records[-1]["kind"] == "checkpoint", "the history goes on"
    service.close()


def test_without_a_history_nothing_is_explained(tmp_path: Path) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, history=False))
    crew = running(service, checkpoint_timeout_ms=400, tolerable_failed_checkpoints=1_000)
    crew.workers[1].acknowledges = False
    assert service.explain(crew.job_id, newest_failed(service, crew)).explained_ms == -1
    service.close()


# ------------------------------------------------------------------------------------------------------------- pieces


def said(attempt: int) -> Future[AnswerView]:
    future: Future[AnswerView] = Future()
    future.set_result(AnswerView(WorkerAnswer(1, 0, "s", attempt, "q", "stacks"), 5))
    return future


def test_what_a_worker_says_of_another_attempt_is_dropped() -> None:
    silent: Future[AnswerView] = Future()
    silent.set_exception(WorkerSilentError("it did not answer in time", slot=2))
    asked = ((SubtaskKey("a", 0), said(3)), (SubtaskKey("a", 1), said(4)), (SubtaskKey("a", 2), silent))
    assert [key.subtask for key, _ in answers_of(asked, attempt=3)] == [0]
    assert [key.subtask for key, _ in answers_of(asked)] == [0, 1]


def told(made: EndedCheckpointExplainer, ended: EndedCheckpoint) -> str:
    """What becomes of a checkpoint that is to be explained."""
    outcomes: list[str] = []
    made.explain(ended, lambda _: outcomes.append("explained"), lambda: outcomes.append("dropped"))
    made._waiting.put(made.close)
    made.watch()
    assert len(outcomes) == 1
    return outcomes[0]


def published() -> PublishedJob:
    rig = Rig().run()
    rig.checkpoint()
    return capture(rig.master, 0, 0, monotonic_ms=0)


def test_what_is_not_explained_is_dropped_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    job = published()
    usual = job.checkpoints().history[0]
    slow = replace(usual, end_to_end_ms=10**6)

    def fresh() -> EndedCheckpointExplainer:
        return EndedCheckpointExplainer(None, Recollection(DictStorage(), WallClock()), "/root")  # type: ignore[arg-type]

    assert told(fresh(), EndedCheckpoint(slow, job)) == "explained"
    assert told(fresh(), EndedCheckpoint(usual, job)) == "dropped", "all is usual"
    monkeypatch.setattr(explainer, "WAITED_MAX_S", -1.0)
    assert told(fresh(), EndedCheckpoint(slow, job)) == "dropped", "it has waited too long"
    monkeypatch.setattr(explainer, "WAITING_MAX", 1)
    full, outcomes = fresh(), list[str]()
    full._waiting.put(None)
    full.explain(EndedCheckpoint(slow, job), lambda _: outcomes.append("explained"), lambda: outcomes.append("dropped"))
    assert outcomes == ["dropped"], "there is no room"


def test_one_that_is_dropped_leaves_its_minute_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explain, dropped_ids = EndedCheckpointExplainer.explain, list[int]()

    def drop_two(self: EndedCheckpointExplainer, ended: EndedCheckpoint, explained: Any, dropped: Any) -> None:
        if len(dropped_ids) == 2:
            explain(self, ended, explained, dropped)
            return
        dropped_ids.append(ended.checkpoint.checkpoint_id)
        dropped()

    monkeypatch.setattr(EndedCheckpointExplainer, "explain", drop_two)
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=400, tolerable_failed_checkpoints=1_000)
    crew.workers[1].acknowledges = False
    crew.until(lambda: len(recorded(service, crew.job_id)) == 1, what="an explanation")
    assert recorded(service, crew.job_id)[0] > max(dropped_ids)
    service.close()


def test_an_explanation_whose_record_can_t_be_read_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    posted: list[Any] = []
    made = JobExplanations(None, WallClock(), posted.append, posted.append)  # type: ignore[arg-type]
    made._explained(replace(explained_slow(), checkpoint_id=0))
    assert posted == []
    assert f"job {JOB}: the explanation of checkpoint 0 is not kept" in caplog.text


def explained_slow() -> Explanation:
    return Explanation(JOB, "word count", 7, "completed", False, "it was slow", (), (Cause(CauseKind.SLOW, "it was slow"),))


def test_what_finds_no_room_is_not_explained_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explainer, "WAITING_MAX", 2)
    made = EndedCheckpointExplainer(None, None, "/root")  # type: ignore[arg-type]
    done: list[int] = []
    for number in range(5):
        made._put(lambda number=number: done.append(number))  # type: ignore[misc]
    thread = threading.Thread(target=made.watch, daemon=True)
    thread.start()
    made._waiting.put(lambda: made.close())
    thread.join(10)
    assert (done, thread.is_alive()) == ([0, 1], False)


def test_what_has_waited_too_long_is_not_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A reader looks for an explanation a few seconds behind its checkpoint alone."""
    monkeypatch.setattr(explainer, "WAITED_MAX_S", -1.0)
    caplog.set_level("INFO", logger="holdfast.coordinator.dispatcher.reading.explainer")
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0))
    crew = running(service, checkpoint_timeout_ms=500, tolerable_failed_checkpoints=1_000)
    crew.workers[1].acknowledges = False
    number = newest_failed(service, crew)
    crew.until(lambda: f"checkpoint {number} has waited too long" in caplog.text, what="word of it")
    assert recorded(service, crew.job_id) == []
    service.close()


class WallClock:
    """At a time."""

    now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def test_an_explanation_that_is_recorded_later_is_found_though_somebody_asked_before() -> None:
    storage, clock = DictStorage(), WallClock()
    recollection = Recollection(storage, clock)
    failed = {"id": 7, "checkpoint_kind": "checkpoint", "status": "FAILED", "reason": "expired"}

    def put(number: int, kind: str, facts: dict[str, Any]) -> None:
        path = JobPaths(JOB).history(1, number)
        assert storage.execute(PutIfAbsent(path, encode_line(number, 1_000, kind, facts)))

    def kinds() -> list[str]:
        return [entry.kind for entry in recollection.read(JOB, 7, 5.0)]

    put(1, "checkpoint", failed)
    clock.now_ms = 2_000
    assert kinds() == ["checkpoint"]
    put(2, "explanation", {"id": 7})
    assert kinds() == ["checkpoint", "explanation"]
    clock.now_ms = 1_000 + EXPLAINED_WITHIN_MS + SETTLED_MS
    assert kinds() == ["checkpoint", "explanation"]
    storage.files.clear()
    assert kinds() == ["checkpoint", "explanation"], "from now on it is kept"
    with pytest.raises(StorageUnavailableError):
        Recollection(BrokenStorage(), clock).read(JOB, 7, 5.0)


class BrokenStorage(DictStorage):
    def execute(self, operation: Any) -> Any:
        raise StorageUnavailableError("it is gone")
