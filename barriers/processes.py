"""SHELL: which process a pid is. A pid alone is reused, and means another process in another namespace or on another host; with its
fingerprint it is known over all of them. Linux only: elsewhere no process has a fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TypeAlias

AskProcess: TypeAlias = Callable[[int, str], bool]
"""As `is_running` or `has_ended`: pid and fingerprint."""

_PROC = "/proc"
_ENDED = frozenset("ZXx")
"""States of a process that runs no more, and whose parent has not taken note of it yet."""


def fingerprint_of(pid: int) -> str:
    """32 hex digits that identify a process over all hosts and all times; empty if they can't be determined.

    Hash of the host's boot, the pid namespace of this process, the pid in it, its start (ticks since the boot), and its owner."""
    return _look(pid)[0]


def sight() -> str:
    """32 hex digits that say which processes this one sees in /proc: hash of the host's name, its boot (virtual machines of one
    image in memory share it), the pid namespace, and the owner, to whom others' may be hidden. Processes with the same sight see of
    each other whether they have ended. Empty: can't be told."""
    try:
        if os.readlink(f"{_PROC}/self") != str(os.getpid()):
            return ""  # /proc is that of another namespace
        return _digest(os.uname().nodename, _boot(), _namespace(), os.geteuid())
    except OSError:
        return ""


def is_running(pid: int, fingerprint: str) -> bool:
    """Whether the process with this pid here has this fingerprint and has not ended. False says nothing of a process that was never
    seen from here: it may be in another namespace."""
    found, state = _look(pid)
    return bool(found) and found == fingerprint and state not in _ENDED


def has_ended(pid: int, fingerprint: str) -> bool:
    """Whether a process that was seen from here, or from a process with the same `sight`, has ended. False: it has not, or that
    can't be told now. One that was stopped (SIGSTOP) has not ended."""
    if not fingerprint or not fingerprint_of(os.getpid()):  # /proc can't be read now, of no process
        return False
    found, state = _look(pid)
    if found:
        return found != fingerprint or state in _ENDED
    try:
        os.stat(f"{_PROC}/{pid}")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return False


def _look(pid: int) -> tuple[str, str]:
    """Fingerprint and state; both empty if they can't be determined."""
    try:
        with open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        owner = os.stat(f"{_PROC}/{pid}").st_uid
        return _digest(_boot(), _namespace(), pid, fields[19], owner), fields[0]
    except (OSError, IndexError):
        return "", ""


def _boot() -> str:
    with open(f"{_PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _namespace() -> str:
    return os.readlink(f"{_PROC}/self/ns/pid")


def _digest(*facts: object) -> str:
    return hashlib.sha256(" ".join(map(str, facts)).encode()).hexdigest()[:32]
