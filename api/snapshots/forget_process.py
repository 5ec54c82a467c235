"""SHELL: the process of one forgetting that was asked for over REST, `python -m holdfast.api.snapshots.forget_process`: one request
from stdin, one answer to stdout.

The key comes by stdin, where no list of processes shows it, and no answer has it. The process yields to everything else on the
machine, and dies with the one that started it: the same request then goes on."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from holdfast.coordinator.confined import bound_process, check_memory, memory_text
from holdfast.statebackends.decoding import decode_json
from holdfast.statebackends.errors import HoldfastError

MEMORY_BYTES_MAX = 4 << 30


class ForgetRequest(msgspec.Struct, frozen=True):
    """As the arguments of `forget`."""

    state_dir: str
    job_id: str
    states: tuple[tuple[str, str], ...]
    key: str
    to: str
    keep_history: bool
    seconds_max: int
    """Of processor time; the parent bounds the time that passes."""
    checkpoint_id: int = 0
    """Of a running job: the checkpoint at whose barrier the key left it; 0: the job has ended."""
    judges: bool = False
    """Of a running job: only whether it has such states, which can have the key. There is no certificate then."""

    def __repr__(self) -> str:
        return f"ForgetRequest({self.job_id})"  # an error's text may show it


class ForgetAnswer(msgspec.Struct, frozen=True):
    certificate: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    """Why there is none."""
    error_kind: str = ""


def main() -> None:
    logging.disable()
    request = decode_json(sys.stdin.buffer.read(), ForgetRequest)
    memory_bytes = bound_process(MEMORY_BYTES_MAX, request.seconds_max)
    try:
        check_memory(memory_bytes)
        answer = _forget(request)
    except MemoryError:
        answer = ForgetAnswer(error=memory_text(memory_bytes, MEMORY_BYTES_MAX), error_kind="MemoryError")
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # no thread of a library holds it up


def _forget(request: ForgetRequest) -> ForgetAnswer:
    """Raises MemoryError."""
    from holdfast.api.snapshots.forgetting import forget  # within the bounds
    from holdfast.api.snapshots.forgetting_running import forget_running, judge_running

    what = (request.state_dir, request.job_id, request.states, request.key)
    try:
        if request.judges:
            judge_running(*what)
            return ForgetAnswer()
        if request.checkpoint_id:
            found = forget_running(*what, request.checkpoint_id, keep_history=request.keep_history)
        else:
            found = forget(*what, to=request.to, keep_history=request.keep_history)
    except HoldfastError as error:
        return ForgetAnswer(error=error.message, error_kind=type(error).__name__)
    except MemoryError:
        raise
    except Exception as error:  # its text may have the key
        return ForgetAnswer(error="an internal error", error_kind=type(error).__name__)
    return ForgetAnswer(certificate=msgspec.Raw(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
