"""The states of a job, which may follow which, and the setup that a job master starts from."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.ha.records import BackoffRecord, RestorePoint
from holdfast.coordinator.jobmaster.stopping import StopIntent
from holdfast.coordinator.totals import Totals
from holdfast.coordinator.views import TriggerView


class JobState(StrEnum):
    CREATED = "CREATED"
    """The job waits for its workers."""
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    """The attempt is fenced. The next one is deployed when every slot is held by a live process."""
    RECONCILING = "RECONCILING"
    """A new leader waits for the workers that run on to register with it."""
    FAILING = "FAILING"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"
    SUSPENDED = "SUSPENDED"
    """This process leads the job no more; the job itself has not ended."""

    @property
    def is_terminal(self) -> bool:
        return self in _ENDED


_ENDED = (JobState.FAILED, JobState.CANCELED, JobState.FINISHED)
"""A tuple, since the hash of an enum's member is a function in Python: the core asks six times an event."""
_ENDS = frozenset(_ENDED)
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
"""State -> states that may follow; any other step is an InvariantError.

The terminal state is that of the stored record, which another leader may have written: a job that is FAILING here may have been
CANCELED there."""


class JobSetup(msgspec.Struct, frozen=True):
    """Everything that a job master starts from, derived from the job's directory alone: see `restore/plan.py`, derive_setup."""

    job_id: str
    epoch: int
    submission: int
    graph: JobGraph
    directory_nonce: str
    base: RestorePoint | None = None
    """Snapshot that the submission starts from while it has no completed checkpoint of its own; None: it starts empty."""
    first_checkpoint_id: int = 1
    """Ids from here on are of this submission."""
    next_checkpoint_id: int = 1
    attempt: int = 0
    """Highest attempt on record, 0 for none."""
    restarts: int = 0
    completed: tuple[CompletedCheckpoint, ...] = ()
    aborted: tuple[int, ...] = ()
    erasing: int = 0
    """Newest id at whose cut a key was to be erased, completed or not; 0 for none: no increment builds on an older one."""
    erased: int = 0
    """Newest completed one of these, which can be read; 0 for none: older ones go."""
    begins: bool = False
    """The submission was made under this epoch: it had no leader before."""
    reconcile: bool = False
    """Workers may be running `attempt`: wait for them instead of deploying the next one."""
    fail_over: bool = False
    """The attempt on record must not run on: a stop-with-savepoint of it was aborted."""
    finishing: int = 0
    """Id of the completed checkpoint that ends the submission, 0 for none: its tasks only commit and finish."""
    triggers: tuple[TriggerView, ...] = ()
    started_ms: int = 0
    """When the submission was made, ms since the epoch."""
    notes: tuple[str, ...] = ()
    """Notes of its restore: see SubmissionAccepted."""
    subsumed: tuple[RestorePoint, ...] = ()
    """Claimed snapshots that the job needs no more: they are deleted."""
    without_channel_state: int | None = None
    """As of Submission."""
    launch_key: str = ""
    """Key of the submission's launcher: see barriers/launches.py."""
    stops: tuple[StopIntent, ...] = ()
    """Stops with a savepoint that a failover cut off, and that are tried again."""
    totals: Totals = {}
    """Counts of the submission's operators at the cut that `attempt` began with."""
    backoff: BackoffRecord | None = None
    """State of the restart strategy when `attempt` was recorded."""
    progressed: bool = False
    """A checkpoint has completed in `attempt`."""
    config: JobConfig | None = None
    """Settings that hold, where a user has changed some since the submission; None: those of the graph."""
    last_config: int = 0
    """Highest number of a ConfigRecord of the job, 0 for none."""
    branch_of: str = ""
    """Name of the job that it is a branch of; empty: it is none."""

    @property
    def config_in_force(self) -> JobConfig:
        return self.graph.config if self.config is None else self.config
