"""CORE: what Spark keeps in the checkpoint folder of a query, as far as we read it: its id, and the settings of its first batch."""

from __future__ import annotations

import json

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError

METADATA_BYTES_MAX = 1 << 20


def query_id_of(content: bytes, path: str) -> str:
    """The id in the file `metadata` of a checkpoint of Spark's. Raises CorruptStateError naming the file."""
    try:
        found = json.loads(content)["id"]
    except (ValueError, TypeError, KeyError) as error:
        found, reason = None, f"{type(error).__name__}: {error}"
    else:
        reason = f"its id is {found!r}"
    if not isinstance(found, str) or not found or not found.replace("-", "").isalnum():
        raise CorruptStateError(f"{path}: holds no id of a query: {reason}", path=path, reason=reason)
    return found


class _OffsetMetadata(msgspec.Struct):
    conf: dict[str, str] = {}


def frozen_settings(content: bytes, path: str, operator: str) -> dict[str, str]:
    """Settings that Spark keeps in an entry of its offset log: its second line is JSON with them. Raises CorruptStateError."""
    try:
        return decode_json(content.split(b"\n")[1], _OffsetMetadata).conf
    except (IndexError, *UNDECODABLE) as error:
        reason = f"no entry of Spark's offset log: {error}"
        raise CorruptStateError(f"source {operator}: {path}: {reason}", path=path, operator=operator, reason=reason) from error
