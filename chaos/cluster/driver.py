"""One simulated driver: submits the job, keeps a worker in every slot, polls until the job has ended.

The slot supervisor is the product's; it starts simulated processes instead of Spark tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from holdfast.barriers.jobgraph import ClaimMode, Submission, SubmissionAccepted
from holdfast.barriers.messages import ShutdownWorker
from holdfast.chaos.checkers.observations import Submitted
from holdfast.chaos.cluster.coordinator_host import JobStatus
from holdfast.chaos.cluster.worker_host import SimPorts
from holdfast.chaos.sim.control import Call, JobClient, Reply
from holdfast.chaos.sim.kernel import Process, ProcessClock
from holdfast.operators.base import JobPlan
from holdfast.operators.spark.handle import SubmissionStatus, submission_status
from holdfast.operators.spark.supervisor import (
    Action,
    AllEnded,
    CancelWorker,
    DeadlineReached,
    Event,
    GiveUp,
    JobEnded,
    Launch,
    Question,
    SlotSupervisor,
    SpawnWorker,
    WorkerEnd,
    WorkerEnded,
    WorkersSeen,
    derive_end,
)
from holdfast.operators.worker.main import pickle_plan
from holdfast.statebackends.errors import HoldfastError, JobExistsError, StorageUnavailableError

POLL_US = 250_000
STANDBYS = (0, 1, 1, 2)
"""Of which a driver draws the number of workers that stand by."""
RETRY_US = (50_000, 300_000)


@dataclass(frozen=True, slots=True)
class Order:
    """Settings of a driver's submission."""

    plan: JobPlan
    restore: str | None = None
    fresh: bool = False
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM
    allow_output_repeat: bool = False


class Slots(Protocol):
    """The workers of a driver."""

    def spawn(self, driver: DriverHost, slot: int, spawn: int) -> None:
        """Start a worker process."""

    def cancel(self, driver: DriverHost, slot: int, spawn: int) -> None:
        """End a worker's task, and its process if that is in reach."""


class DriverHost:
    """Lives from the submission to the end of the job, or to its own."""

    def __init__(
        self, ports: SimPorts, process: Process, order: Order, slots: Slots, ended: Callable[[DriverHost, str], None]
    ) -> None:
        """`ended` is called once: with the job's terminal state, `superseded`, or the reason why it can't start."""
        self.process = process
        self.order = order
        self._ports = ports
        self._slots = slots
        self._ended = ended
        self._clock = ProcessClock(ports.kernel, process)
        self._client = JobClient(ports.control)
        self._random = ports.kernel.streams.of(f"driver/{process.name}")
        self.plan_bytes = pickle_plan(order.plan)
        self.launch_key = f"key of {process.name}"
        self.job_id = ""
        self.parallelism: int | None = None
        """Of its submission; None: the job's own."""
        self.accepted: SubmissionAccepted | None = None
        self._supervisor: SlotSupervisor | None = None
        self._question = Question()
        self.outcome = ""
        self._superseded = False
        self._drawn_standbys = ports.kernel.streams.of(f"standbys/{process.name}").choice(STANDBYS)
        self.standbys = 0
        """Workers that it has stand by."""

    @property
    def unanswered_restore(self) -> str | None:
        """Snapshot that its successor has to restore: this driver's own, unless the job was accepted."""
        return self.order.restore if self.accepted is None else None

    def start(self) -> None:
        self._submit()

    # -------------------------------------------------------------------------------------------------------- requests

    def _call(self, request: str, body: Any, kind: Any, reply: Reply) -> None:
        self._client.ask(Call(self.process, request, self.job_id), body, kind, reply)

    def _submit(self) -> None:
        submission = Submission(
            self.order.plan.graph,
            restore=self.order.restore,
            fresh=self.order.fresh,
            claim_mode=self.order.claim_mode,
            driver_nonce=self.process.name,
            launch_key=self.launch_key,
            allow_output_repeat=self.order.allow_output_repeat,
        )
        self._ports.observe(Submitted(self._ports.kernel.now_ms, self.process.name, submission))
        self._call("submit", submission, SubmissionAccepted, self._submitted)

    def _submitted(self, answer: Any) -> None:
        if isinstance(answer, SubmissionAccepted):
            self._ports.kernel.trace.add(self.process.name, "submitted", f"submission {answer.submission}")
            self.accepted, self.job_id = answer, answer.job_id
            self.standbys = min(self._drawn_standbys, answer.slots)
            self._supervisor = SlotSupervisor.of(answer.slots, self.order.plan.graph.config, self.standbys)
            self._handle(Launch())
            self._ports.kernel.after(POLL_US, self._poll, self.process)
        elif isinstance(answer, JobExistsError):
            self._end("exists")
        elif isinstance(answer, StorageUnavailableError):
            self._ports.kernel.after(self._random.randrange(*RETRY_US), self._submit, self.process)
        else:
            self._end(f"{type(answer).__name__}: {answer}")

    def _poll(self) -> None:
        if not self.outcome:
            self._question.ask(self._clock.monotonic_ms())
            self._call("look", None, JobStatus, self._answered)

    def _answered(self, answer: Any) -> None:
        if self.outcome:
            return
        self._ports.kernel.after(POLL_US, self._poll, self.process)
        if isinstance(answer, HoldfastError) or self.accepted is None:
            return
        status = submission_status(ours=self.accepted.submission, seen=answer.submission, state=answer.state)
        if status is SubmissionStatus.SUPERSEDED:
            self._superseded = True
        elif status is SubmissionStatus.ENDED:
            self.outcome = answer.state
        elif status is SubmissionStatus.OURS:
            self._handle(WorkersSeen(answer.workers, self._question.answered(self._clock.monotonic_ms())))
        if status in (SubmissionStatus.SUPERSEDED, SubmissionStatus.ENDED):
            self._handle(JobEnded())

    # ----------------------------------------------------------------------------------------------------------- slots

    def worker_ended(self, slot: int, spawn: int, left: ShutdownWorker | None, error: str = "") -> None:
        """A worker process of this driver has ended; None: it died."""
        end = WorkerEnd.DIED
        if left is not None:
            end = derive_end(respawn=left.respawn, superseded=left.superseded)
            if end is WorkerEnd.LEFT and left.reason.startswith("rejected"):
                end = WorkerEnd.RAISED
        self._superseded = self._superseded or end is WorkerEnd.SUPERSEDED
        self._handle(WorkerEnded(slot, spawn, end, error))

    def _handle(self, event: Event) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            return
        for action in supervisor.handle(event, now_ms=self._clock.monotonic_ms()):
            self._perform(action)
        deadline_ms = supervisor.next_deadline_ms()
        if deadline_ms is not None:
            self._ports.kernel.at_ms(deadline_ms, lambda: self._handle(DeadlineReached()), self.process)

    def _perform(self, action: Action) -> None:
        match action:
            case SpawnWorker(slot, spawn):
                self._slots.spawn(self, slot, spawn)
            case CancelWorker(slot, spawn, _):
                self._slots.cancel(self, slot, spawn)
            case GiveUp(_, error):
                self._end(f"gave up: {error}")
            case AllEnded():
                self._end(self.outcome or ("superseded" if self._superseded else "workers ended"))
            case _:
                assert_never(action)

    def _end(self, outcome: str) -> None:
        self._supervisor = None
        self.outcome = outcome
        self._ended(self, outcome)
