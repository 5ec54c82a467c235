"""What workers say about themselves, over REST: flame graphs, thread dumps and logs in Flink's shapes, and answers of workers."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.api.access.roles import Access, Caller, Role, classify
from holdfast.api.flink.render_stacks import LOOP, SUBTASKS_MAX, FlameGraphType, flame_graph, subtasks_to_ask
from holdfast.api.http.auth import check_request
from holdfast.barriers import codec
from holdfast.barriers.messages import QuestionKind, RegisterWorker, TaskState, WorkerAnswer, WorkerQuestion
from holdfast.coordinator.dispatcher.reading.questions import Question
from holdfast.coordinator.views import AnswerView
from holdfast.operators.worker.loop import Worker
from holdfast.statebackends.errors import (
    AccessDeniedError,
    FencedError,
    NotFoundError,
    QuestionNotKnownError,
    WorkerBusyError,
    WorkerSilentError,
)
from tests.api.fakes import JOB, SINK, SOURCE, FakeCoordinator, Served, make_answer, make_job

ANSWERS = f"/v1/jobs/{JOB}/workers/0/answers"
WORKER = f"/v1/taskmanagers/{JOB}_slot-0"
GRAPH = f"/v1/jobs/{JOB}/vertices/{SINK}/flamegraph"

# ----------------------------------------------------------------------------------------------------------- of workers


def test_an_answer_reaches_its_job(served: Served, coordinator: FakeCoordinator) -> None:
    answer = make_answer(QuestionKind.STACKS)
    assert served.json("POST", ANSWERS, codec.encode(answer)) == {}
    assert coordinator.calls == [("answer", JOB, answer)]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"slot": 1}, 400),
        ({"stacks": [{"thread": "t", "frames": [0] * 129, "samples": 1}]}, 400),
        ({"stacks": [{"thread": "t", "frames": [-1], "samples": 1}]}, 400),
        ({"stacks": [{"thread": "t", "frames": [], "samples": 1}] * 513}, 400),
        ({"code": [{"function": "f" * 201, "file": "f", "line": 1}]}, 400),
        ({"log": {"text": "x" * (256 * 1024 + 1)}}, 400),
        ({"question": "q" * 65}, 400),
        ({"samples": 2**70}, 400),
        ({"log": {"text": "x" * (2 * 1024 * 1024)}}, 413),
    ],
)
def test_an_answer_beyond_the_bounds_is_refused(
    served: Served, coordinator: FakeCoordinator, change: dict[str, Any], status: int
) -> None:
    body = {**json.loads(codec.encode(make_answer(QuestionKind.STACKS))), **change}
    served.json("POST", ANSWERS, body, status=status)
    assert coordinator.calls == []


def test_an_answer_that_nobody_waits_for_is_409(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = FencedError("question 'q1' of slot 0 is over", slot=0)
    served.json("POST", ANSWERS, codec.encode(make_answer(QuestionKind.LOG)), status=409)


def test_the_wire_of_questions_is_as_it_was() -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "worker_questions_v1.json").read_text())
    registration = RegisterWorker(JOB, 0, 1, 3, "n", 42, "here", "tcp://127.0.0.1:9", "dir", questions=tuple(QuestionKind))
    found = {
        "question": json.loads(codec.encode(WorkerQuestion("q1", "stacks", 2, 20, 50))),
        "registration.questions": json.loads(codec.encode(registration))["questions"],
        "stacks": json.loads(codec.encode(make_answer(QuestionKind.STACKS))),
        "log": json.loads(codec.encode(make_answer(QuestionKind.LOG))),
        "stdout": json.loads(codec.encode(make_answer(QuestionKind.STDOUT))),
    }
    assert found == golden
    for name in ("stacks", "log", "stdout"):
        assert json.loads(codec.encode(codec.decode(json.dumps(golden[name]), WorkerAnswer))) == golden[name]


# --------------------------------------------------------------------------------------------------------- flame graphs


def test_a_flame_graph_has_flinks_shape(served: Served, coordinator: FakeCoordinator) -> None:
    graph = served.json("GET", GRAPH)
    assert graph == {
        "endTimestamp": 7_000,
        "data": {
            "name": "root",
            "value": 18,
            "children": [
                {
                    "name": "Worker.run (/p/loop.py:10)",
                    "value": 18,
                    "children": [
                        {"name": "slow (/job.py:42)", "value": 12, "children": []},
                        {"name": "quick (/job.py:50)", "value": 6, "children": []},
                    ],
                }
            ],
        },
    }
    assert coordinator.calls[-1] == ("ask", JOB, 0, QuestionKind.STACKS)


@pytest.mark.parametrize(
    ("kind", "samples"), [("full", [12, 6]), ("FULL", [12, 6]), ("on_cpu", [1, 6]), ("off_cpu", [10])], ids=str
)
def test_types_of_flame_graphs(served: Served, kind: str, samples: list[int]) -> None:
    (run,) = served.json("GET", f"{GRAPH}?type={kind}&subtaskindex=0")["data"]["children"]
    assert [each["value"] for each in run["children"]] == samples
    assert run["value"] == sum(samples)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (f"{GRAPH}?type=blue", 400, "no flame graph 'blue'"),
        (f"{GRAPH}?subtaskindex=5", 404, "has no subtask 5"),
        (f"{GRAPH}?subtaskindex=-1", 400, "subtaskindex"),
        (f"/v1/jobs/{JOB}/vertices/{'e' * 32}/flamegraph", 404, "has no vertex"),
        ("/v1/taskmanagers/nobody/thread-dump", 404, "no task manager"),
        ("/v1/taskmanagers/nobody/log", 404, "no task manager"),
        ("/v1/taskmanagers/nobody/stdout", 404, "no task manager"),
    ],
)
def test_what_can_not_be_asked_is_said(served: Served, path: str, status: int, words: str) -> None:
    assert words in served.json("GET", path, status=status)["errors"][0]


def test_a_vertex_that_does_not_run_is_terminated_in_flinks_words(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    ended = replace(job.vertices[1].subtasks[0], state=TaskState.FINISHED)
    job = replace(job, vertices=(job.vertices[0], replace(job.vertices[1], subtasks=(ended,))))
    monkeypatch.setattr(FakeCoordinator, "job", lambda self, job_id: job)
    assert served.json("GET", GRAPH) == {"endTimestamp": -1, "data": None}


def test_of_many_subtasks_some_are_asked() -> None:
    job = make_job()
    subtask = job.vertices[1].subtasks[0]
    many = tuple(replace(subtask, subtask=number) for number in range(100))
    job = replace(job, vertices=(job.vertices[0], replace(job.vertices[1], subtasks=many)))
    assert subtasks_to_ask(job, SINK, None) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert len(subtasks_to_ask(job, SINK, None)) == SUBTASKS_MAX
    assert subtasks_to_ask(job, SINK, 99) == [99]


def test_a_worker_that_only_waits_is_in_the_graph() -> None:
    """In none of the looks it worked for anybody: its loop is known by where it waits. Its other threads are not the vertex's."""
    answer = make_answer(QuestionKind.STACKS)
    pool, loop = answer.stacks[0], replace(answer.stacks[1], vertex="", subtask=-1, idle=True, frames=(0,))
    graph = flame_graph([AnswerView(replace(answer, stacks=(pool, loop)), 1)], SOURCE, FlameGraphType.FULL)
    assert graph.data is not None
    assert (graph.data.value, [each.name for each in graph.data.children]) == (12, ["Worker.run (/p/loop.py:10)"])
    foreign = replace(answer.code[0], own=False)
    users = flame_graph([AnswerView(replace(answer, stacks=(pool, loop), code=(foreign,)), 1)], SOURCE, FlameGraphType.FULL)
    assert users.data is not None
    assert users.data.value == 0, "a thread of the user's with a class of that name"
    assert Worker.run.__qualname__.startswith(LOOP)


def test_a_worker_may_say_anything(served: Served) -> None:
    answer = make_answer(QuestionKind.STACKS)
    lies = tuple(replace(stack, frames=(*stack.frames, 2_000)) for stack in answer.stacks)
    graph = flame_graph([AnswerView(replace(answer, stacks=lies), 1)], SOURCE, FlameGraphType.FULL)
    assert graph.data is not None
    assert graph.data.value == 2


def test_what_some_workers_say_is_shown_although_others_are_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    subtask = job.vertices[1].subtasks[0]
    job = replace(job, vertices=(job.vertices[0], replace(job.vertices[1], subtasks=(subtask, replace(subtask, subtask=1)))))
    monkeypatch.setattr(FakeCoordinator, "job", lambda self, job_id: job)

    def ask(self: FakeCoordinator, question: Question) -> Future[AnswerView]:
        future: Future[AnswerView] = Future()
        if question.slot:
            future.set_exception(WorkerSilentError("the worker in slot 1 did not answer", slot=1))
        else:
            future.set_result(AnswerView(make_answer(question.kind), 7_000))
        return future

    monkeypatch.setattr(FakeCoordinator, "ask_async", ask)
    assert served.json("GET", GRAPH)["data"]["value"] == 18
    assert "slot 1" in served.json("GET", f"{GRAPH}?subtaskindex=1", status=503)["errors"][0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QuestionNotKnownError("does not answer questions", kind="stacks"), 404),
        (NotFoundError("no worker is in slot 0"), 404),
        (WorkerSilentError("did not answer", slot=0), 503),
        (WorkerBusyError("ask again", slot=0), 503),
        (FencedError("the job is FINISHED"), 409),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_questions_are_typed(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def ask(self: FakeCoordinator, question: Question) -> Future[AnswerView]:
        raise error

    monkeypatch.setattr(FakeCoordinator, "ask_async", ask)
    for path in (GRAPH, f"{WORKER}/thread-dump", f"{WORKER}/log", f"{WORKER}/stdout"):
        response = served.request("GET", path)
        assert response.status == status
        assert response.headers["X-Holdfast-Error"] == type(error).__name__
    if isinstance(error, QuestionNotKnownError):
        assert served.json("GET", f"{WORKER}/logs") == {"logs": []}


# ------------------------------------------------------------------------------------------------ thread dumps and logs


def test_a_thread_dump_has_flinks_shape(served: Served) -> None:
    threads = served.json("GET", f"{WORKER}/thread-dump")["threadInfos"]
    assert [each["threadName"] for each in threads] == ["MainThread", "MainThread", "MainThread", "pool"]
    assert threads[0]["stringifiedThreadInfo"] == (
        f'"MainThread" works for subtask 0 of vertex {SINK}\n\tat slow(/job.py:42)\n\tat Worker.run(/p/loop.py:10)\n\n'
    )
    assert threads[3]["stringifiedThreadInfo"].startswith('"pool" waits for work\n')


def test_a_log_has_flinks_shape(served: Served) -> None:
    text = "INFO one\nWARNING two\n"
    assert served.json("GET", f"{WORKER}/logs") == {"logs": [{"name": "worker.log", "size": len(text), "mtime": 6_500}]}
    for path in ("log", "logs/worker.log"):
        response = served.request("GET", f"{WORKER}/{path}")
        assert (response.status, response.data.decode()) == (200, text)
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"


def test_what_a_worker_printed_has_flinks_shape(served: Served, coordinator: FakeCoordinator) -> None:
    response = served.request("GET", f"{WORKER}/stdout")
    assert (response.status, response.data.decode()) == (200, "one\n<b>two</b>\n")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert coordinator.calls[-1] == ("ask", JOB, 0, QuestionKind.STDOUT)


@pytest.mark.parametrize(
    ("path", "access"),
    [
        (GRAPH, Access.VIEW),
        (f"{WORKER}/thread-dump", Access.OPERATE),
        (f"{WORKER}/log", Access.OPERATE),
        (f"{WORKER}/logs/worker.log", Access.OPERATE),
        (f"{WORKER}/stdout", Access.OPERATE),
    ],
)
def test_a_viewer_sees_stacks_and_no_log(path: str, access: Access) -> None:
    found = classify("GET", path)
    assert found is not None
    assert found.access is access
    if access is not Access.VIEW:
        with pytest.raises(AccessDeniedError):
            check_request(Caller(Role.VIEWER), "GET", path)


def test_a_worker_answers_for_its_own_job_alone() -> None:
    check_request(Caller(Role.WORKER, JOB), "POST", ANSWERS)
    for caller in (Caller(Role.WORKER, "f" * 32), Caller(Role.OPERATOR), Caller(Role.VIEWER)):
        with pytest.raises(AccessDeniedError):
            check_request(caller, "POST", ANSWERS)
