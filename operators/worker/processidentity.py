"""SHELL: which process a pid is, so that none but that one is ever killed by it: a pid alone is used again, and means another
process in another namespace or on another host.

Linux only; elsewhere nobody has a fingerprint, and nobody is killed by one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal

_PROC = "/proc"


def fingerprint_of(pid: int) -> str:
    """32 hex digits that no other process has, of this host or any other, then or later; empty if that can't be told.

    Of the host's boot, the namespace of pids that this process sees, the pid there, when it started (ticks since the boot), whose
    it is."""
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        with open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            started = file.read().rpartition(")")[2].split()[19]
        owner = os.stat(f"{_PROC}/{pid}").st_uid
        namespace = os.readlink(f"{_PROC}/self/ns/pid")
    except (OSError, IndexError):
        return ""
    return hashlib.sha256(f"{boot} {namespace} {pid} {started} {owner}".encode()).hexdigest()[:32]


def kill_process(pid: int, fingerprint: str) -> bool:
    """SIGKILL, which ends a stopped process too, if the pid is here, and now, the process that the fingerprint is of.

    False: it was not killed, being somebody else, elsewhere, gone, or not ours to kill."""
    if pid <= 1 or pid == os.getpid() or not fingerprint or not hasattr(os, "pidfd_open"):
        return False
    try:
        handle = os.pidfd_open(pid)
    except (OSError, OverflowError):  # the number is somebody else's word, and need not be one of a process
        return False
    try:
        if fingerprint_of(pid) != fingerprint:  # asked while the handle is held: it can't become another one in between
            return False
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(handle)
