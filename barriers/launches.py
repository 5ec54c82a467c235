"""Proof that a worker was started by its job's launcher, in a slot, as the n-th there: a keyed hash that nobody else can make.

The launcher draws a key for each submission and gives it to the coordinator with it, which keeps it with the submission: so the
proof holds after a restart of either. A worker gets its own proof alone, and can speak for no other slot, nor for a later worker of
its own. Pure."""

from __future__ import annotations

import hashlib
import hmac
import secrets


def draw_secret() -> str:
    """What nobody can guess, from the operating system: 64 hex digits."""
    return secrets.token_hex(32)


def launch_token(key: str, *, job_id: str, submission: int, slot: int, spawn: int) -> str:
    """The proof of one worker, 64 hex digits; empty without a key. `spawn`: 1, 2, 3 ... per slot of the submission."""
    if not key:
        return ""
    message = f"{job_id}/{submission}/{slot}/{spawn}".encode()
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def is_launched(key: str, token: str, *, job_id: str, submission: int, slot: int, spawn: int) -> bool:
    """Whether a proof is that of the worker. Without a key nobody has one: a launcher that gives none vouches for nobody."""
    if not key:
        return True
    expected = launch_token(key, job_id=job_id, submission=submission, slot=slot, spawn=spawn)
    return hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())
