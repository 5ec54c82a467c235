"""Rows of canonical tables."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from .errors import require
from .keys import key_fields, key_group, key_hash, key_json
from .valuetypes import from_arrow, parse_type

ROW_KINDS = ("value", "list", "map", "reducing", "aggregating")


def rows_of_table(table: pa.Table, meta: dict[str, Any], max_parallelism: int) -> list[Any]:
    """Rows of a state; list elements and map entries are put together."""
    return combine(raw_rows(table, meta, max_parallelism), meta)


def raw_rows(table: pa.Table, meta: dict[str, Any], max_parallelism: int, *, is_run: bool = False) -> list[dict[str, Any]]:
    """Rows as they are, with `key` in place of the key's columns and without the key group, which is checked."""
    fields = key_fields(meta["key_type"])
    names = [f"key_{index}" for index in range(len(fields))] if meta["key_type"].startswith("tuple<") else ["key"]
    for name, nullable in (columns_of(meta, names) | ({"tombstone": False} if is_run else {})).items():
        require(name in table.column_names, f"no column {name!r}")
        nullable = nullable or (is_run and name not in ("key_group", *names, "namespace", "tombstone"))
        require(nullable or not table.column(name).null_count, f"null in column {name!r}")
    rows: list[dict[str, Any]] = []
    for row in table.to_pylist():
        members = [row.pop(name) for name in names]
        group = key_group([key_hash(field, member) for field, member in zip(fields, members, strict=True)], names, max_parallelism)
        require(row.pop("key_group") == group, f"key group of {members}")
        shown = [key_json(member) for member in members]
        rows.append({"key": shown[0] if names == ["key"] else {"tuple": shown}, **row})
    return rows


def apply_run(
    before: list[dict[str, Any]], run: list[dict[str, Any]], replaced: list[int], added: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The rows of a state after a delta."""

    def identity(row: dict[str, Any]) -> str:
        own = row["order"] if "order" in row else row.get("time")
        return json.dumps([row["key"], row["namespace"], own], sort_keys=True, default=bytes.hex)

    changed = {identity(row) for row in run}
    before = [row for row in before if row["namespace"] not in replaced]
    known = {identity(row): row for row in before if identity(row) in changed}
    run = [row | {name: known[identity(row)][name] + row[name] for name in added if identity(row) in known} for row in run]
    kept = [row for row in before if identity(row) not in changed]
    return kept + [{name: value for name, value in row.items() if name != "tombstone"} for row in run if not row["tombstone"]]


def columns_of(meta: dict[str, Any], keys: list[str]) -> dict[str, bool]:
    """Columns that a table must have, and which of them may hold nulls."""
    columns = dict.fromkeys(["key_group", *keys, "namespace"], False)
    match meta["kind"]:
        case "columnar":
            for name, function in aggregates(meta["value_type"]):
                parts = [f"{name}.sum", f"{name}.count"] if function == "mean" else [name]
                columns |= dict.fromkeys(parts, function in ("sum", "min", "max"))
            return columns
        case "row_table":
            return columns | {"order": False, "time": True} | {stored_name(name): True for name in own_columns(meta["value_type"])}
        case "timers":
            return columns | {"time": False}
    kind = parse_type(meta["value_type"])
    if meta["kind"] == "list":
        columns["position"] = False
    elif meta["kind"] == "map":
        columns["map_key"] = kind[1][0] == "optional"
        kind = kind[2]
    if kind[0] == "ttl":
        columns["ttl_stamp_ms"] = False
        kind = kind[1]
    return columns | {"value": kind[0] == "optional"}


def aggregates(value_type: str) -> list[tuple[str, str]]:
    """(name, function) of a columnar type whose names are plain."""
    return re.findall(r"([^,<]+)=(count_distinct|count|sum|min|max|mean)(?:\(\w+\))?[,>]", value_type)


def own_columns(value_type: str) -> list[str]:
    """Names of the columns of a row table without nested types."""
    found = re.findall(r'[<,] ?(?:(\w+)|("(?:[^"\\]|\\.)*")): ', value_type)
    return [plain or json.loads(quoted) for plain, quoted in found]


def stored_name(name: str) -> str:
    ours = re.fullmatch(r"key_group|key|key_\d+|namespace|order|time|tombstone|row\..*", name)
    return f"row.{name}" if ours else name


def table_row(row: dict[str, Any], value_type: str) -> dict[str, Any]:
    shown = {name: key_json(row[stored_name(name)]) for name in own_columns(value_type)}
    return {name: row[name] for name in ("key", "namespace", "order", "time")} | {"row": shown}


def combine(rows: list[dict[str, Any]], meta: dict[str, Any]) -> list[Any]:
    match meta["kind"]:
        case "columnar":
            return [columnar_row(row, meta["value_type"]) for row in rows]
        case "row_table":
            return [table_row(row, meta["value_type"]) for row in rows]
        case "timers":
            return [{"key": row["key"], "namespace": row["namespace"].hex(), "time": row["time"]} for row in rows]
    require(meta["kind"] in ROW_KINDS, f"kind {meta['kind']!r}")
    map_type, value_type = None, parse_type(meta["value_type"])
    if meta["kind"] == "map":
        (_, map_type, value_type) = value_type
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.get("position", 0)):
        if value_type[0] == "ttl":
            value = {"stamp": row["ttl_stamp_ms"], "value": from_arrow(value_type[1], row["value"])}
        else:
            value = from_arrow(value_type, row["value"])
        place = json.dumps([row["key"], row["namespace"].hex()], sort_keys=True)
        shown = found.setdefault(place, {"key": row["key"], "namespace": row["namespace"].hex(), "value": []})
        if map_type is not None:
            shown["value"].append([from_arrow(map_type, row["map_key"]), value])
        elif meta["kind"] == "list":
            require(row["position"] == len(shown["value"]), "positions")
            shown["value"].append(value)
        else:
            require(shown["value"] == [], "a key twice")
            shown["value"] = value
    for shown in found.values() if map_type is not None else ():
        shown["value"].sort(key=json.dumps)
    return list(found.values())


def columnar_row(row: dict[str, Any], value_type: str) -> dict[str, Any]:
    own = {name: value for name, value in row.items() if name not in ("key", "namespace")}
    parts = {name: [*map(key_json, value)] if isinstance(value, list) else key_json(value) for name, value in own.items()}
    result: dict[str, Any] = {}
    for name, function in aggregates(value_type):
        if function == "count_distinct":
            result[name] = len(parts[name])
        elif function != "mean":
            result[name] = parts[name]
        else:
            total, count = row[f"{name}.sum"], row[f"{name}.count"]
            result[name] = key_json(total / count) if count else None
    return {"key": row["key"], "window": row["namespace"], "parts": parts, "result": result}
