"""The process of one master hook: `python -m holdfast.coordinator.hooks.child MODULE:NAME PARENT`. Started by `process.py` alone.

What the hook prints goes to standard error: standard output, as it was, carries answers. The process ends with its coordinator."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from holdfast.barriers.children import die_with_parent
from holdfast.coordinator.hooks.calls import MESSAGE_CHARS_MAX, HookCallKind, HookVerdict
from holdfast.coordinator.hooks.frames import FRAME_BYTES_MAX, PREFIX, HookAnswer, HookRequest, decode_request, frame
from holdfast.coordinator.hooks.hook import HookCheckpoint, MasterHook
from holdfast.statebackends.snapshot.metadata import HOOK_STATE_BYTES_MAX


def main(spec: str, parent: int) -> None:
    """Answer requests until there are no more. `parent`: pid of the coordinator."""
    if not die_with_parent(parent):
        return
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    hook: MasterHook | None = None
    while (request := _read(requests)) is not None:
        try:
            hook = load(spec) if hook is None else hook
            answer = perform(hook, request)
        except Exception as error:
            answer = _failed(request, f"{type(error).__name__}: {error}")
        answers.write(frame(answer))
        answers.flush()


def _read(requests: Any) -> HookRequest | None:
    prefix = requests.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    (length,) = PREFIX.unpack(prefix)
    content = requests.read(min(length, FRAME_BYTES_MAX))
    return decode_request(content) if len(content) == length else None


def load(spec: str) -> MasterHook:
    """The hook that an entry point names. Raises TypeError for what is none."""
    module, _, name = spec.partition(":")
    made: Any = importlib.import_module(module)
    for part in name.split("."):
        made = getattr(made, part)
    hook = made()
    if not isinstance(hook, MasterHook):
        raise TypeError(f"{spec} gives a {type(hook).__name__}, which is no holdfast.MasterHook")
    return hook


def perform(hook: MasterHook, request: HookRequest) -> HookAnswer:
    """Call the hook; its errors pass through."""
    checkpoint = HookCheckpoint(request.job_id, request.epoch, request.checkpoint_id, request.timestamp_ms)
    done = HookAnswer(request.number, request.epoch, request.checkpoint_id)
    match request.kind:
        case HookCallKind.TRIGGER:
            return _with_state(done, request, hook.trigger_checkpoint(checkpoint), hook.version)
        case HookCallKind.RESTORE:
            known = (hook.version,) if hook.reads is None else tuple(hook.reads)
            if request.state is not None and request.version not in known:
                unknown = HookVerdict.UNKNOWN_VERSION
                return HookAnswer(request.number, request.epoch, request.checkpoint_id, unknown, known=known[:20])
            hook.restore_checkpoint(checkpoint, request.version, request.state)
        case HookCallKind.RESET:
            hook.reset(checkpoint)
        case HookCallKind.CLOSE:
            hook.close()
    return done


def _with_state(done: HookAnswer, request: HookRequest, state: object, version: int) -> HookAnswer:
    if state is None:
        return done
    if not isinstance(state, bytes):
        return _failed(request, f"its state is bytes or None, not {type(state).__name__}")
    if len(state) > HOOK_STATE_BYTES_MAX:
        return _failed(request, f"its state has {len(state)} bytes; at most {HOOK_STATE_BYTES_MAX} are stored")
    return HookAnswer(done.number, done.epoch, done.checkpoint_id, done.verdict, version, state)


def _failed(request: HookRequest, message: str) -> HookAnswer:
    text = message[:MESSAGE_CHARS_MAX]
    return HookAnswer(request.number, request.epoch, request.checkpoint_id, HookVerdict.FAILED, message=text)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
