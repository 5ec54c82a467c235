"""Rows in RocksDB's own files; the one thing that needs more than Arrow: rocksdict."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from .errors import require
from .keys import decode_key, key_fields, key_group, key_hash, key_json
from .valuetypes import from_msgpack, parse_type


def read_rocksdb(handle: dict[str, Any], files: dict[str, bytes], max_parallelism: int) -> list[tuple[dict[str, Any], list[Any]]]:
    from rocksdict import AccessType, Options, Rdict

    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            require(os.path.basename(name) == name and name not in ("", ".", ".."), f"name {name!r}")
            Path(folder, name).write_bytes(data)
        database = Rdict(folder, Options(raw_mode=True), access_type=AccessType.read_only())
        rows = dict(database.items())
        database.close()
    ids = json.loads(rows.pop(b"\xff\xffstates", b"{}"))
    metas = {ids[meta["name"]]: meta for meta in handle["states"] if meta["name"] in ids}
    found: dict[str, list[Any]] = {meta["name"]: [] for meta in handle["states"]}
    for row, data in rows.items():
        group, state_id, key_length, namespace_length = struct.unpack_from(">HHIH", row)
        meta = metas.get(state_id)
        if meta is None or not handle["key_groups"]["start"] <= group < handle["key_groups"]["stop"]:
            continue
        key, rest = row[10 : 10 + key_length], row[10 + key_length :]
        namespace, entry = rest[:namespace_length], rest[namespace_length:]
        fields, members = key_fields(meta["key_type"]), decode_key(meta["key_type"], key)
        names = [f"key_{index}" for index in range(len(fields))] if meta["key_type"].startswith("tuple<") else ["key"]
        hashes = [key_hash(field, member) for field, member in zip(fields, members, strict=True)]
        require(key_group(hashes, names, max_parallelism) == group, "key group of a row")
        shown = [key_json(member) for member in members]
        place = {"key": shown[0] if names == ["key"] else {"tuple": shown}, "namespace": namespace.hex()}
        add_row(found[meta["name"]], place, meta, entry, data)
    for meta in handle["states"]:
        for shown in found[meta["name"]] if meta["kind"] == "map" else ():
            shown["value"].sort(key=json.dumps)
    return [(meta, found[meta["name"]]) for meta in handle["states"]]


def add_row(rows: list[Any], place: dict[str, Any], meta: dict[str, Any], entry: bytes, data: bytes) -> None:
    """RocksDB's order makes neighbours of the entries of one map."""
    kind = parse_type(meta["value_type"])
    if meta["kind"] == "map":
        if not rows or {name: rows[-1][name] for name in place} != place:
            rows.append({**place, "value": []})
        rows[-1]["value"].append([decoded(kind[1], entry), decoded(kind[2], data)])
    elif meta["kind"] == "list":
        rows.append({**place, "value": [decoded(kind, element) for element in msgspec.msgpack.decode(data, type=list[bytes])]})
    else:
        rows.append({**place, "value": decoded(kind, data)})


def decoded(kind: Any, data: bytes) -> Any:
    if kind[0] == "ttl":
        return {"stamp": int.from_bytes(data[:8], "big", signed=True), "value": decoded(kind[1], data[8:])}
    return {"pickle": data.hex()} if kind == "pickled" else from_msgpack(kind, msgspec.msgpack.decode(data))
