"""SHELL: the coordinator of a member, for the routes: the one that leads, or the error that names the active member."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from holdfast.api.members.membership import Membership
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import JobNumbersView, Moment
from holdfast.statebackends.errors import NotLeaderError, RecoveringError


class MemberService:
    """Implements `interface.Coordinator`: each call goes to the service that leads now, or raises what `Membership.led` does. What
    is asked of every process, whether it leads or not, is answered here."""

    def __init__(self, membership: Membership, directory: str) -> None:
        self._membership = membership
        self.directory = directory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._membership.led(), name)

    def lead(self) -> None:
        """The members decide who leads; called once requests are answered."""
        self._membership.start()

    def close(self) -> None:
        self._membership.stop()

    @property
    def ready(self) -> bool:
        """It recovered all jobs, or stands by for somebody."""
        led = self._led()
        if led is not None:
            return led.ready
        active = self._membership.active()
        return not self._membership.is_active and active is not None and active.member != self._membership.member

    def numbers(self) -> tuple[JobNumbersView, ...]:
        """Of a member that stands by: none, so that no job is counted twice."""
        led = self._led()
        return led.numbers() if led is not None else ()

    def broken_jobs(self) -> Mapping[str, str]:
        """Likewise."""
        led = self._led()
        return led.broken_jobs() if led is not None else {}

    def moment(self, job_id: str | None = None, *, diagnosed: bool = False) -> Moment:
        led = self._led()
        if led is None and job_id is None:
            return Moment(time.time_ns() // 1_000_000, self._membership.role.value)
        return self._membership.led().moment(job_id, diagnosed=diagnosed)

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """Only the one that leads takes jobs from others."""
        led = self._led()
        if led is not None:
            led.leader_unreachable(job_id, epoch)

    def _led(self) -> Coordinator | None:
        try:
            return self._membership.led()
        except (NotLeaderError, RecoveringError):
            return None


def as_coordinator(service: MemberService) -> Coordinator:
    """A member's service for those who know the interface alone: what it has not itself it takes from the one that leads."""
    return cast(Coordinator, service)
