"""`s3://bucket/prefix` and the paths below it, checked before anything is sent."""

from __future__ import annotations

import re

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.storage.directory import TEMPORARY_FOLDER

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_NOT_NAMES = frozenset({"", ".", ".."})


def is_s3(location: str) -> bool:
    return location.startswith(SCHEME)


def parse_location(location: str) -> tuple[str, str]:
    """(bucket, what all keys begin with: empty, or with a trailing `/`). Taken literally: nothing is percent-decoded.

    Raises InvalidConfigError."""
    if not is_s3(location) or "\0" in location:
        raise InvalidConfigError(f"{location!r} is no location on S3: use s3://bucket/prefix", url=location)
    bucket, _, prefix = location.removeprefix(SCHEME).partition("/")
    if _BUCKET.fullmatch(bucket) is None:
        raise InvalidConfigError(f"{location!r} names no bucket: use s3://bucket/prefix", url=location)
    prefix = prefix.rstrip("/")
    if not prefix:
        return bucket, ""
    if not _NOT_NAMES.isdisjoint(prefix.split("/")):
        raise InvalidConfigError(f"the prefix of {location!r} must not contain '.', '..' or empty names", url=location)
    return bucket, f"{prefix}/"


def location_of(bucket: str, prefix: str) -> str:
    """The one form of a location."""
    return f"{SCHEME}{bucket}/{prefix}".rstrip("/")


def check_path(path: str) -> None:
    """Raise InvalidConfigError for a path that a directory would not take: what works here has to work there."""
    parts = path.split("/")
    if not _NOT_NAMES.isdisjoint(parts) or "\0" in path or parts[0] == TEMPORARY_FOLDER:
        raise InvalidConfigError(f"{path!r} is not a path below the storage root", path=path)
