"""Transfers of objects: in one request, or in parts, a bounded number of them at one time and in memory; and their local files.

Creates are conditional (If-None-Match: *) and carry a nonce as metadata, which says whose create made an object, also if the answer
was lost, the request was repeated on the way, or another writer sent the same bytes. It knows no paths of storage, and no
operation. Local files raise OSError as the system does."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.statebackends.errors import AmbiguousWriteError, ObjectMissingError
from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.port import Buffer
from holdfast.statebackends.storage.s3_connection import FailureKind, RequestFailure, S3Connection


def blocks_of_file(path: str, block_bytes: Callable[[int], int]) -> Iterator[Buffer]:
    """A file in blocks of block_bytes(file size) bytes, the last one shorter. Raises ObjectMissingError at the first."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectMissingError(f"{path} does not exist", path=path) from error
    with file:
        length = block_bytes(os.fstat(file.fileno()).st_size)
        while block := _read_block(file.fileno(), length):
            yield block


def _read_block(descriptor: int, length: int) -> bytes:
    """`length` bytes, fewer only at the end of the file."""
    block = os.read(descriptor, length)
    if not block or len(block) == length:
        return block
    blocks, missing = [block], length - len(block)
    while missing and (block := os.read(descriptor, missing)):
        blocks.append(block)
        missing -= len(block)
    return b"".join(blocks)


def replace_file(path: str, chunks: Iterable[Buffer]) -> tuple[int, str]:
    """Write a file in place of an old one; returns (length, checksum). The old one stays if the first chunk can't be read."""
    digest = Digest()
    passing = digest.passing(chunks)
    first = next(passing, b"")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # the old file may be a hard link to one of an open database
    with open(path, "xb", buffering=0) as file:
        for chunk in itertools.chain([first], passing):
            view = memoryview(chunk).cast("B")
            while view:
                view = view[file.write(view) :]
    return digest.length, digest.checksum


log = logging.getLogger("holdfast.storage")

NONCE = "holdfast-nonce"
"""Name of the metadata with the nonce of the create that made an object."""
PARTS_MAX = 10_000
"""S3's bound for one object."""
COPY_PART_BYTES = 1 << 30
"""Bytes of one part of a server-side copy; S3's bound is 5 GiB."""
ABORT_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a HEAD of an object."""

    size: int
    """Bytes."""
    etag: str
    nonce: str
    """Of the create that made it; empty for an object that Holdfast did not make."""


class Transfers:
    """Reads and conditional creates of objects of one bucket. Raises RequestFailure, AmbiguousWriteError."""

    def __init__(self, connection: S3Connection, bucket: str) -> None:
        self._connection = connection
        self._bucket = bucket

    # -- looking

    def head(self, key: str) -> Found | None:
        """Size, version and nonce of an object; None if there is no such object."""
        return self._connection.repeated(lambda: self._head_once(key))

    def _head_once(self, key: str) -> Found | None:
        try:
            answer = self._connection.request("head_object", Bucket=self._bucket, Key=key)
        except RequestFailure as failure:
            if failure.kind is FailureKind.MISSING:
                self._connection.once("exists", self._bucket, self._check_bucket)
                return None
            if failure.kind is FailureKind.DENIED:
                self._explain(key)
            if failure.code == "HTTP 503":  # a HEAD has no code of its own, and this status means throttling
                raise RequestFailure(FailureKind.THROTTLED, failure.code, str(failure)) from failure
            raise
        metadata = answer.get("Metadata", {})
        return Found(int(answer["ContentLength"]), str(answer["ETag"]), str(metadata.get(NONCE, "")))

    def _check_bucket(self) -> None:
        """Raise RequestFailure for a missing bucket, which a HEAD of an object does not tell from a missing object."""
        try:
            self._connection.request("head_bucket", Bucket=self._bucket)
        except RequestFailure as failure:
            if failure.kind is FailureKind.MISSING:
                raise RequestFailure(FailureKind.NO_BUCKET, failure.code, "no such bucket") from failure
            if failure.kind is not FailureKind.DENIED:  # the bucket may exist without a right to look at it
                raise

    def _explain(self, key: str) -> None:
        """Repeat a refused HEAD, whose answer has no message, as a GET, and raise that one's failure."""
        self._connection.fetch(Bucket=self._bucket, Key=key, Range="bytes=0-0")

    # -- reading

    def read(self, key: str, offset: int = 0, length: int | None = None) -> Iterator[bytearray]:
        """Bytes [offset, offset+length) of an object in parts, in order; parts behind the first are fetched ahead.

        Raises RequestFailure, of kind MISSING if there is no such object."""
        if length == 0:
            if self.head(key) is None:
                raise RequestFailure(FailureKind.MISSING, "", "no such object")
            return
        step = self._connection.settings.part_bytes
        end = None if length is None else offset + length
        try:
            data, size, etag = self._range(key, offset, offset + step if end is None else min(end, offset + step))
        except RequestFailure as failure:
            if failure.kind is FailureKind.RANGE:
                return
            raise
        yield data
        end = size if end is None else min(end, size)
        starts = range(offset + len(data), end, step)
        fetches = (partial(self._range, key, start, min(start + step, end), etag) for start in starts)
        for data, _, _ in self._ahead(fetches):
            yield data

    def _range(self, key: str, start: int, stop: int, etag: str | None = None) -> tuple[bytearray, int, str]:
        """(bytes [start, stop), size of the object, its version)."""
        return self._connection.repeated(lambda: self._range_once(key, start, stop, etag))

    def _range_once(self, key: str, start: int, stop: int, etag: str | None) -> tuple[bytearray, int, str]:
        condition = {} if etag is None else {"IfMatch": etag}
        answer, data = self._connection.fetch(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **condition)
        if "ContentRange" in answer:
            size = int(answer["ContentRange"].rpartition("/")[2])
        else:  # a store may answer with the whole object
            size, data = len(data), data[start:stop]
        if len(data) != max(0, min(stop, size) - start):
            raise RequestFailure(FailureKind.UNCLEAR, "", f"{len(data)} bytes came of [{start}, {stop}) of {size}")
        return data, size, str(answer["ETag"])

    def _ahead(self, actions: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        """Results in order, with at most `parts_in_flight_max` actions under way; none is when the iterator ends."""
        waiting: deque[Future[Any]] = deque()
        try:
            for action in actions:
                if len(waiting) == self._connection.settings.parts_in_flight_max:
                    yield waiting.popleft().result()
                waiting.append(self._connection.submit(action))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                if not future.cancel():
                    future.exception()

    # -- creating

    def create(self, key: str, data: Buffer) -> bool:
        """Make an object unless the name is taken; True if this call made it."""
        nonce = uuid.uuid4().hex
        return self._decide(
            key,
            nonce,
            lambda: self._connection.request(
                "put_object", Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*", Metadata={NONCE: nonce}
            ),
        )

    def upload(self, key: str, blocks: Iterator[Buffer]) -> bool:
        """As `create`, from blocks, all but the last of which are `block_bytes` long."""
        first = list(itertools.islice(blocks, 2))
        if len(first) < 2:
            return self.create(key, first[0] if first else b"")

        def sends(upload: dict[str, str]) -> Iterator[Callable[[], str]]:
            for number in itertools.count(1):
                block = first.pop(0) if first else next(blocks, None)  # a block is released once it is sent
                if block is None:
                    return
                yield partial(self._send_part, upload, number, block)

        return self._in_parts(key, sends)

    def block_bytes(self, size: int) -> int:
        """Bytes of the blocks of an object of `size` bytes."""
        return max(self._connection.settings.part_bytes, -(-size // PARTS_MAX))

    def copy(self, source: str, found: Found, key: str) -> bool:
        """As `create`, with the content of another object, copied inside the store.

        Always a multipart copy: more stores accept a condition there than on a plain copy, and the copy gets a nonce of its own."""
        if found.size == 0:
            return self.create(key, b"")

        def sends(upload: dict[str, str]) -> Iterator[Callable[[], str]]:
            for number, start in enumerate(range(0, found.size, COPY_PART_BYTES), 1):
                stop = min(start + COPY_PART_BYTES, found.size)
                whole = start == 0 and stop == found.size
                byte_range = {} if whole else {"CopySourceRange": f"bytes={start}-{stop - 1}"}
                yield partial(self._copy_part, upload, number, source, found.etag, byte_range)

        return self._in_parts(key, sends)

    def _in_parts(self, key: str, sends: Callable[[dict[str, str]], Iterator[Callable[[], str]]]) -> bool:
        nonce = uuid.uuid4().hex
        begun = self._connection.call("create_multipart_upload", Bucket=self._bucket, Key=key, Metadata={NONCE: nonce})
        upload = {"Bucket": self._bucket, "Key": key, "UploadId": str(begun["UploadId"])}
        try:
            parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(self._ahead(sends(upload)), 1)]
            complete = partial(
                self._connection.request, "complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )
            created = self._decide(key, nonce, complete)
        except BaseException:
            self._abort(upload)
            raise
        if not created:
            self._abort(upload)
        return created

    def _send_part(self, upload: dict[str, str], number: int, block: Buffer) -> str:
        return str(self._connection.call("upload_part", **upload, PartNumber=number, Body=block)["ETag"])

    def _copy_part(self, upload: dict[str, str], number: int, source: str, etag: str, byte_range: dict[str, str]) -> str:
        origin = {"Bucket": self._bucket, "Key": source}
        try:
            answer = self._connection.call(
                "upload_part_copy", **upload, PartNumber=number, CopySource=origin, CopySourceIfMatch=etag, **byte_range
            )
        except RequestFailure as failure:
            if failure.kind is FailureKind.MISSING:
                path = f"s3://{self._bucket}/{source}"
                raise ObjectMissingError(f"{path} does not exist", path=path) from failure
            raise
        return str(answer["CopyPartResult"]["ETag"])

    def _abort(self, upload: dict[str, str]) -> None:
        """Abort an upload: its parts would be paid for until then."""
        abort = partial(self._connection.request, "abort_multipart_upload", **upload)
        try:
            self._connection.repeated(abort, timeout_ms=ABORT_TIMEOUT_MS)
        except RequestFailure as failure:
            if failure.kind is not FailureKind.NO_UPLOAD:
                path = f"s3://{self._bucket}/{upload['Key']}"
                log.warning("%s: the unfinished upload %s could not be aborted: %s", path, upload["UploadId"], failure)

    def _decide(self, key: str, nonce: str, create: Callable[[], Any]) -> bool:
        """Repeat a conditional create until it is known whose create made the object; True: this one.

        Raises AmbiguousWriteError if that stays unknown, RequestFailure if the create certainly failed."""
        unclear = False

        def attempt() -> bool:
            nonlocal unclear
            try:
                create()
            except RequestFailure as failure:
                before, unclear = unclear, True
                if failure.kind not in (FailureKind.EXISTS, FailureKind.NO_UPLOAD):
                    unclear = before or failure.may_have_happened
                    raise
                found = self._head_once(key)
                if found is not None:
                    return found.nonce == nonce  # "exists" may be the answer to a repeat of this create
                unclear = before
                if failure.kind is FailureKind.EXISTS:
                    raise RequestFailure(FailureKind.CONFLICT, failure.code, "it existed, and is gone again") from failure
                raise
            return True

        try:
            return self._connection.repeated(attempt)
        except RequestFailure as failure:
            if not unclear and failure.kind is not FailureKind.FULL:
                raise
            absent = False
            with contextlib.suppress(RequestFailure):
                found = self._head_once(key)
                if found is not None:
                    return found.nonce == nonce
                absent = not unclear
            if absent:  # a full store has answered, so the object will not appear later
                raise
            path = f"s3://{self._bucket}/{key}"
            message = f"{path} may or may not have been written: {failure}"
            raise AmbiguousWriteError(message, path=path, bucket=self._bucket, key=key) from failure


def blocks_of(chunks: Iterable[Buffer], size: int) -> Iterator[Buffer]:
    """The bytes of the chunks in blocks of `size` bytes, the last one shorter; no block for no bytes."""
    block = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view:
            taken = view[: size - len(block)]
            block += taken
            view = view[len(taken) :]
            if len(block) == size:
                yield block
                block = bytearray()
    if block:
        yield block
