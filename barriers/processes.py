"""SHELL: which process a pid is. A pid alone is reused, and means another process in another namespace or on another host; with its
fingerprint it is known over all of them. Linux only: elsewhere no process has a fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TypeAlias

IsRunning: TypeAlias = Callable[[int, str], bool]
"""As `is_running`: pid and fingerprint."""

_PROC = "/proc"
_ENDED = frozenset("ZXx")
"""States of a process that runs no more, and whose parent has not taken note of it yet."""


def fingerprint_of(pid: int) -> str:
    """32 hex digits that identify a process over all hosts and all times; empty if they can't be determined.

    Hash of the host's boot, the pid namespace of this process, the pid in it, its start (ticks since the boot), and its owner."""
    return _look(pid)[0]


def is_running(pid: int, fingerprint: str) -> bool:
    """Whether the process with this pid here has this fingerprint and has not ended. False says nothing of a process that was never
    seen from here: it may be in another namespace."""
    found, state = _look(pid)
    return bool(found) and found == fingerprint and state not in _ENDED


def _look(pid: int) -> tuple[str, str]:
    """Fingerprint and state."""
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        with open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        owner = os.stat(f"{_PROC}/{pid}").st_uid
        namespace = os.readlink(f"{_PROC}/self/ns/pid")
        state, started = fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
    return hashlib.sha256(f"{boot} {namespace} {pid} {started} {owner}".encode()).hexdigest()[:32], state
