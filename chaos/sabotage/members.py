"""Mistakes of the election of members: takeovers without a reason, and members that lead behind another one's back."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, throughout
from holdfast.coordinator.standby import election as on
from holdfast.coordinator.standby.election import Election
from holdfast.coordinator.standby.records import ActiveRecord, SignOfLife

_WORKLOADS = ("members",)


def _sign_alone(original: Any) -> Any:
    def probe_if_stale(self: Election, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        return self._claim(active.epoch + 1) if original(self, active, now_ms) else []

    return probe_if_stale


def _probe_alone(original: Any) -> Any:
    def probe_if_stale(self: Election, active: ActiveRecord, now_ms: int) -> list[on.Action]:
        self._changed_ms = now_ms - self._config.takeover_after_ms
        return original(self, active, now_ms)  # type: ignore[no-any-return]

    return probe_if_stale


def _late_probe(original: Any) -> Any:
    def watch(self: Election, active: ActiveRecord | None, sign: SignOfLife | None, now_ms: int) -> None:
        probe = self._probe
        original(self, active, sign, now_ms)
        self._probe = probe

    return watch


def _never_cut_off(original: Any) -> Any:
    def is_cut_off(self: Election, now_ms: int) -> bool:
        self._stored_ms = now_ms
        return False

    return is_cut_off


SABOTAGES = (
    Sabotage(
        "probe_trusted_alone",
        "a member takes over from one that it can't reach, though its sign of life changes",
        ("I44",),
        (Mutant(Election, "_probe_if_stale", _probe_alone), Mutant(Election, "_watch", _late_probe)),
        workloads=_WORKLOADS,
        plan=(throughout("partition_members", ""),),
    ),
    Sabotage(
        "sign_trusted_alone",
        "a member takes over from one whose sign of life does not change, though it answers",
        ("I44",),
        (Mutant(Election, "_probe_if_stale", _sign_alone),),
        workloads=_WORKLOADS,
        plan=(throughout("store_fails", "coordinator:WriteFile/members"),),
    ),
    Sabotage(
        "stays_cut_off",
        "a member that can store no sign of life goes on to be the active one, and to answer probes as such",
        ("I44",),
        (Mutant(Election, "_is_cut_off", _never_cut_off),),
        workloads=_WORKLOADS,
        plan=(Fault("store_fails", "coordinator:WriteFile/members", at_ms=300, duration_ms=2_000),),
    ),
    Sabotage(
        "late_probe",
        "a member takes over by the answer to a probe behind which the sign of life has changed",
        ("I44",),
        (Mutant(Election, "_watch", _late_probe),),
        workloads=_WORKLOADS,
        plan=(
            throughout("partition_members", ""),
            throughout("store_fails", "coordinator:WriteFile/members", probability=0.8),
        ),
    ),
)
