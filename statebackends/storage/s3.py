"""Storage on S3 and stores that speak its protocol: whole objects, conditional creates, no folders and no renames.

It relies on S3's guarantees since 2024: reads and listings see every acknowledged write, and of all conditional creates of a name
one succeeds. Only the operations that list files or delete a folder list keys. Locations and paths are checked before a request is
sent. It knows nothing of the content of files. Requests and retries are in s3_connection.py, parts of objects in s3_transfer.py."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any, assert_never

from holdfast.statebackends.errors import InvalidConfigError, InvariantError
from holdfast.statebackends.storage import S3_SCHEME, is_s3
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.directory import TEMPORARY_FOLDER
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.s3_connection import (
    FailureKind,
    RequestFailure,
    S3Connection,
    check_installed,
    error_of,
    failure_of_entry,
)
from holdfast.statebackends.storage.s3_transfer import Found, Transfers, blocks_of, blocks_of_file, replace_file
from holdfast.statebackends.storage.transfers import TransferPool

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_NOT_NAMES = frozenset({"", ".", ".."})


def parse_location(location: str) -> tuple[str, str]:
    """(bucket, prefix of all keys: empty, or with a trailing `/`) of a location, which is not percent-decoded.

    Raises InvalidConfigError."""
    if not is_s3(location) or "\0" in location:
        raise InvalidConfigError(f"{location!r} is no location on S3: use s3://bucket/prefix", url=location)
    bucket, _, prefix = location.removeprefix(S3_SCHEME).partition("/")
    if _BUCKET.fullmatch(bucket) is None:
        raise InvalidConfigError(f"{location!r} names no bucket: use s3://bucket/prefix", url=location)
    prefix = prefix.rstrip("/")
    if not prefix:
        return bucket, ""
    if not _NOT_NAMES.isdisjoint(prefix.split("/")):
        raise InvalidConfigError(f"the prefix of {location!r} must not contain '.', '..' or empty names", url=location)
    return bucket, f"{prefix}/"


def location_of(bucket: str, prefix: str) -> str:
    """Canonical location of a bucket and a prefix."""
    return f"{S3_SCHEME}{bucket}/{prefix}".rstrip("/")


def check_path(path: str) -> None:
    """Raise InvalidConfigError for a path that LocalStorage would refuse, so that both accept the same paths."""
    parts = path.split("/")
    if not _NOT_NAMES.isdisjoint(parts) or "\0" in path or parts[0] == TEMPORARY_FOLDER:
        raise InvalidConfigError(f"{path!r} is not a path below the storage root", path=path)


PAGE_KEYS_MAX = 1_000
"""Keys of one listing, and of one request to delete them: S3's bound for both."""


class S3Storage:
    """Implements `port.Storage` on the keys of a bucket below a prefix."""

    def __init__(self, location: str, connection: S3Connection, *, elsewhere: Callable[[str], ops.Storage] | None = None) -> None:
        """`elsewhere` opens locations outside of S3. Raises InvalidConfigError for a malformed location."""
        self._bucket, self._prefix = parse_location(location)
        self._connection = connection
        self._elsewhere = elsewhere
        self._transfers = Transfers(connection, self._bucket)

    @property
    def root(self) -> str:
        return location_of(self._bucket, self._prefix)

    @property
    def transfers(self) -> TransferPool:
        """As `port.ConcurrentStorage`: requests wait for answers most of the time."""
        return self._connection.transfers

    @property
    def copies_links(self) -> bool:
        """As `port.CopyingStorage`."""
        return True

    def at(self, location: str) -> ops.Storage:
        """Another bucket or prefix of the same endpoint, on the same connection; or a location outside of S3."""
        if self._elsewhere is not None and not is_s3(location):
            return self._elsewhere(location)
        return S3Storage(location, self._connection, elsewhere=self._elsewhere)

    def execute(self, operation: ops.Operation) -> Any:
        """Perform one operation. Errors name bucket and key; `s3_connection.error_of` has their classes."""
        path = ops.path_of(operation)
        doing = f"{ops.describe(operation)} in {self.root}"
        try:
            return self._perform(operation)
        except RequestFailure as failure:
            raise error_of(failure, doing, self._bucket, f"{self._prefix}{path}") from failure
        except OSError as error:  # of the local file of an upload or download
            raise unavailable(error, doing, path=path) from error

    def check_conditions(self) -> None:
        """Raise InvalidConfigError for a store that ignores conditions; tried once for each bucket.

        On such a store two leaders could create one name unnoticed."""
        self._connection.once("conditions", self._bucket, self._try_condition)

    def _perform(self, operation: ops.Operation) -> Any:
        match operation:
            case ops.PutIfAbsent():
                key = self._key(operation.path)
                self.check_conditions()
                return self._transfers.create(key, operation.data)
            case ops.SyncFile():  # an object that is there is durable
                return self._transfers.head(self._key(operation.path)) is not None
            case ops.WriteFile():
                return self._write(operation)
            case ops.UploadFile():
                return self._upload(operation)
            case ops.DownloadFile():
                return replace_file(operation.local_path, self._transfers.read(self._key(operation.path)))
            case ops.ReadFile():
                return b"".join(self._transfers.read(self._key(operation.path), operation.offset, operation.length))
            case ops.StatFile():
                found = self._transfers.head(self._key(operation.path))
                return None if found is None else found.size
            case ops.ListFiles():
                return sorted(path for path, _ in self._listed(operation.prefix, deep=True))
            case ops.DescribeFiles():
                return sorted(self._described(operation.prefix))
            case ops.ListFolder():
                return sorted(name + "/" * is_folder for name, is_folder in self._listed(operation.prefix, deep=False))
            case ops.LinkFile():
                return self._link(operation.source, operation.target)
            case ops.DeleteFile():
                return self._delete_file(self._key(operation.path))
            case ops.DeleteFolder():
                return self._delete_folder(self._key(operation.prefix.rstrip("/")))
            case _:
                assert_never(operation)

    def _key(self, path: str) -> str:
        check_path(path)
        return self._prefix + path

    def _folder(self, prefix: str) -> str:
        prefix = prefix.rstrip("/")
        return f"{self._key(prefix)}/" if prefix else self._prefix

    # -- writing

    def _try_condition(self) -> None:
        key = f"{self._prefix}{TEMPORARY_FOLDER}/{uuid.uuid4().hex}"
        if not self._transfers.create(key, b"condition"):
            return  # the store refused to overwrite an object of this name: conditions work
        created_twice = self._transfers.create(key, b"condition")
        self._connection.call("delete_object", Bucket=self._bucket, Key=key)
        if created_twice:
            raise InvalidConfigError(
                f"the store of bucket {self._bucket!r} overwrites objects despite If-None-Match: coordinators and sinks can't be "
                "kept apart on it",
                bucket=self._bucket,
            )

    def _write(self, operation: ops.WriteFile) -> int:
        key = self._key(operation.path)
        size = sum(memoryview(chunk).nbytes for chunk in operation.chunks)
        return self._store(key, blocks_of(operation.chunks, self._transfers.block_bytes(size))).length

    def _upload(self, operation: ops.UploadFile) -> tuple[int, str]:
        key = self._key(operation.path)
        digest = self._store(key, blocks_of_file(operation.local_path, self._transfers.block_bytes))
        return digest.length, digest.checksum

    def _store(self, key: str, blocks: Iterator[ops.Buffer]) -> Digest:
        """Write under a name that is this writer's alone: an existing object must be an earlier try of the same write."""
        digest = Digest()
        if not self._transfers.upload(key, digest.passing(blocks)):
            found = self._transfers.head(key)
            if found is None or found.size != digest.length or self._checksum(key) != digest.checksum:
                path = f"s3://{self._bucket}/{key}"
                raise InvariantError(f"{path} exists with other content: its name was used twice", path=path)
        return digest

    def _checksum(self, key: str) -> str:
        digest = Digest()
        for block in self._transfers.read(key):
            digest.add(block)
        return digest.checksum

    # -- linking

    def _link(self, source: str, target: str) -> bool:
        origin_key, key = self._key(source), self._key(target)
        existing = self._transfers.head(key)
        origin = self._transfers.head(origin_key)
        if existing is None:
            if origin is None:
                raise self._missing(source)
            if self._transfers.copy(origin_key, origin, key):
                return True
            existing = self._transfers.head(key)
        if origin is not None and existing is not None and not self._same(origin_key, origin, key, existing):
            path = f"s3://{self._bucket}/{key}"
            raise InvariantError(f"{path} exists with other content than {self.root}/{source}", path=path)
        return False

    def _missing(self, path: str) -> Exception:
        failure = RequestFailure(FailureKind.MISSING, "", "no such object")
        return error_of(failure, f"linking {path} in {self.root}", self._bucket, f"{self._prefix}{path}")

    def _same(self, key: str, found: Found, other_key: str, other: Found) -> bool:
        if found.size != other.size:
            return False
        # equal tags mean equal content; different ones say nothing, since they depend on parts and encryption
        return found.etag == other.etag or self._checksum(key) == self._checksum(other_key)

    # -- listing

    def _listed(self, prefix: str, *, deep: bool) -> Iterator[tuple[str, bool]]:
        """`deep`: (path from the root, False) of each file below a folder; else (name, is a folder) of each entry in it."""
        folder = self._folder(prefix)
        cut = len(self._prefix) if deep else len(folder)
        hidden = f"{self._prefix}{TEMPORARY_FOLDER}/"
        delimiter = {} if deep else {"Delimiter": "/"}
        for page in self._pages(Prefix=folder, **delimiter):
            for each in page.get("CommonPrefixes", ()):
                if each["Prefix"] != hidden:
                    yield each["Prefix"][cut:-1], True
            for each in page.get("Contents", ()):
                key = str(each["Key"])
                if not key.endswith("/") and not key.startswith(hidden):  # consoles make folders as objects `folder/`
                    yield key[cut:], False

    def _described(self, prefix: str) -> Iterator[ops.FileFacts]:
        hidden = f"{self._prefix}{TEMPORARY_FOLDER}/"
        for page in self._pages(Prefix=self._folder(prefix)):
            for each in page.get("Contents", ()):
                key = str(each["Key"])
                if not key.endswith("/") and not key.startswith(hidden):
                    modified_ms = int(each["LastModified"].timestamp() * 1_000)
                    yield ops.FileFacts(key[len(self._prefix) :], int(each["Size"]), modified_ms)

    def _pages(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            page = self._connection.call("list_objects_v2", Bucket=self._bucket, MaxKeys=PAGE_KEYS_MAX, **arguments, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    # -- deleting

    def _delete_file(self, key: str) -> bool:
        if self._transfers.head(key) is None:  # a deletion does not say whether the object existed
            return False
        self._connection.call("delete_object", Bucket=self._bucket, Key=key)
        return True

    def _delete_folder(self, folder: str) -> int:
        deleted = 0
        for page in self._pages(Prefix=f"{folder}/"):
            keys = [str(each["Key"]) for each in page.get("Contents", ())]
            if keys:
                self._delete_batch(keys)
            deleted += len(keys)
        return deleted

    def _delete_batch(self, keys: list[str]) -> None:
        left = keys

        def attempt() -> None:
            nonlocal left
            wanted = {"Objects": [{"Key": key} for key in left], "Quiet": True}
            errors = self._connection.request("delete_objects", Bucket=self._bucket, Delete=wanted).get("Errors", [])
            if errors:
                left = [str(each["Key"]) for each in errors]
                raise failure_of_entry(str(errors[0].get("Code", "")), str(errors[0].get("Message", "")))

        self._connection.repeated(attempt)


def open_s3(
    location: str, *, connection: S3Connection | None = None, elsewhere: Callable[[str], ops.Storage] | None = None
) -> S3Storage:
    """Storage of `s3://bucket/prefix`. Raises InvalidConfigError for another location, or without boto3."""
    check_installed()
    return S3Storage(location, connection if connection is not None else S3Connection(), elsewhere=elsewhere)
