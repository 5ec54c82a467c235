"""The product's S3 shell over a simulated wire: its requests reach an object store in memory, or are lost, repeated or late.

The stand-in of boto3's client answers as S3 documents it: short listings, times in whole seconds, errors by code. Only the shell
finds out whether a request without an answer was carried out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar, assert_never

import msgspec

from holdfast.chaos.sim.disk import CallHook
from holdfast.chaos.sim.objectstore import SimObjectStore
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import FailureKind, RequestFailure, S3Connection, S3Settings
from holdfast.statebackends.storage.s3_transfer import NONCE

T = TypeVar("T")

BUCKET = "sim"
PAGE_KEYS = 7
"""Keys in one page of a listing: S3 may give fewer than requested."""
SILENCE_MS = 300
"""Wait for a request without an answer, ms."""
SETTINGS = S3Settings(read_timeout_ms=SILENCE_MS, retry_timeout_ms=1_500, backoff_first_ms=20, backoff_max_ms=300)
HICCUPS_MAX = 6
"""Most further failing requests of an operation beside the one of its fault: the shell has to get through these."""

_DECIDING = frozenset({"put_object", "complete_multipart_upload", "delete_object", "delete_objects"})
"""Requests that change what others see."""
_GROWING = frozenset({"put_object", "create_multipart_upload", "upload_part", "upload_part_copy", "complete_multipart_upload"})


class Fate(StrEnum):
    """The fate of one request."""

    FINE = "fine"
    REFUSED = "refused"
    """503 SlowDown, unread."""
    CONFLICT = "conflict"
    """409, nothing done."""
    BROKEN = "broken"
    """500, nothing done."""
    FULL = "full"
    """507, nothing done."""
    LOST = "lost"
    """Never arrives; no answer."""
    UNANSWERED = "unanswered"
    """Carried out; no answer."""
    TOLD_WRONGLY = "told wrongly"
    """Carried out; answered with a 500."""
    REPEATED = "repeated"
    """Carried out twice, repeated on the way; the second answer arrives."""
    LATE = "late"
    """No answer; it arrives when its sender waits neither for it nor for the requests sent in its place."""
    CUT = "cut"
    """The body of the answer ends early."""


class ServiceError(Exception):
    """An answer that is an error, as botocore's ClientError has it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}


Later = Callable[[Callable[[], Any]], None]
"""Takes a request that is on its way when its sender has given it up, to carry it out afterwards."""


class Trouble:
    """Fates of one operation's requests, from its storage fault (`stores.Outcome`)."""

    def __init__(self, outcome: str, fraction: float, rng: random.Random, later: Later) -> None:
        self.later = later
        self._outcome = outcome
        self._random = rng
        self._fine = int(fraction * 4) if outcome == "partial" else 0
        """Requests that pass before a partial operation fails."""
        self._refusal = rng.choice((Fate.REFUSED, Fate.BROKEN, Fate.LOST))
        self._struck = False
        self._hiccups = 0

    def fate(self, name: str) -> Fate:
        """Fate of the next request."""
        match self._outcome:
            case "full":
                return Fate.FULL if name in _GROWING else Fate.FINE
            case "fail" | "partial":
                self._fine -= 1
                return Fate.FINE if self._fine >= 0 else self._refusal
            case _:
                return self._of_passing(name)

    def _of_passing(self, name: str) -> Fate:
        """One deciding request is lost; others fail at random."""
        if name in _DECIDING and not self._struck:
            self._struck = True
            if self._outcome == "late":
                return Fate.LATE
            return self._random.choice((Fate.UNANSWERED, Fate.TOLD_WRONGLY, Fate.REPEATED, Fate.LATE))
        if self._hiccups >= HICCUPS_MAX or self._random.random() >= 0.3:
            return Fate.FINE
        self._hiccups += 1
        choices = [Fate.REFUSED, Fate.BROKEN, Fate.LOST]
        if name in ("put_object", "complete_multipart_upload"):
            choices.append(Fate.CONFLICT)
        return self._random.choice([*choices, Fate.CUT] if name == "get_object" else choices)


class SimS3(SimObjectStore):
    """An object store behind the S3 shell; for one thread, of one world."""

    def __init__(self, now_ms: Callable[[], int], rng: random.Random, before_call: CallHook | None = None) -> None:
        super().__init__(now_ms, before_call)
        self._random = rng
        self._waited_ms = 0.0
        self._trouble: Trouble | None = None
        self.connection = _Connection(self, rng)

    def storage(self, location: str) -> WireStorage:
        return WireStorage(super().storage(location).root, self)

    # ------------------------------------------------------------------------------------------------------------- faults

    @contextmanager
    def troubled(self, outcome: str, fraction: float, later: Later) -> Iterator[None]:
        """Requests of the operation within the block meet the faults of the wire."""
        self._trouble = Trouble(outcome, fraction, self._random, later)
        try:
            yield
        finally:
            self._trouble = None

    @property
    def trouble(self) -> Trouble | None:
        return self._trouble

    def waits(self, ms: float) -> None:
        """The sender waits for an answer, or before it asks again."""
        self._waited_ms += ms

    @property
    def waited_ms(self) -> float:
        """Sum of waits since the world began, ms."""
        return self._waited_ms


class WireStorage(S3Storage):
    """The product's shell on one root of the world, `/root` as on a disk."""

    def __init__(self, root: str, store: SimS3) -> None:
        super().__init__(f"s3://{BUCKET}{root}", store.connection)
        self._root = root
        self._world = store

    @property
    def root(self) -> str:
        return self._root

    def at(self, location: str) -> WireStorage:
        return self._world.storage(location)


class _Connection(S3Connection):
    """Virtual time; parts of a transfer are sent one after another."""

    def __init__(self, store: SimS3, rng: random.Random) -> None:
        super().__init__(
            SETTINGS,
            clock=lambda: store.waited_ms / 1_000,
            sleep=lambda seconds: store.waits(seconds * 1_000),
            uniform=rng.uniform,
            connect=lambda settings: SimClient(store),
        )

    def submit(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)
        return future


class _Body:
    """Body of an answer; a cut one ends in the middle, and its reader notices."""

    def __init__(self, content: bytes, *, cut: bool) -> None:
        self._left = content[: len(content) // 2] if cut else content
        self._cut = cut

    def read(self, size: int) -> bytes:
        if not self._left and self._cut:
            raise RequestFailure(FailureKind.UNCLEAR, "", "the body ended early")
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def close(self) -> None:
        pass


class _Upload(msgspec.Struct):
    key: str
    maker: str
    parts: dict[int, bytes]


class SimClient:
    """The methods of boto3's S3 client that the shell calls, with its arguments and answers."""

    def __init__(self, store: SimS3) -> None:
        self._store = store
        self._uploads: dict[str, _Upload] = {}
        self._begun = 0

    def close(self) -> None:
        """As the client's."""

    # --------------------------------------------------------------------------------------------------------------- wire

    def _ask(self, name: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        trouble = self._store.trouble
        fate = Fate.FINE if trouble is None else trouble.fate(name)
        match fate:
            case Fate.FINE | Fate.CUT:
                answer = act()
                return {**answer, "Body": _Body(answer["Body"], cut=fate is Fate.CUT)} if "Body" in answer else answer
            case Fate.REFUSED:
                raise ServiceError(503, "SlowDown")
            case Fate.CONFLICT:
                raise ServiceError(409, "ConditionalRequestConflict")
            case Fate.BROKEN:
                raise ServiceError(500, "InternalError")
            case Fate.FULL:
                raise ServiceError(507, "InsufficientStorage")
            case Fate.REPEATED:
                self._done(act)
                return act()
            case Fate.UNANSWERED | Fate.TOLD_WRONGLY:
                self._done(act)
                if fate is Fate.TOLD_WRONGLY:
                    raise ServiceError(500, "InternalError")
            case Fate.LATE:
                assert trouble is not None
                trouble.later(lambda: self._done(act))
            case Fate.LOST:
                pass
            case _:
                assert_never(fate)
        self._store.waits(SILENCE_MS)
        raise RequestFailure(FailureKind.UNCLEAR, "", f"no answer to {name}")

    @staticmethod
    def _done(act: Callable[[], dict[str, Any]]) -> bool:
        """Carry the request out without an answer; whether it succeeded."""
        try:
            act()
        except ServiceError:
            return False
        return True

    # ------------------------------------------------------------------------------------------------------------ objects

    # Arguments are spelt as boto3 spells them.

    def head_bucket(self, *, Bucket: str) -> dict[str, Any]:
        return self._ask("head_bucket", dict)

    def head_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            size = self._store.head(_name(Key))
            if size is None:
                raise ServiceError(404, "404")  # a HEAD has no body
            return {"ContentLength": size, "ETag": self._tag(Key), "Metadata": {NONCE: self._store.maker(_name(Key))}}

        return self._ask("head_object", act)

    def get_object(self, *, Bucket: str, Key: str, Range: str, IfMatch: str | None = None) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            content = self._store.get(_name(Key))
            if content is None:
                raise ServiceError(404, "NoSuchKey")
            tag = self._tag(Key)
            if IfMatch not in (None, tag):
                raise ServiceError(412, "PreconditionFailed")
            first, _, last = Range.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(content))
            if start >= len(content):
                raise ServiceError(416, "InvalidRange")
            return {"ETag": tag, "ContentRange": f"bytes {start}-{stop - 1}/{len(content)}", "Body": content[start:stop]}

        return self._ask("get_object", act)

    def put_object(self, *, Bucket: str, Key: str, Body: Any, IfNoneMatch: str, Metadata: dict[str, str]) -> dict[str, Any]:
        content = bytes(Body)  # bytes of the moment of the request: a late one arrives with these

        def act() -> dict[str, Any]:
            return self._create(Key, content, Metadata[NONCE])

        return self._ask("put_object", act)

    def _create(self, key: str, content: bytes, maker: str) -> dict[str, Any]:
        if not self._store.put(_name(key), content, maker):
            raise ServiceError(412, "PreconditionFailed")
        return {"ETag": self._tag(key)}

    def delete_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            self._store.delete(_name(Key))
            return {}

        return self._ask("delete_object", act)

    def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        keys = [each["Key"] for each in Delete["Objects"]]

        def act() -> dict[str, Any]:
            for key in keys:
                self._store.delete(_name(key))
            return {}

        return self._ask("delete_objects", act)

    def _tag(self, key: str) -> str:
        return _tag_of(self._store.peek(_name(key)) or b"")

    # ------------------------------------------------------------------------------------------------------------ uploads

    def create_multipart_upload(self, *, Bucket: str, Key: str, Metadata: dict[str, str]) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            self._begun += 1
            self._uploads[f"upload-{self._begun}"] = _Upload(Key, Metadata[NONCE], {})
            return {"UploadId": f"upload-{self._begun}"}

        return self._ask("create_multipart_upload", act)

    def upload_part(self, *, Bucket: str, Key: str, UploadId: str, PartNumber: int, Body: Any) -> dict[str, Any]:
        content = bytes(Body)
        return self._ask("upload_part", lambda: {"ETag": self._part(UploadId, Key, PartNumber, content)})

    def upload_part_copy(
        self,
        *,
        Bucket: str,
        Key: str,
        UploadId: str,
        PartNumber: int,
        CopySource: dict[str, str],
        CopySourceIfMatch: str,
    ) -> dict[str, Any]:
        """Copy a whole object: those of a simulated job are small."""

        def act() -> dict[str, Any]:
            content = self._store.get(_name(CopySource["Key"]))
            if content is None:
                raise ServiceError(404, "NoSuchKey")
            if self._tag(CopySource["Key"]) != CopySourceIfMatch:
                raise ServiceError(412, "PreconditionFailed")
            return {"CopyPartResult": {"ETag": self._part(UploadId, Key, PartNumber, content)}}

        return self._ask("upload_part_copy", act)

    def _upload(self, upload_id: str, key: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise ServiceError(404, "NoSuchUpload")
        return upload

    def _part(self, upload_id: str, key: str, number: int, content: bytes) -> str:
        self._upload(upload_id, key).parts[number] = content
        return _tag_of(content)

    def complete_multipart_upload(
        self,
        *,
        Bucket: str,
        Key: str,
        UploadId: str,
        MultipartUpload: dict[str, Any],
        IfNoneMatch: str,
    ) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            upload = self._upload(UploadId, Key)
            content = b"".join(_named_part(upload, each) for each in MultipartUpload["Parts"])
            answer = self._create(Key, content, upload.maker)
            del self._uploads[UploadId]
            return answer

        return self._ask("complete_multipart_upload", act)

    def abort_multipart_upload(self, *, Bucket: str, Key: str, UploadId: str) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            self._upload(UploadId, Key)
            del self._uploads[UploadId]
            return {}

        return self._ask("abort_multipart_upload", act)

    # ----------------------------------------------------------------------------------------------------------- listings

    def list_objects_v2(
        self,
        *,
        Bucket: str,
        MaxKeys: int,
        Prefix: str,
        Delimiter: str = "",
        ContinuationToken: str = "",
    ) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            found = self._folder(Prefix) if Delimiter else self._deep(Prefix)
            left = [entry for entry in found if entry[0] > ContinuationToken]
            page, is_truncated = left[:PAGE_KEYS], len(left) > PAGE_KEYS
            answer: dict[str, Any] = {"IsTruncated": is_truncated}
            answer["Contents"] = [entry[1] for entry in page if "Key" in entry[1]]
            answer["CommonPrefixes"] = [entry[1] for entry in page if "Key" not in entry[1]]
            return {**answer, "NextContinuationToken": page[-1][0]} if is_truncated else answer

        return self._ask("list_objects_v2", act)

    def _deep(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        facts = self._store.facts(_name(prefix))
        return [(fact.path[1:], _entry(fact.path[1:], fact.size, fact.modified_ms)) for fact in facts]

    def _folder(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        names = (prefix + name for name in self._store.names(_name(prefix)))
        return [(name, {"Prefix": name} if name.endswith("/") else _entry(name, 0, 0)) for name in names]


def _tag_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _named_part(upload: _Upload, named: dict[str, Any]) -> bytes:
    """Raises ServiceError for a part that is missing or has other content."""
    content = upload.parts.get(named["PartNumber"])
    if content is None or named["ETag"] != _tag_of(content):
        raise ServiceError(400, "InvalidPart")
    return content


def _entry(key: str, size: int, modified_ms: int) -> dict[str, Any]:
    return {"Key": key, "Size": size, "LastModified": datetime.fromtimestamp(modified_ms // 1_000, UTC)}


def _name(key: str) -> str:
    """Key in the store, which holds the files of a world under their absolute paths."""
    return f"/{key}"
