"""A server in a process of its own: a port that stays its own while it is dead, a log that a failed test shows, and the ends that
a server can meet. It knows nothing of what the server speaks."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
"""A busy machine takes ten times as long to start a server as an idle one."""
LOG_TAIL_LINES = 60


class ReservedPort:
    """A port that no other process is given: a bound socket that doesn't listen. Connections are refused while no server
    listens."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that sets it too may listen there
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """AssertionError that says `what` was waited for, once the deadline has passed."""
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended. One whose parent is gone stays as a zombie until the system's first process takes notice, which may
    be a second later."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ServerProcess(ABC):
    """A context manager; it has started when `with` begins. `folder`: an empty one is made, and removed, without it.

    Its processes: that which was started, and those that it started. `kill` ends all of them at once, as a power cut does."""

    name = "server"

    def __init__(self, folder: Path | None = None) -> None:
        self._made_folder = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-")) if folder is None else folder
        self._reserved = ReservedPort()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_path = self.folder / "server.log"
        _OPEN.add(self)

    # ------------------------------------------------------------------------------------------- what a server says of itself

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether it answers its clients."""

    def _prepare(self) -> None:
        """Before its first start."""
        return

    def _options(self) -> dict[str, object]:
        """Of `subprocess.Popen`."""
        return {}

    # -------------------------------------------------------------------------------------------------------- life and death

    @property
    def port(self) -> int:
        return self._reserved.number

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns once it answers. AssertionError with its log if it ends, or does not answer in time."""
        assert not self.is_alive, f"{self.name} runs"
        self._close_input()  # of one that ended by itself
        with self._log_path.open("ab") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, **self._options()}
            self._process = subprocess.Popen(self._command(), stderr=log, **options)  # type: ignore[call-overload]
        self._on_spawn(self._process)
        try:
            wait_until(lambda: not self.is_alive or self._is_ready(), what=f"{self.name} answers")
            assert self.is_alive, f"{self.name} ended as it started"
        except AssertionError as error:
            error.add_note(self.log_tail())
            raise

    def _on_spawn(self, process: subprocess.Popen[bytes]) -> None:
        """Before it is waited for."""
        return

    def kill(self) -> None:
        """SIGKILL to all its processes; returns once they are gone. What it had not written to a file is lost."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """It may finish what it does."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """On the same port, with the data that it left."""
        if self.is_alive:
            self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP to all its processes: connections stay, and are accepted by the kernel, but nothing is answered."""
        for process in self._processes():
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in reversed(self._processes()):
            process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it; a folder that it made for itself is removed."""
        self.kill()
        self._reserved.close()
        if self._made_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        _OPEN.discard(self)

    def log_tail(self) -> str:
        text = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        return f"--- log of {self.name} ({self._log_path}):\n" + "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def _processes(self) -> list[psutil.Process]:
        """The parent first, so that it sees none of its children end before itself."""
        if not self.is_alive:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def _end(self, number: signal.Signals) -> None:
        processes = self._processes()
        children = processes[1:] if number == signal.SIGKILL else []
        for process in [*processes[:1], *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)  # one that is paused ends only then
        if self._process is not None:
            self._process.wait(START_TIMEOUT_S)
        wait_until(lambda: not any(map(_runs, processes[1:])), what=f"the end of what {self.name} started")
        self._close_input()

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    # ------------------------------------------------------------------------------------------------------- a context manager

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.log_tail())
        self.close()


_OPEN: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Of a test that left its server open."""
    pid = os.getpid()
    for server in list(_OPEN):
        if pid == _OWNER:  # not in a fork
            server.close()


_OWNER = os.getpid()
