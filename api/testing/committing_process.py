"""A process of its own that commits rows to a target, and stops or dies in the middle: the real thing, beside the mishaps that are
raised within one process.

The child reads an `Order` from stdin, and imports what its parent could."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import cloudpickle
import pyarrow as pa

from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.target import CommitTarget

END_TIMEOUT_S = 60.0
REFUSED = 3
"""Exit code of a process whose `apply` raised."""

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from holdfast.api.testing.committing_process import main
main()
"""


@dataclass(frozen=True)
class Order:
    """Open the target, and apply rows; a signal comes behind row `point` of them, before the target knows that they have ended;
    one more: behind the call."""

    target: CommitTarget
    owner: CommitOwner
    batches: tuple[pa.RecordBatch, ...]
    """Of one row each."""
    checkpoint_id: int
    point: int
    number: int
    """The signal: SIGKILL or SIGSTOP."""


def main() -> None:
    """In the child. It answers nothing but how it ends."""
    order: Order = pickle.loads(sys.stdin.buffer.read())
    expected: CommitPosition = order.target.open(order.owner)

    def signal_behind(row: int) -> None:
        if row == order.point:
            # To this thread, which takes it at once: one to the process may go to another thread, and this one goes on meanwhile.
            signal.pthread_kill(threading.get_ident(), order.number)

    def rows() -> Iterator[pa.RecordBatch]:
        for row, batch in enumerate(order.batches):
            signal_behind(row)
            yield batch
        signal_behind(len(order.batches))

    try:
        order.target.apply(rows(), expected, expected.moved(order.checkpoint_id))
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(REFUSED)
    signal_behind(len(order.batches) + 1)
    os._exit(0)


class CommittingProcess:
    """The child, seen by its parent. A context manager: whatever happens, it is gone behind it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(cloudpickle.dumps(self._order))
        self._process.stdin.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._child
        if process.poll() is None:
            process.kill()
            process.wait(END_TIMEOUT_S)
        assert process.stderr is not None
        process.stderr.close()

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def wait_for_signal(self) -> None:
        """Until it was killed, or is stopped. Raises AssertionError with its words if it ended by itself."""
        _, status = os.waitpid(self._child.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return
        self._child.returncode = os.waitstatus_to_exitcode(status)
        if self._child.returncode != -signal.SIGKILL:
            raise AssertionError(f"a process that commits ended with {self._child.returncode}: {self._words()}")

    def resume(self) -> None:
        """SIGCONT."""
        self._child.send_signal(signal.SIGCONT)

    def was_refused(self) -> bool:
        """How a process that goes on ends: whether its `apply` raised."""
        code = self._child.wait(END_TIMEOUT_S)
        if code not in (0, REFUSED):
            raise AssertionError(f"a process that commits ended with {code}: {self._words()}")
        return code == REFUSED

    def _words(self) -> str:
        assert self._child.stderr is not None
        return self._child.stderr.read().decode(errors="replace")[-2_000:]
