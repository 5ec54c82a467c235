"""CORE, part of the job master: retries stops with a savepoint that a failover cut off.

A stop that failed has stopped sources, so its attempt fails over (docs/invariants.md, F27); the user still wants the job to stop.
Each try is a checkpoint of its own id under the same trigger id. The trigger is in progress until a try completes, fails for
another reason than a failover, or the limits below are reached. Retries are derived from the claims, so that a new leader goes on
with them."""

from __future__ import annotations

import msgspec

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.checkpoints.actions import CompleteRequest
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, SubmissionRecord

STOP_TRIES_MAX = 5
"""Checkpoints that are begun for one stop."""

STOP_RETRY_MS = 300_000
"""How long after its request a stop is tried again; the job may wait for workers that never come."""

CUT_OFF = frozenset(
    {
        FailureReason.JOB_FAILOVER,
        FailureReason.NOT_ALL_TASKS_RUNNING,
        FailureReason.TASK_NOT_READY,
        FailureReason.LEADER_CHANGED,
    }
)
"""Failures of a stop that a failover of the job or of its leader explains: the savepoint itself is not at fault."""


class StopIntent(msgspec.Struct, frozen=True):
    """A stop that a user requested, and its tries so far."""

    trigger_id: str
    target: str
    """Directory or URL in which the savepoint's folder is made."""
    drain: bool
    native: bool
    asked_ms: int
    """Time of the request, ms since the epoch."""
    tries: int = 0
    """Tries begun so far."""


class StopRetries:
    """The stops under way; bounded by the trigger register, which knows each of them."""

    def __init__(self) -> None:
        self._stops: dict[str, StopIntent] = {}
        self._until_ms: dict[str, int] = {}
        self._waiting: dict[str, CompleteRequest] = {}
        """Trigger id -> outcome of its newest try."""

    def begin(self, intent: StopIntent, *, now_ms: int, wall_ms: int) -> None:
        """Note a stop, requested just now or under an older leader. Its retries end STOP_RETRY_MS after the request."""
        left_ms = min(STOP_RETRY_MS, max(0, intent.asked_ms + STOP_RETRY_MS - wall_ms))
        self._stops[intent.trigger_id] = intent
        self._until_ms[intent.trigger_id] = now_ms + left_ms

    def resume(self, intent: StopIntent, *, now_ms: int, wall_ms: int) -> None:
        """As `begin`, for a stop whose newest try was cut off."""
        self.begin(intent, now_ms=now_ms, wall_ms=wall_ms)
        request = CheckpointRequest(CheckpointKind.STOP_SAVEPOINT, intent.trigger_id)
        self._waiting[intent.trigger_id] = CompleteRequest(request, None, failure=FailureReason.LEADER_CHANGED)

    def next_deadline_ms(self) -> int | None:
        """When the first waiting stop has waited for too long."""
        return min((self._until_ms[trigger_id] for trigger_id in self._waiting), default=None)

    def ended(self, outcome: CompleteRequest, *, now_ms: int, may_recover: bool) -> CompleteRequest | None:
        """A request ended: its outcome for the user, or None when another try follows. Requests that are no stops pass through.

        `may_recover`: the job was deployed before, and is not about to end."""
        trigger_id = outcome.request.trigger_id
        intent = self._stops.get(trigger_id)
        if intent is None:
            return outcome
        again = may_recover and intent.tries < STOP_TRIES_MAX and now_ms < self._until_ms[trigger_id]
        if outcome.failure in CUT_OFF and again:
            self._waiting[trigger_id] = outcome
            return None
        return self._give_up(trigger_id, outcome)

    def take_due(self, *, is_up: bool) -> list[StopIntent]:
        """Stops to try again now; empty unless every task runs (`is_up`)."""
        if not is_up:
            return []
        due = []
        for trigger_id in list(self._waiting):
            del self._waiting[trigger_id]
            due.append(self.note_try(trigger_id))
        return due

    def note_try(self, trigger_id: str) -> StopIntent:
        """Count a try."""
        intent = self._stops[trigger_id] = msgspec.structs.replace(self._stops[trigger_id], tries=self._stops[trigger_id].tries + 1)
        return intent

    def take_hopeless(self, *, now_ms: int, is_ending: bool) -> list[CompleteRequest]:
        """Outcomes of the waiting stops that are not tried again: their time is over, or the job ends without them."""
        ended = []
        for trigger_id in list(self._waiting):
            if is_ending or now_ms >= self._until_ms[trigger_id]:
                ended.append(self._give_up(trigger_id, self._waiting[trigger_id]))
        return ended

    def _give_up(self, trigger_id: str, outcome: CompleteRequest) -> CompleteRequest:
        tries = self._stops.pop(trigger_id).tries
        del self._until_ms[trigger_id]
        self._waiting.pop(trigger_id, None)
        return msgspec.structs.replace(outcome, tries=max(1, tries))


def derive_cut_off_stops(job: RecordedJob, submission: SubmissionRecord) -> tuple[StopIntent, ...]:
    """Stops of a submission whose newest try was cut off, and that have tries left."""
    tries: dict[str, list[ClaimRecord]] = {}
    cut_off: dict[str, bool] = {}
    for number in sorted(job.checkpoints):
        entry = job.checkpoints[number]
        claim, decision = entry.claim, entry.decision
        if claim is None or claim.kind is not CheckpointKind.STOP_SAVEPOINT or claim.submission != submission.number:
            continue
        tries.setdefault(claim.trigger_id, []).append(claim)
        cut_off[claim.trigger_id] = isinstance(decision, AbortRecord) and decision.reason in CUT_OFF
    return tuple(
        StopIntent(
            trigger_id=trigger_id,
            target=claims[-1].folder.rpartition("/")[0],
            drain=claims[-1].drain,
            native=claims[-1].native,
            asked_ms=claims[0].created_ms,
            tries=len(claims),
        )
        for trigger_id, claims in tries.items()
        if trigger_id and cut_off[trigger_id] and len(claims) < STOP_TRIES_MAX
    )
