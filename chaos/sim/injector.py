"""Carries out a plan of faults: windows in which messages, calls and links misbehave, and moments at which processes die.

It decides whether a fault hits, each from its own random stream; the effect on processes is the cluster's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from holdfast.barriers.messages import AcknowledgeCheckpoint
from holdfast.chaos.checkers.observations import FaultBegan, Observation
from holdfast.chaos.faults.faults import KINDS, Fault
from holdfast.chaos.sim.forgery import forge
from holdfast.chaos.sim.kernel import Kernel, Process, ProcessClock
from holdfast.chaos.sim.stores import LATE_MS, OK, Outcome, StoreDecision
from holdfast.statebackends.errors import UserFunctionError
from holdfast.statebackends.storage.port import Operation, path_of


class Hands(Protocol):
    """The cluster's side of faults; each method returns False if there was nothing to hit."""

    def strike(self, fault: Fault, process: Process | None) -> bool:
        """Carry out a fault that happens once. `process` passed the fault's point, if it has one."""


@dataclass(eq=False, slots=True)
class _Window:
    """A fault that lasts."""

    index: int
    fault: Fault
    random: random.Random
    until_ms: int


class MessageFate(msgspec.Struct, frozen=True):
    """The effect of faults on one message."""

    lost: bool = False
    delay_us: int = 0
    copies: int = 1


FINE = MessageFate()

_MESSAGES = frozenset({"drop", "delay", "duplicate", "reorder"})
_STORE: dict[str, Outcome] = {
    "store_fails": "fail",
    "store_partial": "partial",
    "store_lies": "lie",
    "store_late": "late",
    "store_unsynced": "unsynced",
    "disk_full": "full",
}


@dataclass(eq=False)
class Injector:
    """Faults of one run."""

    kernel: Kernel
    plan: tuple[Fault, ...]
    hands: Hands
    observe: Callable[[Observation], None]
    hit: set[int] = field(default_factory=set)
    """Indexes of faults that hit something."""
    stopped: bool = False

    def __post_init__(self) -> None:
        self._windows: dict[str, list[_Window]] = {}
        self._waiting = [(index, fault) for index, fault in enumerate(self.plan) if fault.on]
        self._passed = [0] * len(self.plan)
        self._armed: list[tuple[int, Fault]] = []
        """Faults of operators that wait for the operator's next call."""

    def start(self) -> None:
        """Schedule the faults."""
        for index, fault in enumerate(self.plan):
            if fault.at_ms is not None:
                self.kernel.at_ms(fault.at_ms, lambda index=index, fault=fault: self._begin(index, fault))  # type: ignore[misc]

    def stop(self) -> None:
        """End all faults."""
        self.stopped = True
        self._windows.clear()
        self._waiting.clear()
        self._armed.clear()

    # ----------------------------------------------------------------------------------------------------------- moments

    def point(self, name: str, process: Process) -> None:
        """A process passes a named point: faults that wait for it hit now."""
        if not process.alive:
            return  # a dead process passes no point; its requests are still on their way
        process.last_point = name
        if not self._waiting:
            return
        for index, fault in list(self._waiting):
            if name.startswith(fault.on):
                self._passed[index] += 1
                if self._passed[index] == fault.nth:
                    self._waiting.remove((index, fault))
                    self._begin(index, fault, process)

    def _begin(self, index: int, fault: Fault, process: Process | None = None) -> None:
        if self.stopped:
            return
        if fault.kind == "kill_recovering":
            self._passed[index] = 0
            self._waiting.append((index, _when_recovering(fault)))
        elif fault.kind in ("user_error", "blocked_operator"):
            self._armed.append((index, fault))
        elif KINDS[fault.kind].lasts and fault.kind not in ("pause_worker", "pause_coordinator", *_TAKEOVERS):
            window = _Window(index, fault, self.kernel.streams.of(f"fault/{fault.label}"), self.kernel.now_ms + fault.duration_ms)
            self._windows.setdefault(fault.kind, []).append(window)
            if fault.kind == "local_disk_full":
                self.hands.strike(fault, process)
        elif self.hands.strike(fault, process):
            self._count(index, fault)

    def are_members_cut(self) -> bool:
        """Whether a message between two members is lost now."""
        return any(self._hits(window) for window in self._open("partition_members"))

    def _count(self, index: int, fault: Fault) -> None:
        if index not in self.hit:
            self.hit.add(index)
            self.kernel.trace.add("fault", fault.kind, fault.label)
            self.observe(FaultBegan(self.kernel.now_ms, index, fault.kind))

    def _open(self, kind: str) -> list[_Window]:
        windows = self._windows.get(kind)
        if not windows:
            return []
        now_ms = self.kernel.now_ms
        if any(window.until_ms <= now_ms for window in windows):
            windows = self._windows[kind] = [window for window in windows if window.until_ms > now_ms]
        return windows

    def _hits(self, window: _Window) -> bool:
        if window.random.random() >= window.fault.probability:
            return False
        self._count(window.index, window.fault)
        return True

    # ---------------------------------------------------------------------------------------------------------- messages

    def message(self, kind: str, slot: int) -> MessageFate:
        """The fate of a control message of a kind, from or to the worker of a slot."""
        if not self._windows:
            return FINE
        for window in self._open("partition"):
            if _is_worker(window.fault.target, slot) and self._hits(window):
                return MessageFate(lost=True)
        lost, delay_us, copies = False, 0, 1
        for fault_kind in sorted(_MESSAGES & self._windows.keys()):
            for window in self._open(fault_kind):
                if window.fault.target not in ("all", "", kind) or not self._hits(window):
                    continue
                if fault_kind == "drop":
                    lost = True
                elif fault_kind == "duplicate":
                    copies += 1
                elif fault_kind == "delay":
                    delay_us += window.fault.amount * 1000
                else:
                    delay_us += window.random.randrange(max(1, window.fault.amount * 1000))
        return MessageFate(lost, delay_us, copies)

    def acknowledgements(self, ack: AcknowledgeCheckpoint, slot: int) -> tuple[AcknowledgeCheckpoint, ...]:
        """Messages that the worker of a slot sends in the place of an acknowledgement."""
        for window in self._open("forged_ack"):
            if _is_worker(window.fault.target, slot) and self._hits(window):
                return forge(ack, window.random)
        return (ack,)

    def link_delay_us(self, one: int, other: int) -> int:
        """Extra delay of a frame between two slots."""
        delay_us = 0
        for window in self._open("slow_link"):
            if _is_link(window.fault.target, one, other) and self._hits(window):
                delay_us += window.fault.amount * 1000
        return delay_us

    # ------------------------------------------------------------------------------------------------------------- store

    def store_delay_us(self, process: Process, operation: Operation) -> int:
        """Extra delay of a call."""
        delay_us = 0
        for window in self._open("store_slow"):
            if _is_call(window.fault.target, process.role, operation) and self._hits(window):
                delay_us += window.fault.amount * 1000
        return delay_us

    def decide(self, actor: str, role: str, operation: Operation) -> StoreDecision:
        """The fate of a call of the store (`stores.StoreFaults`)."""
        if not self._windows:
            return OK
        for kind, outcome in _STORE.items():
            for window in self._open(kind):
                if _is_call(window.fault.target, role, operation) and self._hits(window):
                    fraction = window.random.random()
                    return StoreDecision(outcome, fraction=fraction, delay_ms=window.fault.amount or LATE_MS)
        return OK

    def is_local_disk_full(self) -> bool:
        """Whether writes to the workers' own disk fail now."""
        return any(self._hits(window) for window in self._open("local_disk_full"))

    # --------------------------------------------------------------------------------------------------------- operators

    def operator(self, uid: str, clock: ProcessClock) -> None:
        """An operator of user code is called. Raises UserFunctionError, which counts as the user's, when it is to fail; a slow
        operator advances its clock."""
        if not self._windows and not self._armed:
            return
        for window in self._open("slow_operator"):
            if window.fault.target in ("", "all", uid) and self._hits(window):
                clock.spent_us += window.fault.amount * 1000
        for index, fault in list(self._armed):
            if fault.target not in ("", "all", uid):
                continue
            self._armed.remove((index, fault))
            self._count(index, fault)
            if fault.kind == "user_error":
                raise UserFunctionError(f"operator {uid!r}: the user's function raised what was injected", operator=uid, frames="")
            clock.spent_us += fault.amount * 1000


_TAKEOVERS = ("second_coordinator", "old_leader_wakes")


def _when_recovering(fault: Fault) -> Fault:
    """Kill the next process that recovers: a worker that restores state, a coordinator that has not tried to lead every job yet."""
    if fault.target == "coordinator":
        return msgspec.structs.replace(fault, kind="kill_coordinator", on="coordinator.recovering.", at_ms=None, nth=3, target="")
    return msgspec.structs.replace(fault, kind="kill_worker", on="worker.restore.", at_ms=None, nth=1, target="")


def _is_worker(target: str, slot: int) -> bool:
    return target in ("", "workers", f"worker-{slot}")


def _is_link(target: str, one: int, other: int) -> bool:
    return target in ("", "all", f"{one}-{other}", f"{other}-{one}")


def _is_call(target: str, role: str, operation: Operation) -> bool:
    """Match `[role:]operation[/part-of-path]`, where the operation may be `all` or empty."""
    who, colon, rest = target.rpartition(":")
    if colon and who != role:
        return False
    name, _, part = rest.partition("/")
    if name not in ("", "all", type(operation).__name__):
        return False
    return part in path_of(operation)
