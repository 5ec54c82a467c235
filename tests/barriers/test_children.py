"""A process that ends with its parent, by itself or killed by it, whichever of the two is first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

import pytest

from holdfast.barriers.children import KILLED_SECONDS_MAX, end_group, has_exited, kill_group
from holdfast.barriers.processes import fingerprint_of, has_ended
from tests.coordinator.doubles import wait_until

TIED = """
import os, time
from holdfast.barriers.children import die_with_parent
assert die_with_parent({told})
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
WITH_CHILD = "sleep 600 & echo $!; sleep 600"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        end_group(process)


def start(started: list[subprocess.Popen[bytes]], *command: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that leads its group, and the pid that it or its child says."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
    started.append(process)
    return process, int(out_of(process).readline())


def out_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def await_end(pid: int, fingerprint: str) -> None:
    wait_until(lambda: has_ended(pid, fingerprint), lambda: time.sleep(0.01), timeout_s=30, what="the end of the child")


@pytest.mark.parametrize("told", ["", "os.getppid()"])
def test_a_child_dies_with_its_parent(started: list[subprocess.Popen[bytes]], told: str) -> None:
    parent, child = start(started, sys.executable, "-c", PARENT, TIED.format(told=told))
    fingerprint = fingerprint_of(child)
    os.kill(parent.pid, signal.SIGKILL)
    await_end(child, fingerprint)


def test_a_child_sees_that_its_parent_had_ended_before_it_could_ask() -> None:
    program = "import os; from holdfast.barriers.children import die_with_parent as die; print(die(os.getpid()), die(os.getppid()))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"False True\n"


def test_a_process_is_ended_with_its_group_and_its_pipes_are_closed(started: list[subprocess.Popen[bytes]]) -> None:
    process, child = start(started, "sh", "-c", WITH_CHILD)
    fingerprint = fingerprint_of(child)
    assert not has_exited(process)
    assert end_group(process)
    assert (process.returncode, out_of(process).closed) == (-signal.SIGKILL, True)
    await_end(child, fingerprint)
    assert end_group(process), "again"


def test_what_a_process_that_has_exited_started_is_ended_too(started: list[subprocess.Popen[bytes]]) -> None:
    process, child = start(started, "sh", "-c", "sleep 600 & echo $!; exit 3")
    fingerprint = fingerprint_of(child)
    wait_until(lambda: has_exited(process), lambda: time.sleep(0.01), what="its end")
    assert end_group(process)
    assert process.returncode == 3
    await_end(child, fingerprint)


def test_a_process_that_left_its_group_is_killed(started: list[subprocess.Popen[bytes]]) -> None:
    program = f"import os, time; os.setpgid(0, {os.getpgid(0)}); print(os.getpid(), flush=True); time.sleep(600)"
    process, _ = start(started, sys.executable, "-c", program)
    assert end_group(process)
    assert process.returncode == -signal.SIGKILL


def test_nothing_is_signalled_by_the_number_of_a_process_whose_end_is_known(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = start(started, "sh", "-c", "echo 1")
    process.wait(30)
    signalled: list[int] = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda pid, _signal: signalled.append(pid))
    kill_group(process)
    assert end_group(process)
    assert signalled == []


class _Stuck(subprocess.Popen[bytes]):
    """A process that storage holds."""

    waited: tuple[float | None, ...] = ()

    def wait(self, timeout: float | None = None) -> int:
        if self.waited:
            return super().wait(timeout)
        self.waited = (timeout,)
        raise subprocess.TimeoutExpired(self.args, timeout or 0)


def test_a_process_that_does_not_die_is_left(started: list[subprocess.Popen[bytes]]) -> None:
    process = _Stuck(["sleep", "600"], stdout=subprocess.PIPE, process_group=0)
    started.append(process)
    assert not end_group(process)
    assert (process.waited, out_of(process).closed) == ((KILLED_SECONDS_MAX,), True)
