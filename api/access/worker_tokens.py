"""Tokens of workers: a keyed hash over job and submission, so that no record is needed and the driver's own token stays with it.

The key is the state directory's own, drawn at its first use: a later coordinator of the directory accepts the workers of an earlier
one. Which submission is the current one is not judged here: the job answers a superseded worker itself, and tells it to stop."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from holdfast.api.access.roles import Caller, Role
from holdfast.coordinator.ha.records import is_job_id
from holdfast.coordinator.ha.store import put_once
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import WORKER_KEY_FILE
from holdfast.statebackends.storage.port import Flow

_PREFIX = "hfw_"
_KEY_BYTES = 32
_PURPOSE = "holdfast worker token v1"
_SUBMISSION_DIGITS_MAX = 18


def open_worker_key() -> Flow[str]:
    """The stored key, or a new one at the first use of the directory. Raises CorruptStateError for a malformed one."""
    content: bytes = yield from put_once(WORKER_KEY_FILE, secrets.token_hex(_KEY_BYTES).encode())
    key = content.decode("ascii", "replace")
    if len(key) != 2 * _KEY_BYTES or not all(digit in "0123456789abcdef" for digit in key):
        raise CorruptStateError(f"{WORKER_KEY_FILE} holds no key", path=WORKER_KEY_FILE, reason="not a key")
    return key


def is_worker_token(token: str) -> bool:
    """Whether a text has the form of a worker's token."""
    return token.startswith(_PREFIX)


def worker_token(key: str, job_id: str, submission: int) -> str:
    """The token of the workers of one submission."""
    return f"{_PREFIX}{job_id}_{submission}_{_proof(key, job_id, submission)}"


def _proof(key: str, job_id: str, submission: int) -> str:
    return hmac.new(key.encode(), f"{_PURPOSE}/{job_id}/{submission}".encode(), hashlib.sha256).hexdigest()


def read_worker_token(key: str, token: str) -> Caller | None:
    """Who a worker's token is for; None if it is not one that was made with the key."""
    job_id, _, rest = token.removeprefix(_PREFIX).partition("_")
    number, _, proof = rest.partition("_")
    if not is_job_id(job_id) or not (number.isascii() and number.isdecimal()) or len(number) > _SUBMISSION_DIGITS_MAX:
        return None
    if not hmac.compare_digest(proof.encode("utf-8", "replace"), _proof(key, job_id, int(number)).encode()):
        return None
    return Caller(Role.WORKER, job_id, f"worker token of submission {int(number)}", int(number))
