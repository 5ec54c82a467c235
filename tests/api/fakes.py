"""A coordinator with canned answers, and a server around any coordinator: routes are tested apart from threads."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import urllib3

from holdfast.api.http.protocol import ConnectionGuard
from holdfast.api.server.server import RestServer, advertised_url, bind
from holdfast.api.settings import ServerSettings
from holdfast.barriers.erasure import Erasure
from holdfast.barriers.jobgraph import (
    JobConfig,
    JobEdge,
    JobGraph,
    JobVertex,
    OperatorDescription,
    Partitioning,
    Submission,
    SubmissionAccepted,
)
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AckStatus,
    CheckpointKind,
    CodeLine,
    Heartbeat,
    LogTail,
    NumberedCommand,
    QuestionKind,
    Registered,
    RegisterWorker,
    SampledStack,
    StandBy,
    StandbyOrder,
    StatusBatch,
    SubtaskMetrics,
    TaskState,
    WorkerAnswer,
)
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode, SettingValue, apply_settings
from holdfast.coordinator.dispatcher.published import MomentNow
from holdfast.coordinator.dispatcher.reading.questions import Question
from holdfast.coordinator.drills.records import DrillState, DrillView, Verification
from holdfast.coordinator.explain.explanation import choose_checkpoint, explain
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.records import CutView, Explanation, HealthView, Situation
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.history.records import HistoryPage
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.notes import THE_COORDINATOR_STOPS
from holdfast.coordinator.ownership.cost import CheckpointCost, Cost, Requests
from holdfast.coordinator.ownership.labels import LabelList, LabelView, check_label
from holdfast.coordinator.restore.preflight import PreflightReport, Refusal
from holdfast.coordinator.totals import OperatorTotals, Totals
from holdfast.coordinator.views import (
    AnswerView,
    CheckpointConfigView,
    CheckpointCounts,
    CheckpointStatsView,
    CheckpointView,
    ClusterView,
    ExceptionView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    Moment,
    Quantiles,
    RestoredView,
    SavepointPlaces,
    ScheduleView,
    SeriesView,
    SubtaskCheckpointView,
    SubtaskView,
    TriggerView,
    VertexCheckpointView,
    VertexView,
    WholeJobView,
    WorkerView,
)
from holdfast.statebackends.errors import NotFoundError

TOKEN = "a-token-for-tests-only"
JOB = "0123456789abcdef0123456789abcdef"
SOURCE, SINK = "a" * 32, "b" * 32
TRIGGER = "c" * 32
NAME = "flights"


def make_graph(name: str = NAME, *, parallelism: int = 1, config: JobConfig | None = None) -> JobGraph:
    """source -> keyed sink, two vertices."""

    def vertex(vertex_id: str, uid: str, kind: str) -> JobVertex:
        operator = OperatorDescription(uid=uid, operator_id=vertex_id, name=uid, kind=kind)
        return JobVertex(vertex_id, uid, parallelism, 128, (operator,))

    edge = JobEdge(0, SOURCE, "in", SINK, 0, Partitioning.HASH, ("carrier",), "utf8")
    return JobGraph(name, (vertex(SOURCE, "in", "source"), vertex(SINK, "out", "process")), (edge,), config or JobConfig())


def make_overview(state: str = "RUNNING", *, job_id: str = JOB, name: str = NAME, start_ms: int = 1_000) -> JobOverviewView:
    return JobOverviewView(job_id, name, state, start_ms, -1, 2_000, {TaskState.RUNNING: 2}, 1, 1)


def make_job(state: str = "RUNNING", pressure: tuple[SubtaskMetrics, ...] = ()) -> JobView:
    told = {each.vertex: each for each in pressure}

    def vertex(vertex_id: str) -> VertexView:
        counted = SubtaskMetrics(vertex_id, 0, records_in=5, records_out=7, bytes_in=50, bytes_out=70, busy_ms=3)
        metrics = told.get(vertex_id, counted)
        subtask = SubtaskView(vertex_id, 0, TaskState.RUNNING, 1, "here", 1_000, -1, {TaskState.RUNNING: 1_000}, False, metrics)
        return VertexView(vertex_id, "v", 1, 128, TaskState.RUNNING, 1_000, -1, {TaskState.RUNNING: 1}, (subtask,))

    worker = WorkerView(0, True, True, 4242, "here", "tcp://127.0.0.1:1", "n" * 8, 3, "s1", 5_000)
    failure = ExceptionView("UserFunctionError: boom: bang", "Traceback ...", 4_000, SINK, 0, "slot-0", 1)
    lost = ExceptionView("WorkerLost: slot 0", "", 3_000, "", -1, "slot-0", 1)
    return JobView(
        overview=make_overview(state),
        now_ms=6_000,
        timestamps={"CREATED": 1_000, "RUNNING": 1_100},
        graph=make_graph(),
        vertices=(vertex(SOURCE), vertex(SINK)),
        workers=(worker,),
        exceptions=(failure, lost),
        submission=1,
        attempt=2,
        restarts=1,
        epoch=1,
        failure="UserFunctionError: boom: bang" if state == "FAILED" else None,
        totals=make_totals(),
    )


def make_totals() -> Totals:
    late = OperatorTotals(1_200, 0, 3, 4_500, {"refunds": 2}, 5, "no number")
    return {"in": OperatorTotals(records_out=1_200), "out": late}


def make_pressure() -> tuple[SubtaskMetrics, ...]:
    """A source that waits for its sink."""
    source = SubtaskMetrics(
        SOURCE, 0, busy_ms_per_second=240, idle_ms_per_second=0, backpressured_ms_per_second=760, queued_out_bytes=4_096
    )
    sink = SubtaskMetrics(
        SINK,
        0,
        busy_ms_per_second=900,
        idle_ms_per_second=100,
        backpressured_ms_per_second=0,
        queued_in_bytes=65_536,
        allocated_in_bytes=32_768,
        overshoot_in_bytes=1_024,
        time_to_consume_ms=1_500,
    )
    return source, sink


def make_checkpoint(number: int, status: str, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> CheckpointView:
    acknowledged = SubtaskCheckpointView(0, 2_010, 10, 100, 200, 1, 2, 3, 4, 5)
    missing = SubtaskCheckpointView(1, -1, -1, -1, -1, -1, -1, -1, -1, -1)
    vertex = VertexCheckpointView(SOURCE, status, 2_010, 100, 200, 10, 4, 2, 1, (acknowledged, missing))
    return CheckpointView(
        checkpoint_id=number,
        kind=kind,
        status=status,
        trigger_ms=2_000,
        latest_ack_ms=2_010,
        checkpointed_size=100,
        state_size=200,
        end_to_end_ms=10,
        processed_bytes=4,
        persisted_bytes=0,
        num_subtasks=2,
        num_acknowledged_subtasks=1,
        vertices={SOURCE: vertex},
        location="/state/chk-1" if status == "COMPLETED" else None,
        failure_ms=2_500 if status == "FAILED" else -1,
        failure_reason="expired" if status == "FAILED" else None,
        failure_message="took too long" if status == "FAILED" else None,
    )


def make_stats() -> CheckpointStatsView:
    completed = make_checkpoint(1, "COMPLETED")
    savepoint = make_checkpoint(2, "COMPLETED", CheckpointKind.SAVEPOINT)
    failed, pending = make_checkpoint(3, "FAILED"), make_checkpoint(4, "IN_PROGRESS")
    return CheckpointStatsView(
        counts=CheckpointCounts(1, 4, 1, 2, 1),
        summary={"state_size": Quantiles(1, 2, 1.5, 1, 2, 2, 2, 2)},
        history=(pending, failed, savepoint, completed),
        latest_completed=completed,
        latest_savepoint=savepoint,
        latest_failed=failed,
        latest_restored=RestoredView(1, 1_500, False, "/state/chk-1"),
    )


def make_answer(kind: QuestionKind) -> WorkerAnswer:
    """The loop works for the sink, in a function that sleeps, and twice in one that computes."""
    answer = WorkerAnswer(1, 0, "s1", 2, "q1", kind.value)
    if kind is QuestionKind.LOG:
        return msgspec.structs.replace(answer, log=LogTail("INFO one\nWARNING two\n", 6_500, 3))
    if kind is QuestionKind.STDOUT:
        return msgspec.structs.replace(answer, log=LogTail("one\n<b>two</b>\n", 6_500))
    code = (
        CodeLine("Worker.run", "/p/loop.py", 10, own=True),
        CodeLine("slow", "/job.py", 42),
        CodeLine("quick", "/job.py", 50),
        CodeLine("ThreadPool._serve", "/p/pool.py", 9, own=True),
    )
    stacks = (
        SampledStack("pool", (3,), 20, 0, 19, idle=True),
        SampledStack("MainThread", (0, 1), 12, 1, 10, SINK, 0),
        SampledStack("MainThread", (0, 2), 6, 6, 0, SINK, 0),
        SampledStack("MainThread", (0,), 2, 0, 2, SOURCE, 0),
    )
    return msgspec.structs.replace(answer, samples=20, sampled_ms=1_000, code=code, stacks=stacks)


class FakeSubscription:
    """A command stream that a test feeds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[NumberedCommand] = []
        self._listener: Callable[[], None] | None = None
        self.closed = False
        self.last_number = 0
        self.epoch = 1
        self.consumer_gone = threading.Event()

    def feed(self, command: NumberedCommand) -> None:
        with self._lock:
            self._waiting.append(command)
        self._notify()

    def end(self) -> None:
        self.closed = True
        self._notify()

    def _notify(self) -> None:
        if self._listener is not None:
            self._listener()

    def take(self) -> list[NumberedCommand]:
        with self._lock:
            taken, self._waiting = self._waiting, []
        if taken:
            self.last_number = taken[-1].number
        return taken

    def get(self, timeout_s: float | None) -> NumberedCommand | None:
        raise AssertionError("the REST service never waits in a thread")

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listener = listener
        if self._waiting or self.closed:
            listener()

    def close(self) -> None:
        self.closed = True
        self.consumer_gone.set()
        self._notify()


def make_drill(checkpoint_id: int, state: DrillState = DrillState.RUNNING) -> DrillView:
    return DrillView("d" * 32, checkpoint_id, CheckpointKind.CHECKPOINT, f"/state/{JOB}/chk-{checkpoint_id}", state, "user", 8_000)


def make_cost() -> Cost:
    """One checkpoint of 3 GiB, of which 1 GiB is shared, each minute."""
    one = CheckpointCost(7, "checkpoint", ("x",), 2 << 30, 1 << 30, 10, 4)
    requests = Requests(60.0, 600.0, 180.0, 60.0, 500.0)
    return Cost(JOB, 9_000, 4 << 30, 2 << 30, 1 << 30, 0, 1 << 30, 12, 6, 600, (one,), requests)


_changes = itertools.count()
_NOT_SHOWN = ("calls", "feed", "moments", "subscriptions")


@dataclass
class FakeCoordinator:
    """Answers from its fields; raises `error` instead, once it is set."""

    state: str = "RUNNING"
    ready: bool = True
    directory: str = "/state"
    directory_nonce: str = "nonce"
    error: BaseException | None = None
    trigger: TriggerView = field(default_factory=lambda: TriggerView(TRIGGER, CheckpointKind.CHECKPOINT, True))
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    subscriptions: list[FakeSubscription] = field(default_factory=list)
    overviews: tuple[JobOverviewView, ...] | None = None
    refusals: tuple[Refusal, ...] = ()
    page: HistoryPage = field(default_factory=lambda: HistoryPage(()))
    feed: HistoryFeed = field(default_factory=HistoryFeed)
    places: SavepointPlaces = field(default_factory=SavepointPlaces)
    moments: Moment = field(default_factory=lambda: Moment(1_700_000_000_000, "a-tag"))
    pressure: tuple[SubtaskMetrics, ...] = ()
    labelled: dict[str, LabelView] = field(default_factory=dict)
    drilled: list[DrillView] = field(default_factory=list)
    costs: Cost = field(default_factory=lambda: make_cost())

    broken: dict[str, str] = field(default_factory=dict)
    config: JobConfig = field(default_factory=lambda: JobConfig(checkpoint_interval_ms=1_000))
    is_leading: bool = True
    is_referring: bool = False
    closed_for: str = ""

    def reset(self) -> None:
        """As new."""
        self.__dict__.update(FakeCoordinator().__dict__)

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        if len(call) > 1 and isinstance(call[1], str) and call[1] not in {JOB, *(job.job_id for job in self.jobs())}:
            raise NotFoundError(f"no job {call[1]}", job=call[1])

    def _later(self, value: Any, *call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            self._called(*call)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)
        return future

    def submit(self, submission: Submission) -> SubmissionAccepted:
        self._called("submit")
        return SubmissionAccepted(JOB, 1, submission.graph.slots_required, 1, 0, self.directory, self.directory_nonce)

    def preflight(self, submission: Submission) -> PreflightReport:
        self._called("preflight")
        return PreflightReport(job_id=JOB, job_name=submission.graph.name, refusals=self.refusals)

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        self.calls.append(("leader_unreachable", job_id, epoch))

    def register(self, message: RegisterWorker) -> Registered:
        raise AssertionError("the REST service registers through a future")

    def register_async(self, message: RegisterWorker) -> Future[Registered]:
        registered = Registered(1, "s1", 1, None, 0, (), 2_000, 50_000)
        return self._later(registered, "register", message.job_id, message)

    def stand_by_async(self, message: StandBy) -> Future[StandbyOrder]:
        return self._later(StandbyOrder(1, 0, 2, 3, "proof"), "stand_by", message.job_id, message)

    def commands(self, job_id: str, slot: int, session: str, after: int) -> FakeSubscription:
        self._called("commands", job_id, slot, session, after)
        subscription = FakeSubscription()
        self.subscriptions.append(subscription)
        return subscription

    def acks(self, job_id: str, batch: AckBatch) -> AckAnswers:
        raise AssertionError("the REST service acknowledges through a future")

    def states(self, job_id: str, batch: StatusBatch) -> None:
        raise AssertionError("the REST service tells of states through a future")

    def heartbeat(self, job_id: str, message: Heartbeat) -> int:
        raise AssertionError("the REST service beats through a future")

    def acks_async(self, job_id: str, batch: AckBatch) -> Future[AckAnswers]:
        return self._later(AckAnswers(1, (AckStatus.SUCCESS,) * len(batch.items)), "acks", job_id, batch)

    def states_async(self, job_id: str, batch: StatusBatch) -> Future[None]:
        return self._later(None, "states", job_id, batch)

    def heartbeat_async(self, job_id: str, message: Heartbeat) -> Future[int]:
        return self._later(1, "heartbeat", job_id, message)

    def answer_async(self, job_id: str, answer: WorkerAnswer) -> Future[None]:
        return self._later(None, "answer", job_id, answer)

    def ask_async(self, question: Question) -> Future[AnswerView]:
        return self._later(AnswerView(make_answer(question.kind), 7_000), "ask", question.job_id, question.slot, question.kind)

    def request_checkpoint(self, job_id: str, trigger_id: str | None = None, *, mode: CheckpointMode = AS_CONFIGURED) -> str:
        self._called("request_checkpoint", job_id, trigger_id, *(() if mode == AS_CONFIGURED else (mode,)))
        mode.checked(self.config)
        return self._begun(CheckpointKind.CHECKPOINT, trigger_id)

    def erase_key(self, job_id: str, erasure: Erasure) -> str:
        self._called("erase_key", job_id, erasure)
        return self._begun(CheckpointKind.CHECKPOINT, None)

    def request_savepoint(
        self,
        job_id: str,
        target: str | None = None,
        *,
        format_type: str = "CANONICAL",
        cancel: bool = False,
        trigger_id: str | None = None,
    ) -> str:
        self._called("request_savepoint", job_id, target, format_type, cancel, trigger_id)
        return self._begun(CheckpointKind.SAVEPOINT, trigger_id)

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = "CANONICAL",
        trigger_id: str | None = None,
    ) -> str:
        self._called("stop", job_id, target, drain, format_type, trigger_id)
        return self._begun(CheckpointKind.STOP_SAVEPOINT, trigger_id)

    def _begun(self, kind: CheckpointKind, trigger_id: str | None) -> str:
        self.trigger = msgspec.structs.replace(self.trigger, kind=kind)
        return trigger_id or TRIGGER

    def change_settings(self, job_id: str, settings: Mapping[str, SettingValue]) -> CheckpointConfigView:
        self._called("change_settings", job_id, dict(settings))
        return CheckpointConfigView(apply_settings(self.checkpoint_config(job_id).config, settings), self.directory)

    def cancel(self, job_id: str) -> None:
        self._called("cancel", job_id)

    def leave(self, job_id: str, submission: int) -> None:
        self._called("leave", job_id, submission)

    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView:
        self._called("trigger_status", job_id, trigger_id)
        return self.trigger

    def moment(self, job_id: str | None = None, *, diagnosed: bool = False) -> Moment:
        """Its tag is another one as soon as the test has changed anything; each time where the test answers in its place."""
        shown = {name: value for name, value in vars(self).items() if name not in _NOT_SHOWN}
        changes = next(_changes) if any(callable(value) for value in shown.values()) else zlib.crc32(repr(shown).encode())
        return Moment(self.moments.as_of_ms, f"{self.moments.tag}-{changes}")

    def moment_now(self, job_id: str | None = None, *, diagnosed: bool = False) -> MomentNow:
        return MomentNow(self.moment(job_id, diagnosed=diagnosed))

    def jobs(self) -> tuple[JobOverviewView, ...]:
        return self.overviews if self.overviews is not None else (make_overview(self.state),)

    def broken_jobs(self) -> dict[str, str]:
        return self.broken

    def numbers(self) -> tuple[JobNumbersView, ...]:
        stats = make_stats()
        totals = make_totals()
        return tuple(
            JobNumbersView(
                job, 2, 1, stats.counts, stats.latest_completed, 0, make_graph(), totals, totals, subtasks=make_pressure()
            )
            for job in self.jobs()
        )

    def job(self, job_id: str) -> JobView:
        self._called("job", job_id)
        return make_job(self.state, self.pressure)

    def whole_job(self, job_id: str) -> WholeJobView:
        return WholeJobView(self.job(job_id), self.checkpoints(job_id))

    def whole_jobs(self, job_ids: Collection[str] | None = None, *, live_only: bool = False) -> tuple[WholeJobView, ...]:
        known = [job for job in self.jobs() if (job_ids is None or job.job_id in job_ids) and not (live_only and job.is_terminal)]
        return tuple(
            WholeJobView(msgspec.structs.replace(self.job(job.job_id), overview=job), self.checkpoints(job.job_id))
            for job in sorted(known, key=lambda each: -each.start_ms)
        )

    def checkpoints(self, job_id: str) -> CheckpointStatsView:
        self._called("checkpoints", job_id)
        return make_stats()

    def checkpoint(self, job_id: str, checkpoint_id: int) -> CheckpointView:
        self._called("checkpoint", job_id, checkpoint_id)
        found = [each for each in make_stats().history if each.checkpoint_id == checkpoint_id]
        if not found:
            raise NotFoundError(f"no checkpoint {checkpoint_id}", job=job_id, checkpoint=checkpoint_id)
        return found[0]

    def checkpoint_config(self, job_id: str) -> CheckpointConfigView:
        self._called("checkpoint_config", job_id)
        return CheckpointConfigView(self.config, self.directory)

    def series(
        self, job_id: str, vertex: str | None, metric: str, subtasks: Sequence[int] = ()
    ) -> tuple[SeriesView, ...]:
        self._called("series", job_id, vertex, metric, tuple(subtasks))
        return (SeriesView(vertex or "v", metric, 5_000, 2, (10,), (3.0,), (1.5,), (1.0,), (2.0,), {0: (1.0,), 1: (None,)}),)

    def history(self, job_id: str, query: HistoryQuery) -> HistoryPage:
        self._called("history", job_id, query)
        return self.page

    def drill(self, job_id: str, checkpoint_id: int | None = None) -> DrillView:
        self._called("drill", job_id, checkpoint_id)
        self.drilled.insert(0, make_drill(checkpoint_id or 7))
        return self.drilled[0]

    def drills(self, job_id: str) -> tuple[DrillView, ...]:
        self._called("drills", job_id)
        return tuple(self.drilled)

    def note_verified(self, job_id: str, location: str, found: Verification) -> None:
        self._called("note_verified", job_id, location, found)

    def cost(self, job_id: str) -> Cost:
        self._called("cost", job_id)
        return self.costs

    def labels(self, job_id: str) -> LabelList:
        self._called("labels", job_id)
        return LabelList(tuple(self.labelled.values()))

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> LabelView:
        self._called("add_label", job_id, checkpoint_id, label)
        check_label(label)
        kind = CheckpointKind.CHECKPOINT
        return self.labelled.setdefault(label, LabelView(label, checkpoint_id, kind, f"/state/{job_id}/chk-{checkpoint_id}", 7_000))

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> tuple[LabelView, ...]:
        self._called("remove_label", job_id, label, checkpoint_id)
        if label not in self.labelled:
            raise NotFoundError(f"job {job_id} has no label {label!r}; it has none", job=job_id)
        return (self.labelled.pop(label),)

    def health(self, job_id: str) -> HealthView:
        self._called("health", job_id)
        return derive_health(self._situation())

    def explain(self, job_id: str, checkpoint_id: int | None = None) -> Explanation:
        self._called("explain", job_id, checkpoint_id)
        situation = self._situation()
        number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
        view = self.checkpoint(job_id, number) if number is not None else None
        return explain(msgspec.structs.replace(situation, checkpoint=view))

    def _situation(self) -> Situation:
        cut = CutView(1, CheckpointKind.CHECKPOINT, "/state/chk-1", 2_000, {"in": 1_000})
        schedule = ScheduleView(1_000, 500)
        return Situation(make_job(self.state), self.config, make_stats(), None, schedule, cut, {"in": 1_200})

    def savepoint_places(self) -> SavepointPlaces:
        self.calls.append(("savepoint_places",))
        return self.places

    def published_savepoint_places(self) -> SavepointPlaces:
        return self.places

    def cluster(self) -> ClusterView:
        return ClusterView(2, 1, 1, 0, 0, 0, 1)

    def wait(self, job_id: str, timeout_s: float | None = None) -> str:
        return self.state

    def lead(self) -> None:
        self.calls.append(("lead",))

    def close(self, reason: str = THE_COORDINATOR_STOPS) -> None:
        self.closed_for = reason
        self.ready = False
        for subscription in self.subscriptions:
            subscription.end()


@contextlib.contextmanager
def serving(service: Coordinator, state_dir: Path, *, guard: ConnectionGuard | None = None, **changes: Any) -> Iterator[Served]:
    """A server on a free port of loopback, in a thread."""
    settings = ServerSettings(state_dir=state_dir, **{"token": TOKEN, "port": 0, "stop_timeout_ms": 2_000, **changes})
    listener = bind(settings)
    started = threading.Event()
    server = RestServer(service, settings, on_started=started.set, guard=guard)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert started.wait(10), "the server did not start"
    http = urllib3.PoolManager(retries=False, timeout=10)
    try:
        yield Served(advertised_url(settings, listener.getsockname()[1]), settings.token, http)
    finally:
        server.should_exit = True
        thread.join(15)
        http.clear()
        assert not thread.is_alive(), "the server did not stop"


@dataclass
class Served:
    url: str
    token: str | None
    http: urllib3.PoolManager

    def request(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        """One exchange; a body that isn't bytes goes as JSON."""
        headers = {"Authorization": f"Bearer {token or self.token}"} if token or self.token else {}
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.request(method, self.url + path, body=raw, headers={**headers, **options.pop("headers", {})}, **options)

    def json(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        response = self.request(method, path, body)
        assert response.status == status, response.data
        return response.json()
