"""SHELL: who sent a request: the service's own token, an issued one, or a worker's.

The records of issued tokens are read again when one is presented and they are older than READ_EVERY_S, so that a token that was
revoked at any coordinator of the state directory ends everywhere soon after. While they can't be read, issued tokens are refused
(503); the service's own token and those of workers need no storage. Tokens are compared in constant time and never logged."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from anyio import CapacityLimiter, to_thread

from holdfast.api.access import issued, worker_tokens
from holdfast.api.access.issued import TokenRecord
from holdfast.api.access.networks import network_of
from holdfast.api.access.request_budget import RequestBudget
from holdfast.api.access.roles import ANY_JOB, Access, Caller, Role
from holdfast.api.access.sessions import OWN_TOKEN, Sessions
from holdfast.statebackends.errors import (
    AccessDeniedError,
    AuthenticationError,
    HoldfastError,
    InvalidConfigError,
    StorageUnavailableError,
    TooManyRequestsError,
)
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import FileFacts, Flow, Storage, T, run_flow

log = logging.getLogger("holdfast.auth")

READ_EVERY_S = 2.0
"""Age of the records from which on they are read again: with READ_TIMEOUT_S below the 5 s in which a revoked token ends."""
READ_TIMEOUT_S = 2.5
RETRY_EVERY_S = 0.5
"""Pause behind a reading that failed: made-up tokens must not cause one each."""
LOGINS_PER_S = 5
"""Logins of one address, or network of one machine; twice as many at once."""
CLOCK_MS_MAX = 300_000
"""Difference of clocks that is said: a token of another machine is from the future, or this machine's clock was changed."""
_CREDENTIAL_BYTES_MAX = 8_192
_UNKNOWN = "the state directory can't be read: whose the token is can't be told"

ADMIN = Caller(Role.ADMIN, credential="token")
HERE = Caller(Role.ADMIN, credential="no token")
"""A caller on loopback of a service without a token."""


@dataclass(frozen=True, slots=True)
class Login:
    """A session that was begun."""

    caller: Caller
    text: str
    """What the browser keeps; empty where the service needs no credential."""
    life_s: int


class Authenticator:
    """Credentials of one service. All but `mint` and the changes of tokens run on its event loop."""

    def __init__(
        self,
        location: str,
        token: str | None,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`location`: the state directory. `token`: the service's own; None: it has none, and knows no others."""
        self._location = location
        self._token = token.encode() if token is not None else None
        self._monotonic_s = monotonic_s
        self._wall_ms = wall_ms
        self._began_s, self._began_ms = monotonic_s(), wall_ms()
        self._clock_said = 0
        self._sessions = Sessions()
        self._logins = RequestBudget()
        self._opened: Storage | None = None
        self._key: str | None = None
        self._records: Mapping[str, TokenRecord] = {}
        self._read_s: float | None = None
        self._known: Mapping[FileFacts, TokenRecord] = {}
        self._damaged: tuple[str, ...] = ()
        self._publishing = threading.Lock()
        self._failed_s: dict[str, float] = {}
        """When which work on storage failed last."""
        self._reading = asyncio.Lock()
        self._one_thread = CapacityLimiter(1)
        """For a storage that hangs: further callers wait for the thread that hangs, and none of them takes one of its own."""

    @property
    def has_token(self) -> bool:
        """Whether callers need a credential."""
        return self._token is not None

    async def caller_of(self, authorization: bytes) -> Caller:
        """Who a request with this header is from. Raises AuthenticationError, StorageUnavailableError."""
        token = _token_in(authorization)
        assert self._token is not None
        if hmac.compare_digest(token, self._token):
            return ADMIN
        text = token.decode("latin-1")
        found: Caller | None = None
        if issued.is_issued(text):
            found = await self._issued(text)
        elif worker_tokens.is_worker_token(text):
            found = worker_tokens.read_worker_token(await self._worker_key(), text)
        if found is None:
            raise AuthenticationError("missing or wrong bearer token")
        return found

    async def _issued(self, token: str) -> Caller | None:
        await self._in_time(self._read, self._is_fresh)
        token_id = issued.token_id_of(token)
        record = self._records.get(token_id)
        if record is None and issued.is_token_id(token_id):
            raise AuthenticationError(f"token {token_id} is not known here: it was revoked, or is for another state directory")
        if record is None or not issued.matches(record, token):
            return None
        if record.is_expired(self.now_ms()):
            raise AuthenticationError(f"the token {record.name or record.token_id} has expired")
        return record.caller()

    def now_ms(self) -> int:
        """ms since the epoch by the later of two clocks: the machine's, and the one that it had at the start. So a clock that is
        set back brings no expired token back to life; one that is set far is named."""
        steady_ms = self._began_ms + round((self._monotonic_s() - self._began_s) * 1000)
        wall_ms = self._wall_ms()
        apart = round((wall_ms - steady_ms) / CLOCK_MS_MAX)
        if apart != self._clock_said:
            self._clock_said = apart
            by_s = (wall_ms - steady_ms) // 1000
            log.warning("the clock of this machine was set by %d s since the start: tokens end by the later one", by_s)
        return max(wall_ms, steady_ms)

    # -------------------------------------------------------------------------------------------------------- sessions

    async def log_in(self, token: str, peer: str) -> Login:
        """Begin a session. `peer`: the browser's address. Raises AuthenticationError, AccessDeniedError for a worker's token,
        TooManyRequestsError, StorageUnavailableError."""
        wait_ms = self._logins.take(network_of(peer), per_s=LOGINS_PER_S, now_ms=self._steady_ms())
        if wait_ms:
            raise TooManyRequestsError("too many logins from this address: try again later", retry_after_ms=wait_ms)
        if not self.has_token:
            return Login(HERE, "", 0)
        caller = await self.caller_of(b"Bearer " + token.strip().encode("latin-1", "replace"))
        if caller.role is Role.WORKER:
            text = "a worker's token begins no session"
            raise AccessDeniedError(text, role=caller.role.value, needed=Access.IDENTIFY.value)
        secret_hash = self._records[caller.account].secret_hash if caller.account else ""
        text, session = self._sessions.open(
            caller.account or OWN_TOKEN,
            secret_hash,
            now_ms=self._steady_ms(),
            wall_ms=self.now_ms(),
            token_expires_ms=caller.expires_ms,
        )
        life_s = max(1, (session.ends_ms - self._steady_ms()) // 1000)
        return Login(replace(caller, expires_ms=session.expires_at_ms), text, life_s)

    async def caller_of_session(self, text: str) -> Caller:
        """Who a session's request is from: who its token is for now. Raises AuthenticationError, StorageUnavailableError."""
        session = self._sessions.find(text, now_ms=self._steady_ms())
        if session is None:
            raise AuthenticationError("the session has ended: log in again")
        caller = ADMIN
        if session.token_id != OWN_TOKEN:
            await self._in_time(self._read, self._is_fresh)
            record = self._records.get(session.token_id)
            if record is None or record.secret_hash != session.secret_hash or record.is_expired(self.now_ms()):
                self._sessions.close(text)
                raise AuthenticationError("the session's token has expired or was revoked: log in again")
            caller = record.caller()
        return replace(caller, credential=f"session of {caller.credential}", expires_ms=session.expires_at_ms)

    def log_out(self, text: str) -> None:
        """End a session. Idempotent."""
        self._sessions.close(text)

    def _steady_ms(self) -> int:
        return round(self._monotonic_s() * 1000)

    # --------------------------------------------------------------------------------------------------------- storage

    def _is_fresh(self) -> bool:
        return self._read_s is not None and self._monotonic_s() - self._read_s < READ_EVERY_S

    async def _worker_key(self) -> str:
        await self._in_time(self._open_key, lambda: self._key is not None)
        assert self._key is not None
        return self._key

    async def _in_time(self, work: Callable[[], object], is_done: Callable[[], bool]) -> None:
        """Work on storage, in a thread, unless it is done. Raises StorageUnavailableError where it fails or takes too long, waiting
        for the work of others included; its outcome is not lost then."""
        if is_done():
            return
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._reading:
                if not is_done():
                    await self._try(work)
        except TimeoutError as error:
            raise StorageUnavailableError("the state directory does not answer: whose the token is can't be told") from error

    async def _try(self, work: Callable[[], object]) -> None:
        """Raises StorageUnavailableError where it fails, and at once for RETRY_EVERY_S behind that. What storage says is not for a
        caller that nobody knows."""
        if self._monotonic_s() - self._failed_s.get(work.__name__, -math.inf) < RETRY_EVERY_S:
            raise StorageUnavailableError(_UNKNOWN)
        try:
            await to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._one_thread)
        except HoldfastError as error:
            self._failed_s[work.__name__] = self._monotonic_s()
            log.warning("whose a token is can't be told: %s", error)
            raise StorageUnavailableError(_UNKNOWN) from error

    # ------------------------------------------------------------------------------------------------------ any thread

    def _run(self, flow: Flow[T]) -> T:
        if self._opened is None:
            self._opened = open_storage(self._location)
        return run_flow(flow, self._opened)

    def _open_key(self) -> str:
        if self._key is None:
            self._key = self._run(worker_tokens.open_worker_key())
        return self._key

    def _read(self) -> None:
        """Two may run at a time: the one that began later counts, or a token that was just revoked would be back."""
        began_s = self._monotonic_s()
        known, damaged = self._run(issued.read_tokens(self._known))
        with self._publishing:
            if self._read_s is not None and began_s < self._read_s:
                return
            if damaged != self._damaged:
                for problem in damaged:
                    log.warning("an issued token is refused: %s", problem)
            self._records = {record.token_id: record for record in known.values()}
            self._check_clock(known)
            self._known, self._damaged, self._read_s = known, damaged, began_s

    def _check_clock(self, known: Mapping[FileFacts, TokenRecord]) -> None:
        """Name a clock that is off where another machine's says otherwise: a token can't be of the future."""
        if known is self._known or not (new := [record for facts, record in known.items() if facts not in self._known]):
            return
        newest = max(new, key=lambda record: record.created_ms)
        ahead_ms = newest.created_ms - self.now_ms()
        if ahead_ms > CLOCK_MS_MAX:
            log.warning(
                "token %s was created %d s from now: the clock of this machine is behind, or that of its coordinator was ahead; "
                "tokens end too late here, or too early there",
                newest.token_id,
                ahead_ms // 1000,
            )

    def prepare(self) -> None:
        """Open what `worker_token` needs. Raises CorruptStateError, StorageUnavailableError: before a job is begun for nothing."""
        if self.has_token:
            self._open_key()

    def worker_token(self, job_id: str, submission: int) -> str:
        """The token of a submission's workers; empty where the service needs none."""
        return worker_tokens.worker_token(self._open_key(), job_id, submission) if self.has_token else ""

    def issue(self, role: str, *, name: str, job_id: str = ANY_JOB, life_ms: int | None = None) -> tuple[str, TokenRecord]:
        """Issue a token; its text is not kept anywhere. Raises InvalidConfigError, StorageUnavailableError."""
        if not self.has_token:
            raise InvalidConfigError("this service runs without tokens (--no-token): it would accept every caller", setting="token")
        token, record = issued.draw_token(role, name=name, job_id=job_id, life_ms=life_ms, now_ms=self.now_ms())
        self._run(issued.store_token(record))
        self._read()
        return token, record

    def revoke(self, token_id: str) -> None:
        """Raises NotFoundError, StorageUnavailableError."""
        self._run(issued.revoke_token(token_id))
        self._read()

    def tokens(self) -> tuple[TokenRecord, ...]:
        """All issued tokens that are not revoked, oldest first; read from storage now."""
        self._read()
        return tuple(sorted(self._records.values(), key=lambda record: (record.created_ms, record.token_id)))


def _token_in(authorization: bytes) -> bytes:
    """A bearer's token; a password of Basic has become one before."""
    scheme, _, rest = authorization[:_CREDENTIAL_BYTES_MAX].partition(b" ")
    if scheme.lower() != b"bearer":
        raise AuthenticationError("missing or wrong bearer token")
    return rest.strip()
