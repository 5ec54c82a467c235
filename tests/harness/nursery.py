"""Worker processes as copies of one process that has imported everything, as Spark's daemon makes them: importing NumPy, Arrow and
Pandas costs a worker more than most tests let it do.

The nursery is a process of its own, with one thread. It reads requests from its input, a line each, and says on its output which
process began and which one ended, and how. It ends with its input, and its workers with it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

ROOT = Path(__file__).resolve().parents[2]


class Request(msgspec.Struct):
    """A worker to be started."""

    spec: str
    """Path of its pickled WorkerSpec."""
    log: str
    """Path of what it prints."""
    environment: dict[str, str]


class Ended(msgspec.Struct):
    pid: int
    code: int
    """Negative: the signal that killed it, as `Popen.returncode` has it."""


class Worker:
    """What a test sees of one worker process; named as in `subprocess.Popen`."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.codes.get(self.pid)

    def wait(self) -> int:
        """Its exit code, as soon as it has one."""
        with self._nursery.changed:
            self._nursery.changed.wait_for(lambda: self.pid in self._nursery.codes or self._nursery.is_gone)
        return self._nursery.codes.get(self.pid, -signal.SIGKILL)

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The parent of all worker processes of one test process. Any thread may start some."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.harness.nursery"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._lock = self._process.stdin, threading.Lock()
        self._begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.codes: dict[int, int] = {}
        """Exit codes of those that have ended, until another one gets their pid."""
        self.changed = threading.Condition()
        self.is_gone = False
        threading.Thread(target=self._read, args=(self._process.stdout,), name="nursery", daemon=True).start()
        atexit.register(self._close)

    def start(self, spec: str, log: str, environment: Mapping[str, str]) -> Worker:
        """Output goes to the end of `log`."""
        with self._lock:
            self._requests.write(msgspec.json.encode(Request(spec, log, dict(environment))) + b"\n")
            self._requests.flush()
            return Worker(self._begun.get(timeout=120), self)

    def _close(self) -> None:
        self._requests.close()
        self._process.wait()

    def _read(self, lines: BinaryIO) -> None:
        for line in lines:
            told = msgspec.json.decode(line, type=int | Ended)
            if isinstance(told, Ended):
                with self.changed:
                    self.codes[told.pid] = told.code
                    self.changed.notify_all()
            else:
                self.codes.pop(told, None)
                self._begun.put(told)
        with self.changed:
            self.is_gone = True
            self.changed.notify_all()


@cache
def nursery() -> Nursery:
    """That of this process."""
    return Nursery()


# --------------------------------------------------------------------------------------------------------- its own process


def _serve() -> None:
    poll, children = select.poll(), dict[int, int]()
    poll.register(0, select.POLLIN)
    unread = b""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != 0:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = children.pop(descriptor)
                _tell(Ended(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            read = os.read(0, 1 << 16)
            if not read:
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                pid = _start(msgspec.json.decode(line, type=Request), list(children))
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
                _tell(pid)


def _tell(what: Any) -> None:
    os.write(1, msgspec.json.encode(what) + b"\n")


def _start(request: Request, descriptors: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(request.environment)
        from holdfast.operators.worker.main import main

        code = main([request.spec])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an interpreter that ends looks at all objects once more


def _preload() -> None:
    from holdfast.operators.worker.main import warm_imports
    from tests.integration import counting

    warm_imports()
    del counting
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _preload()
    _serve()
