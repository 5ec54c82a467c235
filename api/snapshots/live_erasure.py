"""SHELL: makes a running job forget a key, up to a checkpoint without it that stays until it was read.

Nothing is recorded but a label, by which that checkpoint stays: one that was left by a call that died is removed by the next.
A checkpoint that fails, a restart, and a completed one that is dropped before it has its label: it is tried again, in time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from holdfast.barriers.erasure import Erasure
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.ownership.labels import FORGETTING_LABEL, LabelList, LabelView
from holdfast.coordinator.views import JobView, TriggerView
from holdfast.statebackends.errors import ForgetError, HoldfastError, NotFoundError

SECONDS_MAX = 900.0
"""For all tries together."""
RETRY_S = 1.0
POLL_S = 0.1

ENDED = frozenset({JobState.FAILED, JobState.CANCELED, JobState.FINISHED})


class ErasingCoordinator(Protocol):
    """What of `coordinator.interface.Coordinator` it needs."""

    def job(self, job_id: str) -> JobView: ...
    def erase_key(self, job_id: str, erasure: Erasure) -> str: ...
    def trigger_status(self, job_id: str, trigger_id: str) -> TriggerView: ...
    def labels(self, job_id: str) -> LabelList: ...
    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> LabelView: ...
    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> tuple[LabelView, ...]: ...


def is_running(coordinator: ErasingCoordinator, job_id: str) -> bool:
    """Whether a job must forget while it runs; False also for one that this coordinator does not know: its records decide."""
    try:
        return coordinator.job(job_id).overview.state not in ENDED
    except NotFoundError:
        return False


class LiveErasure:
    """One key of one job."""

    def __init__(
        self,
        coordinator: ErasingCoordinator,
        job_id: str,
        erasure: Erasure,
        *,
        seconds_max: float = SECONDS_MAX,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._erasure = erasure
        self._now_s = now_s
        self._sleep = sleep
        self._until_s = now_s() + seconds_max
        self._pin = f"forgetting{secrets.token_hex(8)}"

    def run(self) -> int:
        """Id of a completed checkpoint at whose cut the key was erased; it stays until `release`.

        Raises ForgetError when the time is up or the job has ended, NotLeaderError, NotFoundError; each means that the key may be
        in the state, and that the same call can be made again."""
        self._remove_pins()
        while True:
            view = self._outcome(self._coordinator.erase_key(self._job_id, self._erasure))
            if view.checkpoint_id is not None and view.failure is None:
                if self._keep(view.checkpoint_id):
                    return view.checkpoint_id
                why = "it was dropped before it could be read"
            else:
                why = view.failure_reason or "it failed"  # the text may quote users
            self._check(why)
            self._sleep(RETRY_S)

    def release(self) -> None:
        """The checkpoint may go. Errors are left to the next call, which removes the label."""
        try:
            self._coordinator.remove_label(self._job_id, self._pin)
        except HoldfastError:
            return

    def _outcome(self, trigger_id: str) -> TriggerView:
        while True:
            view = self._coordinator.trigger_status(self._job_id, trigger_id)
            if not view.in_progress:
                return view
            if self._now_s() >= self._until_s:
                raise self._given_up("no outcome of its checkpoint in time")
            self._sleep(POLL_S)

    def _keep(self, checkpoint_id: int) -> bool:
        try:
            self._coordinator.add_label(self._job_id, checkpoint_id, self._pin)
        except HoldfastError:
            return False
        return True

    def _check(self, why: str) -> None:
        if self._coordinator.job(self._job_id).overview.state in ENDED:
            raise self._given_up("the job has ended: ask again, and name a directory for the savepoint")
        if self._now_s() + RETRY_S >= self._until_s:
            raise self._given_up(f"its last checkpoint: {why}")

    def _given_up(self, why: str) -> ForgetError:
        return ForgetError(f"job {self._job_id} has not forgotten the key: {why}", job=self._job_id)

    def _remove_pins(self) -> None:
        for view in self._coordinator.labels(self._job_id).labels:
            if FORGETTING_LABEL.fullmatch(view.label) is not None:
                self._coordinator.remove_label(self._job_id, view.label, view.checkpoint_id)
