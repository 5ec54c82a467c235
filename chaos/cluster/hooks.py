"""Master hooks of simulated coordinators: some answer late, some fail, some never answer.

A hook's state is the id of its checkpoint, so that what it is given back can be judged: a state of another checkpoint ends the run.
Nothing is drawn for jobs that name no hook."""

from __future__ import annotations

from collections.abc import Callable, Collection

from holdfast.chaos.checkers.observations import HookFailing, Observation
from holdfast.chaos.sim.kernel import Kernel, Process
from holdfast.chaos.workloads.hooked import hook_states
from holdfast.coordinator.hooks.calls import HookCall, HookCallKind, HookReply, HookVerdict
from holdfast.statebackends.errors import InvariantError

LATE_US = (100, 30_000)
"""Least and most time of an answer."""
TURNS_US = 5_000
"""Time in which an answer has certainly reached its job; with less left, it may come too late."""
FAILING, HANGING = 4, 3
"""Of 100 calls. A restore is called again a few times, and then its job is over: it fails seldom, and is never late."""


class SimHooks:
    """Implements `HookHost` and, for the one job of a world, `HookPort`."""

    def __init__(self, kernel: Kernel, process: Process, observe: Callable[[Observation], None]) -> None:
        self._observe = observe
        self._kernel = kernel
        self._process = process
        self._random = kernel.streams.of(f"hooks/{process.name}")
        self._closed = False

    def check(self, names: Collection[str]) -> None:
        """As `HookHost`: those that workloads name are all installed."""

    def of_job(self, job_id: str, epoch: int) -> SimHooks:
        """As `HookHost`."""
        return SimHooks(self._kernel, self._process, self._observe)

    def call(self, call: HookCall, ended: Callable[[HookReply], None]) -> None:
        """As `HookPort`; a process that dies answers nothing."""
        fate = self._random.randrange(100)
        if call.kind is HookCallKind.RESTORE:
            _check_restored(call)
        hangs = fate < HANGING and call.kind is HookCallKind.TRIGGER
        fails = HANGING <= fate < HANGING + FAILING and (call.kind is HookCallKind.TRIGGER or self._random.randrange(2) == 0)
        reply, delay_us = _reply(call), self._random.between(*LATE_US)
        if call.kind is not HookCallKind.TRIGGER:
            delay_us //= 3
        if hangs:
            delay_us = call.timeout_ms * 1_000
        elif fails:
            reply = HookReply(HookVerdict.FAILED, message="it raised")
        if delay_us >= call.timeout_ms * 1_000:
            reply, delay_us = HookReply(HookVerdict.FAILED, message="no answer in time", timed_out=True), call.timeout_ms * 1_000
        if reply.verdict is not HookVerdict.DONE or delay_us + TURNS_US >= call.timeout_ms * 1_000:
            self._observe(HookFailing(self._kernel.now_ms, self._process.name, call.checkpoint_id))
        what = f"{call.kind.value} {call.name} {call.checkpoint_id} {reply.verdict.value}"
        self._kernel.trace.add(self._process.name, "hook", what)
        self._kernel.after(delay_us, lambda: self._answer(reply, ended), self._process)

    def _answer(self, reply: HookReply, ended: Callable[[HookReply], None]) -> None:
        if not self._closed:
            ended(reply)

    def close(self) -> None:
        """As `HookPort`."""
        self._closed = True


def _reply(call: HookCall) -> HookReply:
    states = hook_states((call.name,), call.checkpoint_id) if call.kind is HookCallKind.TRIGGER else ()
    return HookReply(state=states[0] if states else None)


def _check_restored(call: HookCall) -> None:
    """Raise InvariantError unless a hook is given what it gave for the checkpoint."""
    wanted = hook_states((call.name,), call.checkpoint_id)
    if ((call.state,) if call.state is not None else ()) != wanted:
        raise InvariantError(f"master hook {call.name} is restored to checkpoint {call.checkpoint_id} with {call.state}")
