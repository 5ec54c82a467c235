"""Processes as copies of one process that has imported everything, as Spark's daemon makes its workers: importing NumPy, Arrow and
Pandas costs a process more than most tests let it do.

The nursery is a process of its own, with one thread. It takes requests from its input, a packet each, and says on its output which
process began and which one ended, and how. It ends with its input, and its children with it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

ROOT = Path(__file__).resolve().parents[2]
REQUEST_SIZE_MAX = 1 << 17
"""Bytes."""


class Request(msgspec.Struct):
    """A process to be started. Its error output comes with it, and the descriptor that it is given."""

    function: str
    """module:name. An exit code that it returns is that of the process."""
    arguments: list[str]
    descriptor: int | None
    """The number of that descriptor in the process."""
    folder: str
    import_path: list[str]
    environment: dict[str, str]


class Ended(msgspec.Struct):
    pid: int
    code: int
    """Negative: the signal that killed it, as `Popen.returncode` has it."""


class Child:
    """What a test sees of one process; named as in `subprocess.Popen`."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.codes.get(self.pid)

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code, as soon as it has one. Raises TimeoutError."""
        with self._nursery.changed:
            if not self._nursery.changed.wait_for(lambda: self.pid in self._nursery.codes or self._nursery.is_gone, timeout_s):
                raise TimeoutError(f"process {self.pid} has not ended within {timeout_s} s")
        return self._nursery.codes.get(self.pid, -signal.SIGKILL)

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The parent of processes that one test process starts. Any thread may start some."""

    def __init__(self, modules: tuple[str, ...], hash_seed: str | None) -> None:
        command = [sys.executable, "-m", "tests.harness.nursery", *modules]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if hash_seed is not None:
            environment["PYTHONHASHSEED"] = hash_seed
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs.fileno(), stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._lock = threading.Lock()
        self._begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.codes: dict[int, int] = {}
        """Exit codes of those that have ended, until another one gets their pid."""
        self.changed = threading.Condition()
        self.is_gone = False
        threading.Thread(target=self._read, args=(self._process.stdout,), name="nursery", daemon=True).start()
        atexit.register(self._close)

    def start(self, function: str, *arguments: str, errors: int = 2, descriptor: int | None = None) -> Child:
        """A process with this one's folder, import path and environment, in which a descriptor has the number that it has here."""
        request = Request(function, list(arguments), descriptor, os.getcwd(), sys.path, dict(os.environ))
        descriptors = [errors] if descriptor is None else [errors, descriptor]
        with self._lock:
            socket.send_fds(self._requests, [msgspec.json.encode(request)], descriptors)
            return Child(self._begun.get(timeout=120), self)

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
def nursery(*modules: str, hash_seed: str | None = None) -> Nursery:
    """That of this process for copies that have imported these modules. hash_seed: their PYTHONHASHSEED; None: this one's."""
    return Nursery(modules, hash_seed)


def start_worker(spec: str, log: str) -> Child:
    """A worker with the path of its pickled WorkerSpec. Its output goes to the end of `log`."""
    with open(log, "ab") as errors:
        workers = nursery("holdfast.operators.worker.main", "tests.integration.counting", "pandas")
        return workers.start(f"{__name__}:run_worker", spec, errors=errors.fileno())


def run_worker(spec: str) -> int:
    from holdfast.operators.worker.main import main

    os.dup2(2, 1)
    return main([spec])


# --------------------------------------------------------------------------------------------------------- its own process


def _serve(requests: socket.socket) -> None:
    poll, children = select.poll(), dict[int, int]()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != requests.fileno():
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = children.pop(descriptor)
                _tell(Ended(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            packet, given, _, _ = socket.recv_fds(requests, REQUEST_SIZE_MAX, 2)
            if not packet:
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            pid = _start(msgspec.json.decode(packet, type=Request), given, list(children))
            for number in given:
                os.close(number)
            descriptor = os.pidfd_open(pid)
            children[descriptor] = pid
            poll.register(descriptor, select.POLLIN)
            _tell(pid)


def _tell(what: Any) -> None:
    os.write(1, msgspec.json.encode(what) + b"\n")


def _start(request: Request, given: list[int], of_others: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: int | None = 1
    try:
        for descriptor in of_others:
            os.close(descriptor)
        _become(request, given)
        module, _, name = request.function.partition(":")
        code = getattr(importlib.import_module(module), name)(*request.arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)  # an interpreter that ends looks at all objects once more
    raise AssertionError


def _become(request: Request, given: list[int]) -> None:
    """What a new interpreter has from its parent."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, nothing), (1, nothing), (2, given[0])):
        os.dup2(source, target)
    if request.descriptor is not None:
        os.dup2(given[1], request.descriptor)
    for number in {nothing, *given} - {request.descriptor}:
        os.close(number)
    os.chdir(request.folder)
    sys.path[:] = request.import_path
    os.environ.clear()
    os.environ.update(request.environment)


def _preload(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _preload(sys.argv[1:])
    with socket.socket(fileno=0) as inbox:
        _serve(inbox)
