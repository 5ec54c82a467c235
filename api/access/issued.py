"""Issued tokens: their text, their records in the state directory, and the flows that write, read and revoke them. Pure.

A token is `hft_<id>_<secret>`: the id finds the record, and the record has a hash of the secret. The secret has 256 random bits, so
that a plain hash can't be guessed back. A record is written once; to revoke a token is to delete its record."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated

import msgspec

from holdfast.api.access.roles import ANY_JOB, Caller, Role
from holdfast.barriers.messages import clip
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, InvariantError, NotFoundError, ObjectMissingError
from holdfast.statebackends.layout import TOKENS_FOLDER, token_path
from holdfast.statebackends.secrets import HIDDEN
from holdfast.statebackends.storage.port import DeleteFile, DescribeFiles, FileFacts, Flow, ListFolder, PutIfAbsent, ReadFile

RECORD_VERSION = 1

TOKENS_MAX = 1_000
"""Issued tokens of a state directory that are not revoked."""
NAME_CHARACTERS_MAX = 64
LIFE_MS_MAX = 10 * 366 * 86_400_000
"""Longest time until a token expires."""
LIFE_RULE = f"a token expires after 1 ms at the least, {LIFE_MS_MAX // 86_400_000:,} days at the most, or never if that is left out"

_PREFIX = "hft_"
_TOKEN_ID = re.compile(r"[0-9a-f]{16}")
_IN_TEXT = re.compile(r"(hft_[0-9a-f]{16}_|hfw_[0-9a-f]{32}_\d+_)[\w-]+", re.ASCII)
"""Tokens that were issued, and those of workers."""
_ID_BYTES = 8
_SECRET_BYTES = 32
_RECORD_BYTES_MAX = 4_096
_SHOWN_CHARACTERS_MAX = 64

_ISSUABLE = (Role.VIEWER, Role.OPERATOR, Role.ADMIN)


class TokenRecord(msgspec.Struct, frozen=True):
    """One issued token, as it is stored. Times are ms since the epoch."""

    token_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
    role: Role
    job_id: str
    """The only job that it is for; empty: all."""
    created_ms: int
    expires_ms: Annotated[int, msgspec.Meta(ge=0)]
    """0: never."""
    secret_hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the secret."""
    version: int = RECORD_VERSION

    def is_expired(self, now_ms: int) -> bool:
        return 0 < self.expires_ms <= now_ms

    def caller(self) -> Caller:
        name = f"token {self.name or self.token_id}"
        return Caller(self.role, self.job_id, name, account=self.token_id, expires_ms=self.expires_ms)


def is_issued(token: str) -> bool:
    """Whether a text has the form of an issued token."""
    return token.startswith(_PREFIX)


def token_id_of(token: str) -> str:
    return token.removeprefix(_PREFIX).partition("_")[0]


def is_token_id(text: str) -> bool:
    """Whether a text has the form of an id, which is no secret: lists and logs show it."""
    return _TOKEN_ID.fullmatch(text) is not None


def check_token_id(given: str) -> str:
    """The id. Raises InvalidConfigError for a text that is none; of a token given in its place only the id is shown."""
    if is_token_id(given):
        return given
    form = "the id of a token is 16 digits 0-9 and a-f, as `holdfast token list` shows it"
    if is_issued(given):
        token_id = token_id_of(given)
        own = f" ({token_id})" if is_token_id(token_id) else ""
        text = f"{form}: this is a token itself, whose id is its part between the underlines{own}"
        raise InvalidConfigError(text, setting="token")
    raise InvalidConfigError(f"{form}: {clip(given, _SHOWN_CHARACTERS_MAX)!r} is none", setting="token")


def hide_tokens(text: str) -> str:
    """A text without the secrets of tokens in it: people put one where its id belongs. The id stays, to revoke it by."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", text) if "hf" in text else text


def matches(record: TokenRecord, token: str) -> bool:
    """Whether a token is that of the record, compared in constant time."""
    secret = token.removeprefix(_PREFIX).partition("_")[2]
    return hmac.compare_digest(_hash(secret), record.secret_hash)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def draw_token(role: str, *, name: str, job_id: str, life_ms: int | None, now_ms: int) -> tuple[str, TokenRecord]:
    """A new token and its record. `life_ms`: time until it expires; None: never. Raises InvalidConfigError naming what is wrong."""
    if role not in _ISSUABLE:
        known = ", ".join(_ISSUABLE)
        raise InvalidConfigError(f"there is no role {role!r} to issue a token for: use one of {known}", setting="role")
    if len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        text = f"a token's name has at most {NAME_CHARACTERS_MAX} characters, all printable, got {name[:NAME_CHARACTERS_MAX]!r}"
        raise InvalidConfigError(text, setting="name")
    if life_ms is not None and not 0 < life_ms <= LIFE_MS_MAX:
        raise InvalidConfigError(f"expires_in_ms: {LIFE_RULE}", setting="expires_in_ms")
    if job_id != ANY_JOB and role == Role.ADMIN:
        raise InvalidConfigError("an admin's token is for all jobs: leave the job out, or issue an operator's", setting="job")
    token_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    expires_ms = 0 if life_ms is None else now_ms + life_ms
    record = TokenRecord(token_id, name, Role(role), job_id, now_ms, expires_ms, _hash(secret))
    return f"{_PREFIX}{token_id}_{secret}", record


def store_token(record: TokenRecord) -> Flow[None]:
    """Raises InvalidConfigError where there are too many tokens, StorageUnavailableError."""
    if len((yield ListFolder(TOKENS_FOLDER))) >= TOKENS_MAX:
        raise InvalidConfigError(f"there are {TOKENS_MAX} tokens: revoke some first", setting="token")
    content = msgspec.json.encode(record)
    if not (yield PutIfAbsent(token_path(record.token_id), content)):
        raise InvariantError(f"token {record.token_id} exists", path=token_path(record.token_id))


def revoke_token(token_id: str) -> Flow[None]:
    """Raises NotFoundError where there is no such token, or it is revoked already; InvalidConfigError for what is no id."""
    check_token_id(token_id)
    known = f"{token_id}.json" in (yield ListFolder(TOKENS_FOLDER))
    if not known:
        raise NotFoundError(f"there is no token {token_id!r}")
    yield DeleteFile(token_path(token_id))


def read_tokens(known: Mapping[FileFacts, TokenRecord]) -> Flow[tuple[Mapping[FileFacts, TokenRecord], tuple[str, ...]]]:
    """The records by their files, and what is wrong with those that can't be read: nobody gets in by them. `known`: of an earlier
    reading; a file that is unchanged is not read again, so that a reading costs one listing, however many tokens there are."""
    found: dict[FileFacts, TokenRecord] = {}
    damaged: list[str] = []
    for facts in (yield DescribeFiles(TOKENS_FOLDER))[:TOKENS_MAX]:
        if facts in known:
            found[facts] = known[facts]
            continue
        try:
            found[facts] = decode_token((yield ReadFile(facts.path, 0, _RECORD_BYTES_MAX + 1)), facts.path)
        except ObjectMissingError:
            continue  # revoked since the folder was listed
        except CorruptStateError as error:
            damaged.append(error.message)
    return found, tuple(damaged)


def decode_token(content: bytes, path: str) -> TokenRecord:
    """Raises CorruptStateError for a record that is none, of a later version, or of another token than its name says."""
    try:
        if len(content) > _RECORD_BYTES_MAX:
            raise CorruptStateError(f"{path} is larger than {_RECORD_BYTES_MAX} bytes", path=path, reason="too large")
        record = decode_json(content, TokenRecord)
    except UNDECODABLE as error:
        raise CorruptStateError(f"{path} is no record of a token: {error}", path=path, reason=str(error)) from error
    if record.version != RECORD_VERSION or token_path(record.token_id) != path:
        raise CorruptStateError(f"{path} is the record of another token, or of another version", path=path, reason="foreign")
    return record
