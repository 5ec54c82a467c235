"""A job as its master knows it: the states that it passes through, and what a master starts from."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.coordinator.jobmaster.stopping import StopIntent
from holdfast.coordinator.totals import Totals
from holdfast.coordinator.views import TriggerView


class JobState(StrEnum):
    CREATED = "CREATED"
    """Waiting for its workers."""
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    """The attempt is fenced; the next one is deployed when every slot is held by a live process."""
    RECONCILING = "RECONCILING"
    """This leader is new; workers run on and come back to it."""
    FAILING = "FAILING"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"
    SUSPENDED = "SUSPENDED"
    """Not led from here any more; the job itself has not ended."""

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.FAILED, JobState.CANCELED, JobState.FINISHED)


_ENDS = frozenset({JobState.FINISHED, JobState.CANCELED, JobState.FAILED})
_INTERRUPTIONS = frozenset({JobState.FAILING, JobState.CANCELLING, JobState.SUSPENDED})

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.CREATED: _INTERRUPTIONS | {JobState.RUNNING, JobState.RECONCILING},
    JobState.RUNNING: _INTERRUPTIONS | _ENDS | {JobState.RESTARTING},
    JobState.RESTARTING: _INTERRUPTIONS | {JobState.RUNNING},
    JobState.RECONCILING: _INTERRUPTIONS | {JobState.RUNNING, JobState.RESTARTING},
    JobState.FAILING: _ENDS | {JobState.SUSPENDED},
    JobState.FAILED: frozenset(),
    JobState.CANCELLING: _ENDS | {JobState.SUSPENDED},
    JobState.CANCELED: frozenset(),
    JobState.FINISHED: frozenset(),
    JobState.SUSPENDED: frozenset(),
}
"""State -> what may follow; any other step is an InvariantError.

The terminal state is that of the stored record, which another leader may have written: a job that is FAILING here may have been
CANCELED there."""


class JobSetup(msgspec.Struct, frozen=True):
    """Everything a job master starts from; derived from the job's directory, never from an older master's memory."""

    job_id: str
    epoch: int
    submission: int
    graph: JobGraph
    directory_nonce: str
    base: RestorePoint | None = None
    """Where the submission starts while it has no completed checkpoint of its own."""
    first_checkpoint_id: int = 1
    """Ids from here on are of this submission."""
    next_checkpoint_id: int = 1
    attempt: int = 0
    """Highest attempt on record, 0 for none."""
    restarts: int = 0
    completed: tuple[CompletedCheckpoint, ...] = ()
    aborted: tuple[int, ...] = ()
    begins: bool = False
    """The submission was made under this epoch: no leader led it before."""
    reconcile: bool = False
    """Workers may be running `attempt`: wait for them instead of deploying anew."""
    fail_over: bool = False
    """The attempt on record must not run on: a stop-with-savepoint was cut off."""
    finishing: int = 0
    """Id of the completed checkpoint that ends the submission; its tasks only commit and finish."""
    triggers: tuple[TriggerView, ...] = ()
    started_ms: int = 0
    """When the submission was made, wall clock."""
    notes: tuple[str, ...] = ()
    """What its restore accepted: see SubmissionAccepted."""
    subsumed: tuple[RestorePoint, ...] = ()
    """Snapshots that this job claimed and that nothing needs any more."""
    launch_key: str = ""
    """Of the submission's launcher: see barriers/launches.py."""
    stops: tuple[StopIntent, ...] = ()
    """Stops with a savepoint that were cut off, and that are to be tried again."""
    totals: Totals = {}
    """What the submission's operators had counted at the cut that `attempt` began with."""
