"""SHELL: how a process ends with the one that started it, by itself or killed by it. Light: every worker loads it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1
KILLED_SECONDS_MAX = 5.0
"""How long the end of a killed process is waited for: one that storage holds dies when that answers."""


def die_with_parent(parent: int | None = None) -> bool:
    """Have the kernel kill this process as the thread that started it ends; on Linux alone. False: that process has ended before,
    and no signal will come.

    `parent`: its pid, as it told this process itself. None: nobody told it, and the end of a parent before this call goes
    unnoticed."""
    expected = os.getppid() if parent is None else parent
    with contextlib.suppress(OSError, AttributeError):  # another system has no prctl
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == expected  # asked last, so that no parent ends unnoticed between the two


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended; its code is not taken, so that its number stays its own until its group is killed."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its group, and what it started in that. Does nothing once its end is known: its number may be
    another's by then."""
    if process.returncode is not None:
        return
    for kill in (os.killpg, os.kill):  # it may have left its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process.pid, signal.SIGKILL)


def end_group(process: subprocess.Popen[bytes]) -> bool:
    """As `kill_group`, and wait for the process; pipes are closed. False: it has not ended in KILLED_SECONDS_MAX, and is left."""
    import subprocess  # no worker ends a process, and each loads this module

    kill_group(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(KILLED_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return False
    return True
