"""CORE: the worker's session with the coordinator: register, resume, deduplicate, answer, back off.

Events in, actions out (session_events.py); the shell (gateway.py) sends and receives. Losing the coordinator stops nothing here:
unanswered acknowledgements and states wait, and the worker keeps processing. The session does not interpret commands."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import assert_never

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AlignWatermarks,
    Answerable,
    CancelTasks,
    DeclineCheckpoint,
    Deploy,
    Deployment,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskKey,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
    clip,
)
from holdfast.operators.worker.sampling import QuestionUnderWay
from holdfast.operators.worker.session_events import (
    BACKOFF_MAX_MS,
    AckKey,
    AcksAnswered,
    Action,
    AnswerQuestion,
    AnswerReady,
    CommandReceived,
    DeadlineReached,
    Deliver,
    Event,
    HeartbeatAnswered,
    OpenStream,
    PostAcks,
    PostHeartbeat,
    PostStates,
    RegistrationAnswered,
    ReportsReady,
    RequestFailed,
    RequestRefused,
    SendRegister,
    StatesAnswered,
    StatusChanged,
    WorkerIdentity,
    ack_key,
    bare_status,
    command_key,
    declined_for,
    first_batch,
    names_files,
    sendable_item,
    sendable_status,
    small_items,
)

BACKOFF_MIN_MS = 50
ACK_ITEMS_MAX = 256
"""Most acknowledgements in one POST."""
ACK_COLLECT_MS = 2
"""ms that the first acknowledgement waits for those of the worker's other subtasks, at most: one request for all costs the
coordinator a fraction of one for each."""
ACK_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of inline state in one POST, unless a single one holds more: the coordinator bounds the body of a request."""
REGISTER_BYTES_MAX = 1024 * 1024
"""Bytes of inline state in a registration; until it is answered the worker sends no heartbeat. The rest is posted afterwards."""
UNANSWERED_MAX = 10_000
REMEMBERED_COMMANDS_MAX = 4_096


class SessionState(StrEnum):
    WAITING = "waiting"
    """Not registered; registers when the backoff is over."""
    REGISTERING = "registering"
    REGISTERED = "registered"
    ENDED = "ended"
    """Superseded, rejected or ordered to leave: nothing more is sent."""


class Session:
    """Session of one worker process. At most one request of each kind is under way."""

    def __init__(self, identity: WorkerIdentity, random_source: random.Random, *, ack_collect_ms: int = 0) -> None:
        """`ack_collect_ms`: as ACK_COLLECT_MS; 0: each is posted as soon as may be."""
        self._identity = identity
        self._random = random_source
        self.state = SessionState.WAITING
        self.epoch = 0
        """Highest epoch seen; commands and answers with a lower one are refused."""
        self.session = ""
        self.attempt = 0
        self._last_number = 0
        self._failures = 0
        self._retry_at_ms: dict[str, int] = {"register": 0}
        self._under_way: set[str] = set()
        self._registering: RegisterWorker | None = None
        self._posted: dict[str, tuple[Answerable, ...] | tuple[SubtaskStatus, ...]] = {}
        self._alone: dict[str, int] = {}
        """Number of items of each kind still to be posted one by one, since the coordinator refused them together."""
        self._register_alone = False
        """A registration was refused because of its unanswered items: they are posted after it."""
        self._unanswered: OrderedDict[AckKey, Answerable] = OrderedDict()
        self._ack_collect_ms = ack_collect_ms
        self._acks_due_ms = 0
        """Until then acknowledgements are collected; in the past for those that came while others were under way."""
        self._statuses: dict[SubtaskKey, SubtaskStatus] = {}
        self._dirty: dict[SubtaskKey, SubtaskStatus] = {}
        self._seen: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self._open_triggers: set[int] = set()
        self._heartbeat_interval_ms = 2_000
        self._heartbeat_due_ms = 0
        self._beats_bare = False
        """A heartbeat was refused for its content: heartbeats carry no counters until the next registration or attempt."""
        self._began = False
        self._question = QuestionUnderWay()
        self.unreachable_since_ms: int | None = None
        """Time at which contact was lost, or first sought; None while the coordinator answers."""

    # ----------------------------------------------------------------------------------------------------- interface

    def handle(self, event: Event, *, now_ms: int) -> list[Action]:
        """Handle one event; the actions are to be performed in order."""
        if self.state is SessionState.ENDED:
            return []
        if not self._began:
            self._began, self.unreachable_since_ms = True, now_ms
        actions: list[Action] = []
        match event:
            case DeadlineReached():
                pass
            case RegistrationAnswered(registered=registered):
                actions += self._registered(registered, now_ms)
            case RequestFailed(request=request, pause_max_ms=pause_max_ms):
                self._failed(request, pause_max_ms, now_ms)
            case RequestRefused():
                actions += self._refused(event, now_ms)
            case CommandReceived(line=line):
                self._reached()
                actions += self._command(line, now_ms)
            case AcksAnswered(answers=answers):
                self._acks_answered(answers, now_ms)
            case StatesAnswered():
                self._states_answered()
            case HeartbeatAnswered(epoch=epoch):
                self._heartbeat_answered(epoch, now_ms)
            case ReportsReady(reports=reports):
                for report in reports:
                    self._report(report, now_ms)
            case AnswerReady() | StatusChanged():
                self._report(event, now_ms)
            case _:
                assert_never(event)
        return actions + self._due(now_ms)

    def _report(self, report: AnswerReady | StatusChanged, now_ms: int) -> None:
        if isinstance(report, AnswerReady):
            self._answer_ready(report.item, now_ms)
        else:
            self._status_changed(report.status)

    def next_deadline_ms(self) -> int | None:
        """Time at which `handle(DeadlineReached())` has something to do; None when only events can cause actions."""
        if self.state is SessionState.ENDED:
            return None
        if self.state is SessionState.WAITING:
            return self._retry_at_ms.get("register", 0)
        if self.state is not SessionState.REGISTERED:
            return None
        # Only requests with content count: the retry time of a request that has nothing left to send must not wake the shell.
        wanted = {"stream": 0, "heartbeat": self._heartbeat_due_ms}
        if self._unanswered:
            wanted["acks"] = 0 if self._are_acks_due(0) else self._acks_due_ms
        if self._dirty:
            wanted["states"] = 0
        waiting = [max(at, self._retry_at_ms.get(request, 0)) for request, at in wanted.items() if request not in self._under_way]
        asked_ms = self._question.next_deadline_ms()
        return min(waiting if asked_ms is None else [*waiting, asked_ms], default=None)

    @property
    def unanswered_count(self) -> int:
        return len(self._unanswered)

    # ------------------------------------------------------------------------------------------------- what to send

    def _due(self, now_ms: int) -> list[Action]:
        if self.state is SessionState.WAITING:
            return [self._register()] if self._may_send("register", now_ms) else []
        if self.state is not SessionState.REGISTERED:
            return []
        actions: list[Action] = []
        if self._may_send("stream", now_ms):
            self._under_way.add("stream")
            actions.append(OpenStream(self.epoch, self.session, self._last_number))
        if self._unanswered and self._are_acks_due(now_ms) and self._may_send("acks", now_ms):
            items = first_batch(self._unanswered.values(), 1 if self._alone.get("acks") else ACK_ITEMS_MAX, ACK_BYTES_MAX)
            self._posted["acks"] = items
            self._under_way.add("acks")
            actions.append(PostAcks(AckBatch(self.epoch, self._identity.slot, self.session, items)))
        if self._dirty and self._may_send("states", now_ms):
            changed = tuple(itertools.islice(self._dirty.values(), 1 if self._alone.get("states") else None))
            self._posted["states"] = changed
            self._under_way.add("states")
            actions.append(PostStates(StatusBatch(self.epoch, self._identity.slot, self.session, changed)))
        if now_ms >= self._heartbeat_due_ms and self._may_send("heartbeat", now_ms):
            self._under_way.add("heartbeat")
            self._heartbeat_due_ms = now_ms + self._heartbeat_interval_ms
            actions.append(PostHeartbeat(self.session, self.attempt, self._beats_bare))
        return actions + self._answers(now_ms)

    def _are_acks_due(self, now_ms: int) -> bool:
        """Whether collecting is over: its time is, each subtask has one, or a state is to be sent, which no acknowledgement is to
        come behind."""
        return now_ms >= self._acks_due_ms or bool(self._dirty) or len(self._unanswered) >= min(len(self._statuses), ACK_ITEMS_MAX)

    def stop_collecting(self) -> bool:
        """Let acknowledgements wait no more, from now on; True if there are any that did. The next event sends them."""
        was_due_ms, self._acks_due_ms, self._ack_collect_ms = self._acks_due_ms, 0, 0
        return bool(self._unanswered) and was_due_ms > 0

    def _answers(self, now_ms: int) -> list[Action]:
        """To questions. Behind heartbeats: what people want to know holds no lease up."""
        return [
            replace(action, epoch=self.epoch, session=self.session, attempt=self.attempt)
            if isinstance(action, AnswerQuestion)
            else action
            for action in self._question.advance(now_ms)
        ]

    def _may_send(self, request: str, now_ms: int) -> bool:
        return request not in self._under_way and now_ms >= self._retry_at_ms.get(request, 0)

    def _register(self) -> SendRegister:
        identity = self._identity
        body = RegisterWorker(
            job_id=identity.job_id,
            slot=identity.slot,
            submission=identity.submission,
            task_attempt=identity.task_attempt,
            nonce=identity.nonce,
            pid=identity.pid,
            host=clip(identity.host),
            data_address=identity.data_address,
            directory_nonce=identity.directory_nonce,
            attempt=self.attempt,
            subtasks=tuple(self._statuses[key] for key in sorted(self._statuses)),
            unanswered=() if self._register_alone else small_items(self._unanswered.values(), REGISTER_BYTES_MAX),
            data_key=identity.data_key,
            spawn=identity.spawn,
            launch_token=identity.launch_token,
            fingerprint=identity.fingerprint,
            data_socket=identity.data_socket,
            questions=identity.questions,
            seat=identity.seat,
            seat_spawn=identity.seat_spawn,
            sight=identity.sight,
        )
        self.state = SessionState.REGISTERING
        self._registering = body
        self._under_way = {"register"}
        return SendRegister(body)

    def _register_again(self, now_ms: int, *, after_failure: bool, pause_max_ms: int = BACKOFF_MAX_MS) -> None:
        self.state = SessionState.WAITING
        self._question.forget()
        self._under_way.clear()
        self._posted.clear()
        self._retry_at_ms = {"register": now_ms + (self._backoff(pause_max_ms) if after_failure else 0)}

    def _backoff(self, max_ms: int) -> int:
        """Random delay of 50 to 100 % of the backoff: workers that lost the same coordinator don't return at the same time."""
        if max_ms <= 0:
            return 0  # so many requests as there are coordinators follow one another; only a round of them is a failure
        ceiling = min(max_ms, BACKOFF_MIN_MS * 2 ** min(self._failures, 10))
        self._failures += 1
        return int(ceiling * (0.5 + self._random.random() / 2))

    # ------------------------------------------------------------------------------------------------------ answers

    def _reached(self) -> None:
        self._failures = 0
        self.unreachable_since_ms = None

    def _failed(self, request: str, pause_max_ms: int, now_ms: int) -> None:
        if request not in self._under_way:
            return
        self._under_way.discard(request)
        self._posted.pop(request, None)
        if request in {"register", "acks", "states", "heartbeat"} and self.unreachable_since_ms is None:
            self.unreachable_since_ms = now_ms
        if request == "register":
            self._register_again(now_ms, after_failure=True, pause_max_ms=pause_max_ms)
        else:
            self._retry_at_ms[request] = now_ms + self._backoff(pause_max_ms)

    def _refused(self, event: RequestRefused, now_ms: int) -> list[Action]:
        if event.rejected and self._digest_rejection(event, now_ms):
            return []
        if event.request == "register" and (shutdown := refused_for_good(event)) is not None:
            self.state = SessionState.ENDED
            return [Deliver(shutdown)]
        if event.request not in self._under_way:
            return []
        if event.request == "register" and self.unreachable_since_ms is None:
            self.unreachable_since_ms = now_ms  # a coordinator that does not know our job is as good as none
        if event.discarded:  # otherwise an item too large for a registration would be refused after each one, without end
            for item in self._posted_acks():
                self._unanswered.pop(ack_key(item), None)
        self._register_again(now_ms, after_failure=event.request == "register")
        return []

    def _posted_acks(self) -> list[Answerable]:
        return [item for item in self._posted.get("acks", ()) if not isinstance(item, SubtaskStatus)]

    def _digest_rejection(self, event: RequestRefused, now_ms: int) -> bool:
        """Replace items that the coordinator will never accept, so that they hold nothing else back; False if they are not the
        reason."""
        if event.request == "register":
            if self._registering is None or not self._registering.unanswered:
                return False
            self._register_alone = True
            self._alone["acks"] = len(self._unanswered)
            self._register_again(now_ms, after_failure=False)
            return True
        if event.request not in self._under_way:
            return True
        if event.request == "heartbeat":
            self._beat_refused(now_ms)
            return True
        self._reached()
        self._under_way.discard(event.request)
        posted = self._posted.pop(event.request, ())
        if len(posted) > 1:
            self._alone[event.request] = len(posted)
            return True
        self._count_alone(event.request)
        for item in posted:
            self._replace(item, event.message)
        return True

    def _beat_refused(self, now_ms: int) -> None:
        """Send a heartbeat without counters at once, as the lease expires. If that is refused, too, the next is sent when due, and
        the coordinator counts as unreachable from now."""
        self._under_way.discard("heartbeat")
        if not self._beats_bare:
            self._beats_bare, self._heartbeat_due_ms = True, now_ms
        elif self.unreachable_since_ms is None:
            self.unreachable_since_ms = now_ms

    def _replace(self, item: Answerable | SubtaskStatus, refusal: str) -> None:
        """Replace an item by a form that the coordinator accepts; drop one that is refused in that form, or decided meanwhile."""
        if isinstance(item, SubtaskStatus):
            key, bare = SubtaskKey(item.vertex, item.subtask), bare_status(item)
            if self._dirty.get(key) != item:
                return  # a later state of it will be sent anyway
            self._settle(item)
            if bare != item:
                self._statuses[key] = self._dirty[key] = bare
        elif self._unanswered.get(ack_key(item)) is item:
            if isinstance(item, AcknowledgeCheckpoint):
                self._unanswered[ack_key(item)] = declined_for(item, refusal)
            else:
                del self._unanswered[ack_key(item)]

    def _count_alone(self, request: str) -> None:
        self._alone[request] = max(0, self._alone.get(request, 0) - 1)

    def _registered(self, registered: Registered, now_ms: int) -> list[Action]:
        if self.state is not SessionState.REGISTERING or self._registering is None:
            return []
        body, self._registering = self._registering, None
        if registered.epoch < self.epoch:
            self._register_again(now_ms, after_failure=True)
            return []
        self._reached()
        self._register_alone = self._beats_bare = False
        self.state = SessionState.REGISTERED
        self.epoch, self.session, self._last_number = registered.epoch, registered.session, 0
        self._under_way.clear()
        self._retry_at_ms = {}
        for item, _answer in zip(body.unanswered, registered.answers, strict=False):
            self._unanswered.pop(ack_key(item), None)
        for status in body.subtasks:
            self._settle(status)
        self._heartbeat_interval_ms = registered.heartbeat_interval_ms
        self._heartbeat_due_ms = now_ms + registered.heartbeat_interval_ms
        return self._reconcile(registered)

    def _reconcile(self, registered: Registered) -> list[Action]:
        """Bring the worker to the state that the coordinator wants; each step is a command that may have arrived before."""
        actions: list[Action] = []
        if 0 < self.attempt < registered.attempt:
            # not the attempt that it may yet be given: a stale leader names any number
            actions += self._deliver(CancelTasks(self.attempt))
        if registered.deployment is not None:
            actions += self._deliver(Deploy(registered.deployment))
        if registered.attempt != self.attempt or self.attempt == 0:
            return actions
        newest = registered.newest_completed
        if newest > 0:
            actions += self._deliver(NotifyCheckpointComplete(self.attempt, newest, 0))
        for checkpoint_id in sorted(self._open_triggers - set(registered.live_checkpoints)):
            actions += self._deliver(NotifyCheckpointAborted(self.attempt, checkpoint_id, newest))
        if registered.finish > 0:
            actions += self._deliver(FinishTasks(self.attempt, registered.finish))
        return actions

    def _acks_answered(self, answers: AckAnswers, now_ms: int) -> None:
        if "acks" not in self._under_way:
            return
        self._reached()
        self._under_way.discard("acks")
        self._count_alone("acks")
        posted = self._posted.pop("acks", ())
        if answers.epoch != self.epoch:
            self._register_again(now_ms, after_failure=answers.epoch < self.epoch)
            return
        for item, _answer in zip(posted, answers.answers, strict=False):
            assert not isinstance(item, SubtaskStatus)
            self._unanswered.pop(ack_key(item), None)

    def _states_answered(self) -> None:
        if "states" not in self._under_way:
            return
        self._reached()
        self._under_way.discard("states")
        self._count_alone("states")
        for status in self._posted.pop("states", ()):
            assert isinstance(status, SubtaskStatus)
            self._settle(status)

    def _settle(self, status: SubtaskStatus) -> None:
        key = SubtaskKey(status.vertex, status.subtask)
        if self._dirty.get(key) == status:
            del self._dirty[key]

    def _heartbeat_answered(self, epoch: int, now_ms: int) -> None:
        if "heartbeat" not in self._under_way:
            return
        self._reached()
        self._under_way.discard("heartbeat")
        if epoch != self.epoch:
            self._register_again(now_ms, after_failure=epoch < self.epoch)

    # ------------------------------------------------------------------------------------------------------ commands

    def _command(self, line: NumberedCommand, now_ms: int) -> list[Action]:
        if self.state is not SessionState.REGISTERED or line.epoch < self.epoch:
            return []
        if line.epoch > self.epoch:
            self._register_again(now_ms, after_failure=False)
            return []
        if line.session != self.session:
            return []  # a late command of an older stream
        expected = self._last_number + (0 if line.command is None else 1)
        if line.number > expected:
            self._register_again(now_ms, after_failure=False)  # a command is missing: only a registration restores it
            return []
        if line.question is not UNSET:
            self._question.ask(line.question, now_ms)
        if line.command is None or line.number < expected:
            return []
        self._last_number = line.number
        return self._deliver(line.command)

    def _deliver(self, command: WorkerCommand) -> list[Action]:
        key = command_key(command)
        if key is not None:
            if key in self._seen:
                return []
            self._seen[key] = None
            while len(self._seen) > REMEMBERED_COMMANDS_MAX:
                self._seen.popitem(last=False)
        match command:
            case Deploy(deployment=deployment):
                if deployment.attempt <= self.attempt:
                    return []
                self._begin_attempt(deployment)
            case TriggerCheckpoint() | NotifyCheckpointComplete() | NotifyCheckpointAborted() | FinishTasks():
                if command.attempt != self.attempt:
                    return []
                self._follow(command)
            case AlignWatermarks(attempt=attempt):
                if attempt != self.attempt:
                    return []
            case ShutdownWorker():
                self.state = SessionState.ENDED
            case CancelTasks():
                pass
            case _:
                assert_never(command)
        return [Deliver(command)]

    def _begin_attempt(self, deployment: Deployment) -> None:
        self.attempt = deployment.attempt
        self._beats_bare = False
        self._open_triggers.clear()
        self._dirty.clear()
        self._forget_answers(lambda item: item.attempt < deployment.attempt)
        self._statuses = {
            SubtaskKey(subtask.vertex, subtask.subtask): SubtaskStatus(
                deployment.attempt, subtask.vertex, subtask.subtask, TaskState.DEPLOYING
            )
            for subtask in deployment.subtasks
        }

    def _follow(self, command: TriggerCheckpoint | NotifyCheckpointComplete | NotifyCheckpointAborted | FinishTasks) -> None:
        """Track which triggers are undecided, as far as this worker knows."""
        if isinstance(command, TriggerCheckpoint):
            self._open_triggers.add(command.checkpoint_id)
        else:
            self._open_triggers.discard(command.checkpoint_id)
        if isinstance(command, NotifyCheckpointAborted):
            self._forget_answers(lambda item: item.checkpoint_id == command.checkpoint_id)

    def _forget_answers(self, is_decided: Callable[[Answerable], bool]) -> None:
        """Drop answers that no longer have an effect. An acknowledgement with files is still sent: the leader learns of the files
        from it."""
        for key, item in list(self._unanswered.items()):
            if is_decided(item) and not names_files(item):
                del self._unanswered[key]

    # ------------------------------------------------------------------------------------------------ from the worker

    def _answer_ready(self, item: Answerable, now_ms: int) -> None:
        if isinstance(item, DeclineCheckpoint):
            self._acks_due_ms = now_ms  # the checkpoint is over: what its other subtasks still do for it is in vain
        elif not self._unanswered:
            self._acks_due_ms = now_ms + self._ack_collect_ms
        self._unanswered[ack_key(item)] = sendable_item(item)
        while len(self._unanswered) > UNANSWERED_MAX:
            self._unanswered.popitem(last=False)

    def _status_changed(self, status: SubtaskStatus) -> None:
        if status.attempt != self.attempt:
            return
        status = sendable_status(status)
        key = SubtaskKey(status.vertex, status.subtask)
        if self._statuses.get(key) != status:
            self._statuses[key] = status
            self._dirty[key] = status


def refused_for_good(event: RequestRefused) -> ShutdownWorker | None:
    """Order to leave for a process whose registration can never succeed; None if it may."""
    if event.superseded:
        return ShutdownWorker(f"superseded: {event.message}", superseded=True)
    if event.displaced:
        return ShutdownWorker(f"displaced: {event.message}", respawn=True)
    if event.over:
        return ShutdownWorker(f"the job is over: {event.message}")
    return ShutdownWorker(f"rejected: {event.message}") if event.rejected else None
