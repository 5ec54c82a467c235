"""`_metadata`, the parts that it names, and what each operator has."""

from __future__ import annotations

import base64
import io
import itertools
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from .errors import UnreadableError, require
from .flights import END_FIELDS, check_edge, read_pieces
from .native import read_rocksdb
from .tables import apply_run, combine, raw_rows

HEADER = re.compile(
    rb'\{"format":"holdfast-snapshot","version":(\d{1,9}),"length":(\d{1,18}),"checksum":"(xxh3_128:[0-9a-f]{32})","snapshot":'
)
DELTAS = ("arrow-delta", "arrow-set-delta")
LIST_KINDS = ("operator_list", "operator_union", "operator_broadcast")


def checksum(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def open_envelope(data: bytes) -> dict[str, Any]:
    """The object `snapshot` of the bytes of `_metadata`."""
    header = HEADER.match(data)
    require(header is not None, "no header")
    assert header is not None
    version, length = int(header[1]), int(header[2])
    require(version in (1, 2, 3), f"version {version}")
    body, trailer = data[header.end() : header.end() + length], data[header.end() + length :]
    require(len(body) == length and trailer == b"}\n", "length")
    require(checksum(body) == header[3].decode(), "checksum of _metadata")
    snapshot: dict[str, Any] = json.loads(body)
    require(bool(snapshot.get("master_hooks")) == (version == 3), "states of master hooks are of version 3")
    require(version == 3 or bool(snapshot.get("channels")) == (version == 2), "records in flight are of version 2")
    names = [hook["name"] for hook in snapshot.get("master_hooks", ())]
    require(names == sorted(set(names)) and all(names), "names of master hooks")
    require(snapshot.get("format", "holdfast-snapshot") == "holdfast-snapshot", "format")
    require(snapshot.get("key_hash_version", 1) == 1, "key hash version")
    require(1 <= snapshot["checkpoint_id"] <= 10**15, "checkpoint id")
    require(snapshot["kind"] in ("checkpoint", "savepoint", "stop_savepoint"), "kind of snapshot")
    uids = [operator["uid"] for operator in snapshot.get("operators", ())]
    require(len(set(uids)) == len(uids) and "" not in uids, "uids")
    for operator in snapshot.get("operators", ()):
        check_key_groups(operator)
        require(len(operator["subtasks"]) == operator["parallelism"] <= operator["max_parallelism"] <= 32768, "parallelism")
    return snapshot


def check_key_groups(operator: dict[str, Any]) -> None:
    """No key group of a state is in two handles."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for subtask in operator["subtasks"]:
        for handle in subtask.get("keyed", ()):
            groups = handle["key_groups"]
            require(0 <= groups["start"] <= groups["stop"] <= operator["max_parallelism"], "key groups")
            for meta in handle["states"] if handle["format"] not in DELTAS else ():
                ranges.setdefault(meta["name"], []).append((groups["start"], groups["stop"]))
    for name, found in ranges.items():
        found.sort()
        overlaps = any(start < stop and start < before for (_, before), (start, stop) in itertools.pairwise(found))
        require(name and not overlaps, f"key groups of {name!r}")


def path_of(folder: Path, path: str, kind: str) -> Path:
    """Below the folder, but that checkpoints share files beside it."""
    relative = posixpath.normpath(path)
    inside = not path.startswith("/") and relative not in (".", "..") and not relative.startswith("../")
    shared = re.fullmatch(r"\.\./shared/([^/]+)", path) if kind == "checkpoint" and re.fullmatch(r"chk-\d+", folder.name) else None
    require("\0" not in path and (inside or (shared and shared[1] not in (".", ".."))), f"path {path!r}")
    return folder / path


def read_part(handle: dict[str, Any], folder: Path, kind: str) -> bytes:
    if handle["type"] == "inline":
        try:
            return base64.b64decode(handle["data"], validate=True)
        except ValueError as error:
            raise UnreadableError(f"base64: {error}") from error
    require(handle["type"] in ("file", "segment"), f"part of type {handle['type']!r}")
    path = path_of(folder, handle["path"], kind)
    require(path.is_file(), f"{path} is missing")
    data = path.read_bytes()
    if handle["type"] == "segment":
        require(len(data) == handle["file_length"], f"length of {handle['path']}")
        require(0 <= handle["offset"] <= handle["offset"] + handle["length"] <= len(data), f"a piece of {handle['path']}")
        require(handle["length"] <= 64 << 20, f"a piece of {handle['path']} is too long")
        data = data[handle["offset"] : handle["offset"] + handle["length"]]
    require(len(data) == handle["length"], f"length of {handle['path']}")
    require(checksum(data) == handle["checksum"], f"checksum of {handle['path']}")
    return data


def read_snapshot(folder: Path) -> dict[str, Any]:
    """Every operator with its states, as plain JSON."""
    snapshot = open_envelope((folder / "_metadata").read_bytes())
    operators = {operator["uid"]: read_operator(operator, folder, snapshot["kind"]) for operator in snapshot.get("operators", ())}
    found = {key: snapshot[key] for key in ("kind", "job_name", "checkpoint_id")} | {"operators": operators}
    if "channels" in snapshot:
        ends = [tuple(channels[name] for name in END_FIELDS) for channels in snapshot["channels"]]
        require(len(set(ends)) == len(ends), "an end of an edge twice")
        found["in_flight"] = [read_channels(channels, snapshot, folder) for channels in snapshot["channels"]]
    return found


def read_channels(channels: dict[str, Any], snapshot: dict[str, Any], folder: Path) -> dict[str, Any]:
    check_edge(channels, snapshot.get("graph"))
    pieces = read_pieces(channels, read_part(channels["part"], folder, snapshot["kind"]))
    return {name: value for name, value in channels.items() if name != "part"} | {"pieces": pieces}


def read_operator(operator: dict[str, Any], folder: Path, kind: str) -> dict[str, Any]:
    states: dict[str, dict[str, Any]] = {}
    key_types = set()
    for subtask in operator["subtasks"]:
        for handle in subtask.get("keyed", ()):
            require(handle["type"] == "keyed", f"keyed state of type {handle['type']!r}")
        for meta, rows in read_keyed(subtask.get("keyed", ()), operator["max_parallelism"], folder, kind):
            key_types.add(meta["key_type"])
            state = states.setdefault(meta["name"], {"kind": meta["kind"], "value_type": meta["value_type"], "rows": []})
            require((state["kind"], state["value_type"]) == (meta["kind"], meta["value_type"]), "subtasks differ")
            state["rows"] += rows
    for state in states.values():
        state["rows"].sort(key=lambda row: json.dumps(row, sort_keys=True))
    for index, subtask in enumerate(operator["subtasks"]):
        for handle in subtask.get("operator", ()):
            require(handle["type"] == "operator_list", f"operator state of type {handle['type']!r}")
            meta = handle["state"]
            require(meta["kind"] in LIST_KINDS, f"kind {meta['kind']!r}")
            entries = msgspec.msgpack.decode(read_part(handle["part"], folder, kind), type=list[bytes])
            require(len(entries) == handle["count"], "count of entries")
            empty: list[list[str]] = [[] for _ in operator["subtasks"]]
            state = states.setdefault(meta["name"], {"kind": meta["kind"], "value_type": meta["value_type"], "subtasks": empty})
            state["subtasks"][index] = [entry.hex() for entry in entries]
    require(len(key_types) <= 1, "two key types")
    found = {"parallelism": operator["parallelism"], "max_parallelism": operator["max_parallelism"], "states": states}
    return found | {"key_type": next(iter(key_types), None)}


def read_keyed(
    handles: list[dict[str, Any]], max_parallelism: int, folder: Path, kind: str
) -> list[tuple[dict[str, Any], list[Any]]]:
    """(what a state is, its rows) of each state of one subtask."""
    found = []
    tables: dict[tuple[int, int, str], tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = {}
    for handle in handles:
        start, stop = handle["key_groups"]["start"], handle["key_groups"]["stop"]
        parts = [read_part(part, folder, kind) for part in handle["parts"]]
        if handle["format"] == "rocksdb":
            found += read_rocksdb(handle, dict(zip(handle["names"], parts, strict=True)), max_parallelism)
            continue
        is_run = handle["format"] in DELTAS
        require(is_run or handle["format"] in ("arrow", "parquet"), f"format {handle['format']!r}")
        require(len(parts) == len(handle["states"]), "parts")
        for meta, data in zip(handle["states"], parts, strict=True):
            if handle["format"] == "parquet":
                table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
            else:
                table = pa.ipc.open_file(data).read_all()
            rows = raw_rows(table, meta, max_parallelism, is_run=is_run)
            groups = table.column("key_group").to_pylist()
            require(groups == sorted(groups) and all(start <= group < stop for group in groups), "rows of other key groups")
            place = (start, stop, meta["name"])
            if not is_run:
                tables[place] = (meta, rows, [])
                continue
            require(place in tables and tables[place][0] == meta, f"a run of {meta['name']!r} without its table")
            _, before, runs = tables[place]
            runs.append(len(rows))
            require(len(runs) <= 32, "more than 32 runs")
            named = table.schema.metadata or {}
            replaced, added = (json.loads(named.get(name, b"[]")) for name in (b"holdfast.replaced", b"holdfast.added"))
            require(not added or handle["format"] == "arrow-set-delta", "lists that are added to")
            tables[place] = (meta, apply_run(before, rows, replaced, added), runs)
    return found + [(meta, combine(rows, meta)) for meta, rows, _ in tables.values()]
