"""Proof that a job's launcher started a worker, as the n-th in its slot: a keyed hash that only the launcher can make. Pure.

The launcher draws a key for each submission; the coordinator stores it with the submission, so that the proof holds after a restart
of either. A worker gets its own proof alone: it can stand in for no other slot, nor for a later worker of its own."""

from __future__ import annotations

import hashlib
import hmac
import secrets


def draw_secret() -> str:
    """64 hex digits from the operating system's random source, unguessable."""
    return secrets.token_hex(32)


def launch_token(key: str, *, job_id: str, submission: int, slot: int, spawn: int) -> str:
    """The proof of one worker, 64 hex digits; empty without a key. `spawn`: 1, 2, 3 ... per slot of the submission."""
    if not key:
        return ""
    message = f"{job_id}/{submission}/{slot}/{spawn}".encode()
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def is_launched(key: str, token: str, *, job_id: str, submission: int, slot: int, spawn: int) -> bool:
    """Whether a proof is that of the worker. Always true without a key: the launcher then proves nothing."""
    if not key:
        return True
    expected = launch_token(key, job_id=job_id, submission=submission, slot=slot, spawn=spawn)
    return hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())
