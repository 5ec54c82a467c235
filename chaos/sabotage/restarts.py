"""Mistakes of the pauses before a failed job is started again."""

from __future__ import annotations

from typing import Any

import holdfast.coordinator.jobmaster.restart_backoff as backoff_module
from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.coordinator.ha.records import BackoffRecord
from holdfast.coordinator.jobmaster.restart_backoff import RestartBackoff


def _never_grows(original: Any) -> Any:
    def delay_after(self: RestartStrategy, failures: int) -> int:
        return original(self, 0)  # type: ignore[no-any-return]

    return delay_after


def _doubles(original: Any) -> Any:
    """Every multiplier is 2."""

    def delay_after(self: RestartStrategy, failures: int) -> int:
        even = self.kind != "exponential_delay"
        return self.delay_ms if even else min(self.delay_max_ms, self.delay_ms << min(failures, 62))

    return delay_after


def _never_forgets(original: Any) -> Any:
    """A failure counts for the rate for ever."""

    def expire(self: RestartBackoff, now_ms: int) -> None:
        failures_ms = tuple(self._failures_ms)
        original(self, now_ms)
        self._failures_ms.clear()
        self._failures_ms.extend(failures_ms)

    return expire


def _draws_again(original: Any) -> Any:
    """A new leader takes the failover of an attempt that was never deployed for another failure."""

    def resume(self: RestartBackoff, record: BackoffRecord, *, progressed: bool, now_ms: int, wall_ms: int) -> None:
        original(self, record, progressed=progressed, now_ms=now_ms, wall_ms=wall_ms)
        self._is_unfinished = False

    return resume


def _resets_at_checkpoints(original: Any) -> Any:
    """A completed checkpoint resets the backoff, although the strategy leaves that to time."""

    def progressed(self: RestartBackoff) -> None:
        self._reset()

    return progressed


_WORKLOADS = ("counter", "windows", "timers", "aggregate")
_STRATEGIES = ("restarts",)
_IN_A_ROW = tuple(Fault("user_error", at_ms=ms) for ms in (400, 505, 515, 720, 730, 950))
"""One attempt after the other fails before it completes a checkpoint."""

SABOTAGES = (
    Sabotage(
        "hasty_restarts",
        "a job that the user's code fails restarts at once after a completed checkpoint, and fails again",
        ("I16",),
        (Mutant(backoff_module, "is_of_user_code", constant(False)),),
        workloads=_WORKLOADS,
        plan=(Fault("user_error", at_ms=400),),
    ),
    Sabotage(
        "even_pauses",
        "the pause before a restart is the same, however often the job has failed without a checkpoint between",
        ("I16",),
        (Mutant(RestartStrategy, "delay_after", _never_grows),),
        workloads=_WORKLOADS,
        plan=_IN_A_ROW,
    ),
    Sabotage(
        "lasting_pauses",
        "a completed checkpoint does not take the pause before a restart back to the first",
        ("I16",),
        (Mutant(RestartBackoff, "progressed", constant(None)),),
        workloads=_WORKLOADS,
        plan=tuple(Fault("user_error", at_ms=ms) for ms in (300, 900, 1_500)),
    ),
    Sabotage(
        "ignored_multiplier",
        "the pause before a restart doubles, whatever multiplier the restart strategy has",
        ("I16",),
        (Mutant(RestartStrategy, "delay_after", _doubles),),
        workloads=_STRATEGIES,
        plan=_IN_A_ROW,
    ),
    Sabotage(
        "unforgotten_failures",
        "a failure counts for the failure rate for ever, so that a job ends by failures that are far apart",
        ("I16",),
        (Mutant(RestartBackoff, "_expire", _never_forgets),),
        workloads=_STRATEGIES,
        plan=tuple(Fault("user_error", at_ms=300 + 250 * number) for number in range(10)),
    ),
    Sabotage(
        "redrawn_pause",
        "a new leader counts the failure that its predecessor has counted, and draws another pause for it",
        ("I16",),
        (Mutant(RestartBackoff, "resume", _draws_again),),
        workloads=_STRATEGIES,
        plan=(*_IN_A_ROW, Fault("kill_coordinator", on="coordinator.PutIfAbsent.attempts.done", nth=3, amount=1)),
    ),
    Sabotage(
        "forgotten_failures",
        "a new leader begins with the first pause, although the restart strategy outlasts its leader",
        ("I16",),
        (Mutant(RestartBackoff, "resume", constant(None)),),
        workloads=_STRATEGIES,
        plan=(*_IN_A_ROW, Fault("kill_coordinator", on="coordinator.PutIfAbsent.attempts.done", nth=3, amount=1)),
    ),
    Sabotage(
        "reset_by_checkpoints",
        "a completed checkpoint resets the pause before a restart, although the restart strategy leaves that to time",
        ("I16",),
        (Mutant(RestartBackoff, "progressed", _resets_at_checkpoints),),
        workloads=_STRATEGIES,
        plan=tuple(Fault("user_error", at_ms=300 + 450 * number) for number in range(4)),
    ),
)
