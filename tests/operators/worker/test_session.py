"""The session core: one event a line, whole action lists asserted; time and randomness are arguments."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers import codec
from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    Answerable,
    CancelTasks,
    CheckpointKind,
    DeclineCheckpoint,
    Deploy,
    Deployment,
    FailureReason,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskDeployment,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.operators.worker.session import (
    ACK_BYTES_MAX,
    ACK_COLLECT_MS,
    REGISTER_BYTES_MAX,
    Session,
    SessionState,
)
from holdfast.operators.worker.session_events import (
    BACKOFF_MAX_MS,
    AcksAnswered,
    Action,
    AnswerReady,
    CommandReceived,
    DeadlineReached,
    Deliver,
    HeartbeatAnswered,
    OpenStream,
    PostAcks,
    PostHeartbeat,
    PostStates,
    RegistrationAnswered,
    RequestFailed,
    RequestRefused,
    SendRegister,
    StatesAnswered,
    StatusChanged,
    WorkerIdentity,
    refuse_post,
    refuse_registration,
)
from holdfast.statebackends.errors import FencedError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorSubtaskState,
    StateMeta,
)

IDENTITY = WorkerIdentity("job", 1, 1, 7, "nonce", 42, "host", "tcp://h:1", "dir")


def deployment(attempt: int = 1) -> Deployment:
    graph = JobGraph("job", (), (), JobConfig())
    return Deployment(attempt, graph, (SubtaskDeployment("v", 1),), {1: "tcp://h:1"})


def registered(epoch: int = 1, session: str = "s1", attempt: int = 0, **fields: object) -> Registered:
    defaults: dict[str, object] = {
        "deployment": None,
        "newest_completed": 0,
        "live_checkpoints": (),
        "heartbeat_interval_ms": 2_000,
        "heartbeat_timeout_ms": 50_000,
    }
    return Registered(epoch=epoch, session=session, attempt=attempt, **{**defaults, **fields})  # type: ignore[arg-type]


def trigger(checkpoint_id: int, attempt: int = 1) -> TriggerCheckpoint:
    return TriggerCheckpoint(attempt, checkpoint_id, 0, CheckpointKind.CHECKPOINT, "f")


def ack(checkpoint_id: int, attempt: int = 1) -> AcknowledgeCheckpoint:
    return AcknowledgeCheckpoint(attempt, checkpoint_id, "v", 1)


def posted(*items: Answerable) -> PostAcks:
    return PostAcks(AckBatch(1, 1, "s1", items))


class Driver:
    """A session with its time; `now` moves only when a test says so."""

    def __init__(self) -> None:
        self.session = Session(IDENTITY, random.Random(1))
        self.now = 1_000
        self.number = 0

    def handle(self, event: object) -> list[Action]:
        return self.session.handle(event, now_ms=self.now)  # type: ignore[arg-type]

    def register(self, answer: Registered) -> list[Action]:
        (sent,) = self.handle(DeadlineReached())
        assert isinstance(sent, SendRegister)
        self.number = 0
        return self.handle(RegistrationAnswered(answer))

    def command(
        self, command: WorkerCommand | None, *, number: int | None = None, epoch: int = 1, session: str = "s1"
    ) -> list[Action]:
        if number is None:
            self.number += command is not None
            number = self.number
        return self.handle(CommandReceived(NumberedCommand(epoch, session, number, command)))


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def running(driver: Driver) -> Driver:
    driver.register(registered(attempt=1, deployment=deployment()))
    return driver


def test_superseded_process_leaves_and_says_nothing_more(driver: Driver) -> None:
    assert driver.handle(DeadlineReached()) != []
    actions = driver.handle(RequestRefused("register", "submission 2 runs", superseded=True))
    assert actions == [Deliver(ShutdownWorker("superseded: submission 2 runs", superseded=True))]
    assert driver.session.state is SessionState.ENDED
    driver.now += 100_000
    assert driver.handle(AnswerReady(ack(1))) == []
    assert driver.session.next_deadline_ms() is None


@pytest.mark.parametrize(
    ("error", "order"),
    [
        (FencedError("submission 2 of job j runs, not 1", held=1, newer=2), {"superseded": True}),
        (FencedError("slot 0: a newer process holds it", held=2**62, slot=0), {"respawn": True}),
        (FencedError("superseded, says who knows nothing"), {"respawn": True}),
        (FencedError("submission 1 of job j runs, not 1", held=1, newer=1), {"respawn": True}),
        (FencedError("job j is FINISHED", job="j", state="FINISHED"), {}),
    ],
)
def test_only_a_newer_submission_supersedes(driver: Driver, error: FencedError, order: dict[str, bool]) -> None:
    driver.handle(DeadlineReached())
    (action,) = driver.handle(refuse_registration(error.message, error.fields, submission=1))
    assert isinstance(action, Deliver)
    assert isinstance(action.command, ShutdownWorker)
    assert action.command == ShutdownWorker(action.command.reason, **order)
    assert error.message in action.command.reason
    assert driver.session.next_deadline_ms() is None


def test_a_coordinator_that_knows_an_older_submission_alone_sends_nobody_home(driver: Driver) -> None:
    driver.handle(DeadlineReached())
    error = FencedError("submission 2 of job j runs, not 3", held=3, newer=2)
    assert driver.handle(refuse_registration(error.message, error.fields, submission=3)) == []
    assert driver.session.state is not SessionState.ENDED
    assert driver.session.unreachable_since_ms == driver.now
    due = driver.session.next_deadline_ms()
    assert due is not None
    driver.now = due
    assert [type(action) for action in driver.handle(DeadlineReached())] == [SendRegister]


def test_rejected_process_leaves_and_does_not_ask_again(driver: Driver) -> None:
    driver.handle(DeadlineReached())
    actions = driver.handle(RequestRefused("register", "missing or wrong bearer token", rejected=True))
    assert actions == [Deliver(ShutdownWorker("rejected: missing or wrong bearer token"))]
    assert driver.session.next_deadline_ms() is None


def test_lease_runs_from_the_first_attempt_to_register(driver: Driver) -> None:
    assert driver.session.unreachable_since_ms is None
    driver.now = 10**9  # the machine has been up for days
    driver.handle(DeadlineReached())
    driver.now += 700
    driver.handle(RequestFailed("register"))
    assert driver.session.unreachable_since_ms == 10**9


def test_coordinator_that_does_not_know_the_job_counts_as_none(running: Driver) -> None:
    running.handle(RequestRefused("stream"))
    assert running.session.unreachable_since_ms is None
    running.now += 50
    running.handle(RequestRefused("register", "job not found"))
    assert running.session.unreachable_since_ms == 1_050


def test_acks_with_large_state_are_not_all_sent_at_once(running: Driver) -> None:
    """The memory backend's state travels in them, and a body that is too large is refused for ever."""
    data = InlineHandle(bytes(ACK_BYTES_MAX // 2))
    meta = StateMeta("s", "value", "int", "int64")
    handle = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (meta,), (data,))
    states = {"v": OperatorSubtaskState(keyed=(handle,))}
    items = [AcknowledgeCheckpoint(1, 1, "v", subtask, states) for subtask in range(5)]
    posted = []
    for item in items:
        posted += running.handle(AnswerReady(item))
    while posted:
        post = posted.pop()
        assert isinstance(post, PostAcks)
        assert len(post.body.items) in (1, 2)
        posted += running.handle(AcksAnswered(AckAnswers(1, (AckStatus.SUCCESS,) * len(post.body.items))))
    assert running.session.unanswered_count == 0


def test_registration_is_retried_with_growing_backoff(driver: Driver) -> None:
    waits = []
    for _ in range(8):
        (sent,) = driver.handle(DeadlineReached())
        assert isinstance(sent, SendRegister)
        assert driver.handle(RequestFailed("register")) == []
        due = driver.session.next_deadline_ms()
        assert due is not None
        waits.append(due - driver.now)
        driver.now = due
    assert 25 <= waits[0] <= 50
    assert BACKOFF_MAX_MS // 2 <= waits[-1] <= BACKOFF_MAX_MS


def test_coordinator_that_was_not_asked_yet_is_asked_at_once_and_rounds_have_their_own_longest_pause(driver: Driver) -> None:
    waits: list[int] = []
    again = driver.handle(DeadlineReached())
    for turn in range(30):
        (sent,) = again
        assert isinstance(sent, SendRegister)
        again = driver.handle(RequestFailed("register", 300 if turn % 3 == 2 else 0))
        due = driver.session.next_deadline_ms()
        if turn % 3 == 2:
            assert again == []
            assert due is not None
            waits.append(due - driver.now)
            driver.now = due
            again = driver.handle(DeadlineReached())
    assert 25 <= waits[0] <= 50, "those that were asked in between are no failures of their own"
    assert min(waits[5:]) >= 150
    assert max(waits) <= 300


def test_register_deploys_and_opens_the_stream(driver: Driver) -> None:
    actions = driver.register(registered(attempt=1, deployment=deployment()))
    assert actions == [Deliver(Deploy(deployment())), OpenStream(1, "s1", 0)]


def test_lower_epoch_is_refused(driver: Driver) -> None:
    driver.register(registered(epoch=3, session="s3"))
    driver.handle(RequestRefused("stream"))
    driver.now += 10
    actions = driver.handle(RegistrationAnswered(registered(epoch=2, session="s2")))
    assert actions == []
    assert driver.session.epoch == 3
    assert driver.session.state is SessionState.WAITING


def test_commands_are_delivered_once_and_in_order(running: Driver) -> None:
    assert running.command(trigger(1), number=1) == [Deliver(trigger(1))]
    assert running.command(trigger(1), number=1) == []
    assert running.command(trigger(1), number=2) == [], "same kind, id and attempt under another number"
    assert running.command(NotifyCheckpointComplete(1, 1, 5), number=3) == [Deliver(NotifyCheckpointComplete(1, 1, 5))]


def test_missing_command_asks_for_full_state(running: Driver) -> None:
    (action,) = running.command(trigger(1), number=2)
    assert isinstance(action, SendRegister)


def test_keep_alive_that_is_ahead_asks_for_full_state(running: Driver) -> None:
    assert running.command(None, number=0) == []
    (action,) = running.command(None, number=4)
    assert isinstance(action, SendRegister)


def test_line_of_an_older_session_is_ignored(running: Driver) -> None:
    assert running.command(trigger(1), number=1, session="s0") == []
    assert running.session.state is SessionState.REGISTERED


def test_stream_resumes_behind_the_last_number(running: Driver) -> None:
    running.command(trigger(1))
    running.command(NotifyCheckpointComplete(1, 1, 5))
    assert running.handle(RequestFailed("stream")) == []
    running.now += BACKOFF_MAX_MS
    assert running.handle(DeadlineReached()) == [OpenStream(1, "s1", 2)]


def test_new_epoch_on_a_heartbeat_registers_again(running: Driver) -> None:
    running.now += 2_000
    assert running.handle(DeadlineReached()) == [PostHeartbeat("s1", 1)]
    (action,) = running.handle(HeartbeatAnswered(epoch=2))
    assert isinstance(action, SendRegister)


def test_ack_is_kept_until_answered(running: Driver) -> None:
    assert running.handle(AnswerReady(ack(1))) == [PostAcks(AckBatch(1, 1, "s1", (ack(1),)))]
    assert running.handle(AnswerReady(ack(2))) == [], "one batch at a time"
    assert running.handle(RequestFailed("acks")) == []
    running.now += BACKOFF_MAX_MS
    assert running.handle(DeadlineReached()) == [PostAcks(AckBatch(1, 1, "s1", (ack(1), ack(2))))]
    assert running.handle(AcksAnswered(AckAnswers(1, (AckStatus.SUCCESS,)))) == [PostAcks(AckBatch(1, 1, "s1", (ack(2),)))]
    assert running.handle(AcksAnswered(AckAnswers(1, (AckStatus.UNKNOWN,)))) == []
    assert running.session.unanswered_count == 0


def collecting(subtasks: int) -> Driver:
    """A running worker of so many subtasks, which collects acknowledgements."""
    driver = Driver()
    driver.session = Session(IDENTITY, random.Random(1), ack_collect_ms=ACK_COLLECT_MS)
    vertices = tuple(SubtaskDeployment(f"v{number}", 1) for number in range(subtasks))
    driver.register(registered(attempt=1, deployment=Deployment(1, JobGraph("job", (), (), JobConfig()), vertices, {1: "tcp://h:1"})))
    return driver


def ack_of(number: int, checkpoint_id: int = 1) -> AcknowledgeCheckpoint:
    return AcknowledgeCheckpoint(1, checkpoint_id, f"v{number}", 1)


SUCCESS = AckStatus.SUCCESS


def test_acks_of_a_worker_go_together() -> None:
    driver = collecting(3)
    assert driver.handle(AnswerReady(ack_of(0))) == []
    assert driver.session.next_deadline_ms() == driver.now + ACK_COLLECT_MS
    driver.now += 1
    assert driver.handle(AnswerReady(ack_of(1))) == []
    assert driver.handle(AnswerReady(ack_of(2))) == [posted(ack_of(0), ack_of(1), ack_of(2))], "all subtasks have one"


def test_acks_wait_no_longer_than_they_may() -> None:
    driver = collecting(3)
    driver.handle(AnswerReady(ack_of(0)))
    driver.now += ACK_COLLECT_MS - 1
    assert driver.handle(AnswerReady(ack_of(1))) == []
    assert driver.session.next_deadline_ms() == driver.now + 1, "from the first one on"
    driver.now += 1
    assert driver.handle(DeadlineReached()) == [posted(ack_of(0), ack_of(1))]
    driver.now += 50
    driver.handle(AnswerReady(ack_of(2)))
    assert driver.handle(AcksAnswered(AckAnswers(1, (SUCCESS, SUCCESS)))) == [posted(ack_of(2))], "it has waited enough"
    driver.handle(AcksAnswered(AckAnswers(1, (SUCCESS,))))
    assert driver.handle(AnswerReady(ack_of(0, 2))) == [], "and the next checkpoint is collected again"


def test_an_only_subtask_and_a_decline_wait_for_nobody() -> None:
    assert collecting(1).handle(AnswerReady(ack_of(0))) == [posted(ack_of(0))]
    driver = collecting(3)
    driver.handle(AnswerReady(ack_of(0)))
    decline = DeclineCheckpoint(1, 1, "v1", 1, FailureReason.DECLINED, "no")
    assert driver.handle(AnswerReady(decline)) == [posted(ack_of(0), decline)]


def test_no_state_overtakes_an_ack() -> None:
    driver = collecting(3)
    driver.handle(AnswerReady(ack_of(0)))
    acks, states = driver.handle(StatusChanged(SubtaskStatus(1, "v0", 1, TaskState.FINISHED)))
    assert acks == posted(ack_of(0))
    assert isinstance(states, PostStates)


def test_a_worker_that_leaves_collects_no_more() -> None:
    driver = collecting(3)
    assert not driver.session.stop_collecting(), "nothing waits"
    driver = collecting(3)
    driver.handle(AnswerReady(ack_of(0)))
    assert driver.session.stop_collecting()
    assert driver.handle(DeadlineReached()) == [posted(ack_of(0))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 12))
def test_every_ack_is_posted_once_and_in_time(pauses: list[int], subtasks: int) -> None:
    """Against a coordinator that answers at once, whatever the times at which acknowledgements come."""
    driver = collecting(subtasks)
    came, sent = dict[tuple[str, int], int](), dict[tuple[str, int], int]()

    def digest(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, PostAcks):
                for item in action.body.items:
                    assert sent.setdefault((item.vertex, item.checkpoint_id), driver.now) == driver.now
                digest(driver.handle(AcksAnswered(AckAnswers(1, (SUCCESS,) * len(action.body.items)))))

    for at, pause in enumerate(pauses):
        for _ in range(pause):
            driver.now += 1
            digest(driver.handle(DeadlineReached()))
        item = ack_of(at % subtasks, at // subtasks + 1)
        came[item.vertex, item.checkpoint_id] = driver.now
        digest(driver.handle(AnswerReady(item)))
    for _ in range(ACK_COLLECT_MS):
        driver.now += 1
        digest(driver.handle(DeadlineReached()))
    assert sent.keys() == came.keys()
    assert all(0 <= sent[key] - came[key] <= ACK_COLLECT_MS for key in came)


def test_of_acks_that_are_not_taken_together_each_goes_alone_and_one_that_is_never_taken_is_declined(running: Driver) -> None:
    """One that no repetition makes right kept all others of its worker back, and no checkpoint completed any more."""
    success = AcksAnswered(AckAnswers(1, (AckStatus.SUCCESS,)))
    running.handle(AnswerReady(ack(1)))
    for number in (2, 3, 4):
        assert running.handle(AnswerReady(ack(number))) == []
    assert running.handle(success) == [posted(ack(2), ack(3), ack(4))]
    assert running.handle(RequestRefused("acks", "too large", rejected=True)) == [posted(ack(2))]
    assert running.handle(success) == [posted(ack(3))]
    message = "the coordinator did not take the acknowledgement: too large"
    decline = DeclineCheckpoint(1, 3, "v", 1, FailureReason.DECLINED, message)
    assert running.handle(RequestRefused("acks", "too large", rejected=True)) == [posted(decline)]
    assert running.handle(RequestRefused("acks", "no", rejected=True)) == [posted(ack(4))], "what is refused even so is given up"
    running.handle(AnswerReady(ack(5)))
    running.handle(AnswerReady(ack(6)))
    assert running.handle(success) == [posted(ack(5), ack(6))], "together again"
    assert running.session.unreachable_since_ms is None


def test_a_registration_carries_little_state(running: Driver) -> None:
    """Until it is answered, its worker shows no other sign of life."""
    handle = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(bytes(REGISTER_BYTES_MAX // 2 + 1)),))
    items = [AcknowledgeCheckpoint(1, n, "v", 1, {"v": OperatorSubtaskState(keyed=(handle,))}) for n in (1, 2)]
    for item in items:
        running.handle(AnswerReady(item))
    (sent,) = running.handle(RequestRefused("acks", "epoch 2 leads"))
    assert isinstance(sent, SendRegister)
    assert sent.body.unanswered == (items[0],)
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 1, answers=(AckStatus.UNKNOWN,))))
    assert actions == [OpenStream(2, "s2", 0), PostAcks(AckBatch(2, 1, "s2", (items[1],)))]


def test_a_large_answer_of_an_attempt_that_is_over_is_not_posted_for_ever(running: Driver) -> None:
    """No registration carries it, and the leader refuses it after each."""
    handle = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(bytes(REGISTER_BYTES_MAX + 1)),))
    running.handle(AnswerReady(AcknowledgeCheckpoint(1, 1, "v", 1, {"v": OperatorSubtaskState(keyed=(handle,))})))
    refused = refuse_post("acks", "attempt 2 runs", {"attempt": 2})
    (sent,) = running.handle(refused)
    assert isinstance(sent, SendRegister)
    assert sent.body.unanswered == ()
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 2)))
    assert actions == [Deliver(CancelTasks(1)), OpenStream(2, "s2", 0)]


def test_a_registration_that_is_refused_for_what_is_unanswered_is_made_without_it(running: Driver) -> None:
    running.handle(AnswerReady(ack(1)))
    running.handle(AnswerReady(ack(2)))
    running.handle(RequestRefused("acks", "epoch 2 leads"))
    (sent,) = running.handle(RequestRefused("register", "too large", rejected=True))
    assert isinstance(sent, SendRegister)
    assert sent.body.unanswered == ()
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 1)))
    assert actions == [OpenStream(2, "s2", 0), PostAcks(AckBatch(2, 1, "s2", (ack(1),)))]
    (again,) = running.handle(RequestRefused("acks", "epoch 3 leads"))
    assert isinstance(again, SendRegister)
    assert again.body.unanswered == (ack(1), ack(2))


def test_a_registration_that_is_refused_without_anything_unanswered_ends_the_worker(running: Driver) -> None:
    running.handle(AnswerReady(ack(1)))
    running.handle(RequestRefused("acks", "epoch 2 leads"))
    running.handle(RequestRefused("register", "no", rejected=True))
    assert running.handle(RequestRefused("register", "no", rejected=True)) == [Deliver(ShutdownWorker("rejected: no"))]


def test_states_that_are_not_taken_are_told_one_by_one_and_bare(running: Driver) -> None:
    """A failure that is never told leaves its job hanging, for all that it runs."""
    first, ok = (SubtaskStatus(1, vertex, 1, TaskState.RUNNING) for vertex in ("v", "w"))
    failed = SubtaskStatus(1, "v", 1, TaskState.FAILED, error="E: ä" + "x" * 500, traceback="t")
    bare = SubtaskStatus(1, "v", 1, TaskState.FAILED, error="E: ?" + "x" * 248 + "...")
    running.handle(StatusChanged(first))
    running.handle(StatusChanged(ok))
    running.handle(StatusChanged(failed))
    (both,) = running.handle(StatesAnswered())
    assert isinstance(both, PostStates)
    assert set(both.body.subtasks) == {failed, ok}
    sent = running.handle(RequestRefused("states", "no", rejected=True))
    assert sent == [PostStates(StatusBatch(1, 1, "s1", (failed,)))]
    sent = running.handle(RequestRefused("states", "no", rejected=True))
    assert sent == [PostStates(StatusBatch(1, 1, "s1", (ok,)))]
    assert running.handle(StatesAnswered()) == [PostStates(StatusBatch(1, 1, "s1", (bare,)))]
    assert running.handle(RequestRefused("states", "no", rejected=True)) == []
    later = running.session.next_deadline_ms()
    assert later is None or later > running.now, "it is given up"


@pytest.mark.parametrize("how", ["aborted", "attempt"])
def test_answers_that_change_nothing_any_more_are_forgotten_unless_they_name_files(running: Driver, how: str) -> None:
    """The leader deletes the files of a late acknowledgement: nobody else knows of them."""
    handle = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (FileHandle("f", 1, "1"),))
    files = AcknowledgeCheckpoint(1, 1, "w", 1, {"w": OperatorSubtaskState(keyed=(handle,))})
    decline = DeclineCheckpoint(1, 1, "x", 1, FailureReason.DECLINED)
    running.handle(AnswerReady(ack(9)))
    for item in (ack(1), files, decline):
        running.handle(AnswerReady(item))
    running.command(NotifyCheckpointAborted(1, 1, 0) if how == "aborted" else Deploy(deployment(2)))
    assert running.handle(AcksAnswered(AckAnswers(1, (AckStatus.UNKNOWN,)))) == [posted(files)]
    assert running.session.unanswered_count == 1


def test_unanswered_acks_travel_with_the_next_registration(running: Driver) -> None:
    running.handle(AnswerReady(ack(1)))
    (sent,) = running.handle(RequestRefused("acks", "epoch 2 leads"))
    assert isinstance(sent, SendRegister)
    assert sent.body.unanswered == (ack(1),)
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 1, answers=(AckStatus.DISCARDED,))))
    assert actions == [OpenStream(2, "s2", 0)]
    assert running.session.unanswered_count == 0


def test_registration_after_coordinator_loss_reports_what_runs(running: Driver) -> None:
    status = SubtaskStatus(1, "v", 1, TaskState.RUNNING)
    assert running.handle(StatusChanged(status)) == [PostStates(StatusBatch(1, 1, "s1", (status,)))]
    (sent,) = running.handle(RequestRefused("states"))
    assert sent == SendRegister(
        RegisterWorker("job", 1, 1, 7, "nonce", 42, "host", "tcp://h:1", "dir", 1, (status,), ())
    )
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 1)))
    assert actions == [OpenStream(2, "s2", 0)], "the registration said the state; nothing is deployed or cancelled"


def test_reconnect_delivers_what_was_missed(running: Driver) -> None:
    running.command(trigger(3))
    running.command(trigger(4))
    running.handle(RequestRefused("stream"))
    answer = registered(2, "s2", 1, newest_completed=3, live_checkpoints=(), finish=3)
    actions = running.handle(RegistrationAnswered(answer))
    assert actions == [
        Deliver(NotifyCheckpointComplete(1, 3, 0)),
        Deliver(NotifyCheckpointAborted(1, 4, 3)),
        Deliver(FinishTasks(1, 3)),
        OpenStream(2, "s2", 0),
    ]


def test_newer_attempt_cancels_the_old_one_first(running: Driver) -> None:
    running.handle(RequestRefused("stream"))
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 2, deployment=deployment(2))))
    assert actions == [Deliver(CancelTasks(1)), Deliver(Deploy(deployment(2))), OpenStream(2, "s2", 0)]
    assert running.command(trigger(9, attempt=1), number=1, epoch=2, session="s2") == [], "a command of a dead attempt"


def test_a_leader_far_ahead_cancels_only_what_runs(running: Driver) -> None:
    """It may be a stale one: the number that it names may be the next leader's, and an attempt that was cancelled never runs."""
    running.handle(RequestRefused("stream"))
    actions = running.handle(RegistrationAnswered(registered(2, "s2", 7)))
    assert actions == [Deliver(CancelTasks(1)), OpenStream(2, "s2", 0)]


def test_newest_status_wins_while_a_post_is_under_way(running: Driver) -> None:
    first, second = (SubtaskStatus(1, "v", 1, state) for state in (TaskState.INITIALIZING, TaskState.RUNNING))
    assert running.handle(StatusChanged(first)) == [PostStates(StatusBatch(1, 1, "s1", (first,)))]
    assert running.handle(StatusChanged(second)) == []
    assert running.handle(StatesAnswered()) == [PostStates(StatusBatch(1, 1, "s1", (second,)))]
    assert running.handle(StatesAnswered()) == []


def test_loss_of_contact_is_dated(running: Driver) -> None:
    assert running.session.unreachable_since_ms is None
    running.now = 5_000
    running.handle(DeadlineReached())
    running.handle(RequestFailed("heartbeat"))
    assert running.session.unreachable_since_ms == 5_000
    running.now = 9_000
    running.handle(DeadlineReached())
    running.handle(HeartbeatAnswered(epoch=1))
    assert running.session.unreachable_since_ms is None


def test_shutdown_ends_the_session(running: Driver) -> None:
    assert running.command(ShutdownWorker("done")) == [Deliver(ShutdownWorker("done"))]
    assert running.handle(AnswerReady(ack(1))) == []


def test_the_time_of_a_retry_that_succeeded_wakes_nobody(running: Driver) -> None:
    """A past deadline with nothing to send made the control thread spin."""
    running.handle(AnswerReady(ack(1)))
    running.handle(RequestFailed("acks"))
    due = running.session.next_deadline_ms()
    assert due is not None
    running.now = due
    assert [type(action) for action in running.handle(DeadlineReached())] == [PostAcks]
    running.handle(AcksAnswered(AckAnswers(1, (AckStatus.SUCCESS,))))
    later = running.session.next_deadline_ms()
    assert later is None or later > running.now


def test_texts_that_are_in_no_utf_8_are_sent_all_the_same() -> None:
    """One of them silenced a worker for good: no message with it could be encoded, and all were tried again for ever."""
    name = "caf\udce9"
    driver = Driver()
    driver.session = Session(msgspec.structs.replace(IDENTITY, host=name), random.Random(1))
    driver.register(registered(attempt=1, deployment=deployment()))
    failed = SubtaskStatus(1, "v", 1, TaskState.FAILED, error=f"ValueError: {name}", traceback=f"... {name}")
    decline = DeclineCheckpoint(1, 1, "v", 1, FailureReason.ASYNC_EXCEPTION, name)
    (states,) = driver.handle(StatusChanged(failed))
    assert isinstance(states, PostStates)
    assert states.body.subtasks == (SubtaskStatus(1, "v", 1, TaskState.FAILED, error="ValueError: caf?", traceback="... caf?"),)
    (acks,) = driver.handle(AnswerReady(decline))
    (register,) = driver.handle(RequestRefused("acks"))
    for action in (states, acks, register):
        assert isinstance(action, PostStates | PostAcks | SendRegister)
        codec.encode(action.body)


def test_a_heartbeat_that_is_never_taken_is_not_repeated_as_it_is(running: Driver) -> None:
    """It was tried again for ever, and the worker that sent it was given up in its best health."""
    running.now += 2_000
    assert running.handle(DeadlineReached()) == [PostHeartbeat("s1", 1)]
    assert running.handle(RequestRefused("heartbeat", "no", rejected=True)) == [PostHeartbeat("s1", 1, bare=True)]
    running.handle(HeartbeatAnswered(epoch=1))
    assert running.session.unreachable_since_ms is None
    running.now += 2_000
    assert running.handle(DeadlineReached()) == [PostHeartbeat("s1", 1, bare=True)]
    running.handle(HeartbeatAnswered(epoch=1))
    running.command(Deploy(deployment(2)))
    running.now += 2_000
    assert running.handle(DeadlineReached()) == [PostHeartbeat("s1", 2)]


def test_a_bare_heartbeat_that_is_refused_is_given_up_until_the_next_is_due(running: Driver) -> None:
    """The worker can show no sign of life: it counts as one that reaches nobody."""
    refused = RequestRefused("heartbeat", "no", rejected=True)
    running.now += 2_000
    running.handle(DeadlineReached())
    running.now += 10
    assert running.handle(refused) == [PostHeartbeat("s1", 1, bare=True)]
    assert running.handle(refused) == []
    assert running.session.unreachable_since_ms == running.now
    assert running.session.next_deadline_ms() == running.now + 2_000
    running.now += 2_000
    assert running.handle(DeadlineReached()) == [PostHeartbeat("s1", 1, bare=True)]


def test_heartbeats_carry_counters_again_when_the_worker_has_registered_again(running: Driver) -> None:
    running.now += 2_000
    running.handle(DeadlineReached())
    running.handle(RequestRefused("heartbeat", "no", rejected=True))
    (sent,) = running.handle(HeartbeatAnswered(epoch=2))
    assert isinstance(sent, SendRegister)
    running.handle(RegistrationAnswered(registered(epoch=2, session="s2", attempt=1)))
    running.now += 2_000
    assert running.handle(DeadlineReached()) == [PostHeartbeat("s2", 1)]
