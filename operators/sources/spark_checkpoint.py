"""CORE: what Spark keeps in the checkpoint folder of a query, as far as we read it: its id, and the settings of its first batch;
and how Spark spells where that is."""

from __future__ import annotations

import re

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError

METADATA_BYTES_MAX = 1 << 20
ID_LENGTH_MAX = 64
"""Of a query's id, which is a UUID: it is in names of folders."""
_ID = re.compile(rf"[0-9A-Za-z-]{{1,{ID_LENGTH_MAX}}}")


class _Metadata(msgspec.Struct):
    id: str


def query_id_of(content: bytes, path: str) -> str:
    """The id in the file `metadata` of a checkpoint of Spark's. Raises CorruptStateError naming the file."""
    try:
        found = decode_json(content, _Metadata).id
    except UNDECODABLE as error:
        found, reason = "", f"{type(error).__name__}: {error}"
    else:
        reason = f"its id is {found[:ID_LENGTH_MAX]!r}"
    if not _ID.fullmatch(found):
        raise CorruptStateError(f"{path}: holds no id of a query: {reason}", path=path, reason=reason)
    return found


def place_of_spark(location: str) -> str:
    """A path, or a URL as Spark has it, as our storage has it: Spark has `file:/path`, and takes `%20` in it for itself, and
    `s3a://`. A relative path stays one."""
    local = location.removeprefix("file:") if location.startswith("file:/") else location
    place = "s3://" + local.removeprefix("s3a://") if local.startswith("s3a://") else local
    place = place.rstrip("/")
    return "/" + place.lstrip("/") if place.startswith("/") else place


class _OffsetMetadata(msgspec.Struct):
    conf: dict[str, str] = {}


def frozen_settings(content: bytes, path: str, operator: str) -> dict[str, str]:
    """Settings that Spark keeps in an entry of its offset log: its second line is JSON with them. Raises CorruptStateError."""
    try:
        return decode_json(content.split(b"\n")[1], _OffsetMetadata).conf
    except (IndexError, *UNDECODABLE) as error:
        reason = f"no entry of Spark's offset log: {error}"
        raise CorruptStateError(f"source {operator}: {path}: {reason}", path=path, operator=operator, reason=reason) from error
