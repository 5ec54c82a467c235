"""Calls of master hooks: from the actions of a job master, and their replies back into its events. Pure."""

from __future__ import annotations

from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.hooks.calls import HookCall, HookCallKind, HookReply, HookVerdict
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.statebackends.errors import MasterHookError


def call_of(action: actions.TriggerHook | job_actions.RestoreHook) -> HookCall:
    """The call that an action asks for."""
    if isinstance(action, actions.TriggerHook):
        return HookCall(
            HookCallKind.TRIGGER, action.name, action.checkpoint_id, action.timestamp_ms, timeout_ms=action.timeout_ms
        )
    kind = HookCallKind.RESTORE if action.checkpoint_id else HookCallKind.RESET
    return HookCall(kind, action.name, action.checkpoint_id, action.timestamp_ms, action.state, action.timeout_ms)


def outcome_of(action: actions.TriggerHook | job_actions.RestoreHook, reply: HookReply) -> job_events.Event:
    """The event that a reply is."""
    done = reply.verdict is HookVerdict.DONE
    if isinstance(action, actions.TriggerHook):
        if done:
            return events.HookAnswered(action.checkpoint_id, action.name, reply.state)
        return events.HookFailed(action.checkpoint_id, action.name, reply.message, reply.timed_out)
    if done:
        return job_events.HookRestored(action.attempt, action.try_number, action.name)
    error = None
    if reply.verdict is HookVerdict.UNKNOWN_VERSION and action.state is not None:
        error = MasterHookError(
            f"master hook {action.name!r} can't read its state of checkpoint {action.checkpoint_id}: that has version "
            f"{action.state.version}, and the hook knows {', '.join(map(str, reply.known)) or 'none'}",
            hooks=[action.name],
            stored=action.state.version,
            known=list(reply.known),
        )
    return job_events.HookNotRestored(action.attempt, action.try_number, action.name, reply.message, error)
