"""Mistakes of the pauses before a failed job is started again."""

from __future__ import annotations

from typing import Any

import holdfast.coordinator.jobmaster.failover as failover_module
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.coordinator.jobmaster.failover import ExceptionHistory, Failure


def _never_grows(original: Any) -> Any:
    def restart_delay_ms(self: ExceptionHistory, failure: Failure, *, same_failure: bool) -> int | None:
        delay_ms = original(self, failure, same_failure=same_failure)
        return None if delay_ms is None else min(delay_ms, self._strategy.delay_ms)

    return restart_delay_ms


_WORKLOADS = ("counter", "windows", "timers", "aggregate")
_IN_A_ROW = tuple(Fault("user_error", at_ms=ms) for ms in (400, 505, 515, 720, 730, 950))
"""One attempt after the other fails before it completes a checkpoint."""

SABOTAGES = (
    Sabotage(
        "hasty_restarts",
        "a job that the user's code fails restarts at once after a completed checkpoint, and fails again",
        ("I16",),
        (Mutant(failover_module, "is_of_user_code", constant(False)),),
        workloads=_WORKLOADS,
        plan=(Fault("user_error", at_ms=400),),
    ),
    Sabotage(
        "even_pauses",
        "the pause before a restart is the same, however often the job has failed without a checkpoint between",
        ("I16",),
        (Mutant(ExceptionHistory, "restart_delay_ms", _never_grows),),
        workloads=_WORKLOADS,
        plan=_IN_A_ROW,
    ),
    Sabotage(
        "lasting_pauses",
        "a completed checkpoint does not take the pause before a restart back to the first",
        ("I16",),
        (Mutant(ExceptionHistory, "progressed", constant(None)),),
        workloads=_WORKLOADS,
        plan=tuple(Fault("user_error", at_ms=ms) for ms in (300, 900, 1_500)),
    ),
)
