"""Contents of golden snapshots as plain JSON, made from the inputs alone and by nothing of what reads or writes snapshots.

Null, true, 5, "text" as they are; {"float": "0.5"}, {"bytes": "00ff"}, {"date": "2026-01-02"}, {"us": 5} (time since the
epoch), {"decimal": "1.50"}, {"text": "PT5S"}, {"pickle": "80..."}; lists as lists; {"set": [...]},
{"dict": [[key, value], ...]}, {"tuple": [...]}, {"struct": {...}}."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import types
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NotRequired, get_args, get_origin
from uuid import UUID

import msgspec

from holdfast.statebackends.state import Pickled
from tests.golden.independent_reader.keys import key_group, key_hash
from tests.golden.model import EPOCH, MAX_PARALLELISM, Contents, Held, Key, entries_of

Json = Any


def plain(value: Any, declared: Any = None) -> Json:
    """Plain JSON of a value of a declared type; of a key, whose type needs no declaration."""
    origin, arguments = get_origin(declared), get_args(declared)
    if declared is Pickled:
        return {"pickle": pickle.dumps(value, protocol=5).hex()}
    if origin is NotRequired:
        return plain(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        members = [argument for argument in arguments if argument is not type(None)]
        return plain(value, members[0] if len(members) == 1 else None)
    names = _field_names(declared)
    if names is not None and value is not None:
        read = value.get if isinstance(value, dict) else lambda name: getattr(value, name)
        present = [name for name in names if not isinstance(value, dict) or name in value]
        return {"struct": {names[name][0]: plain(read(name), names[name][1]) for name in present}}
    match value:
        case set() | frozenset():
            return {"set": sorted((plain(member, arguments[0]) for member in value), key=json.dumps)}
        case dict():
            return {"dict": [[plain(key, arguments[0]), plain(member, arguments[1])] for key, member in value.items()]}
        case tuple() if Ellipsis not in arguments:
            return {"tuple": [plain(member, kind) for member, kind in zip(value, arguments or [None] * len(value), strict=True)]}
        case list() | tuple():
            return [plain(member, arguments[0]) for member in value]
    return _scalar(value)


def _field_names(declared: Any) -> dict[str, tuple[str, Any]] | None:
    """Attribute -> (name of the field, its type); None if it is no record."""
    if not isinstance(declared, type):
        return None
    hints = typing.get_type_hints(declared) if declared.__module__.startswith("tests.") else {}
    if issubclass(declared, msgspec.Struct):
        return {each.name: (each.encode_name, hints[each.name]) for each in msgspec.structs.fields(declared)}
    if dataclasses.is_dataclass(declared) or typing.is_typeddict(declared) or hasattr(declared, "_fields"):
        return {name: (name, hint) for name, hint in hints.items()}
    return None


def _scalar(value: Any) -> Json:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": repr(value)}
        case bytes():
            return {"bytes": value.hex()}
        case datetime():
            return {"us": (value - EPOCH) // timedelta(microseconds=1)}
        case date():
            return {"date": value.isoformat()}
        case Decimal():
            return {"decimal": str(value)}
        case timedelta():
            sign, rest = ("-", -value) if value < timedelta(0) else ("", value)
            days, seconds = divmod(rest // timedelta(microseconds=1), 86_400_000_000)
            text = f"{seconds / 1e6:.6f}".rstrip("0").rstrip(".")
            return {"text": f"{sign}P{f'{days}D' if days else ''}T{text}S"}
        case time():
            return {"text": value.isoformat()}
        case UUID():
            return {"text": str(value)}
    raise TypeError(type(value).__name__)


def rows_of(held: Held) -> list[Json]:
    """Rows as they are to be found."""
    if held.stamps:
        return stamped_rows_of(held)
    found = []
    for key, namespace, value in held.rows:
        declared = held.descriptor.type
        shown: Json
        match held.descriptor.kind:
            case "list":
                shown = [plain(element, declared) for element in value]
            case "map":
                shown = sorted(
                    ([plain(entry, held.descriptor.key_type), plain(v, declared)] for entry, v in value.items()), key=json.dumps
                )
            case "reducing":
                shown = sum(value)
            case "aggregating":
                shown = {"tuple": [sum(value), len(value)]}
            case _:
                shown = plain(value, declared)
        found.append({"key": plain(key), "namespace": namespace.hex(), "value": shown})
    return in_order(found)


def stamped_rows_of(held: Held) -> list[Json]:
    """As `rows_of`, where each value, element and entry has a stamp, and what was written later comes on top."""
    found: dict[str, Json] = {}
    sums: dict[str, list[int]] = {}
    for (key, namespace, value), stamp in zip(held.rows, held.stamps, strict=True):
        place = json.dumps([plain(key), namespace.hex()])
        row = found.setdefault(place, {"key": plain(key), "namespace": namespace.hex(), "value": []})
        declared = held.descriptor.type
        match held.descriptor.kind:
            case "list":
                row["value"] += [{"stamp": stamp, "value": plain(element, declared)} for element in value]
            case "map":
                entries = {json.dumps(entry): [entry, shown] for entry, shown in row["value"]}
                for entry, member in value.items():
                    shown = plain(entry, held.descriptor.key_type)
                    entries[json.dumps(shown)] = [shown, {"stamp": stamp, "value": plain(member, declared)}]
                row["value"] = sorted(entries.values(), key=json.dumps)
            case "reducing" | "aggregating":
                total = sums.setdefault(place, [])
                total += value
                combined = sum(total) if held.descriptor.kind == "reducing" else {"tuple": [sum(total), len(total)]}
                row["value"] = {"stamp": stamp, "value": combined}
            case _:
                row["value"] = {"stamp": stamp, "value": plain(value, declared)}
    return in_order(list(found.values()))


def unexpired(rows: list[Json], kind: str, horizon_ms: int) -> list[Json]:
    """The same without stamps, and without what was stamped at the horizon or before."""

    def alive(stamped: Json) -> bool:
        return bool(stamped["stamp"] > horizon_ms)

    found = []
    for row in rows:
        value = row["value"]
        match kind:
            case "list":
                left = [each["value"] for each in value if alive(each)]
            case "map":
                left = [[entry, each["value"]] for entry, each in value if alive(each)]
            case _:
                left = [value["value"]] if alive(value) else []
        if left:
            found.append({**row, "value": left if kind in ("list", "map") else left[0]})
    return in_order(found)


def windows_of(contents: Contents) -> list[Json]:
    """Rows of the columnar state: parts of accumulators, and results; folded here one by one."""
    assert contents.columnar is not None
    seen: dict[tuple[Key, int], list[dict[str, float | None]]] = {}
    for window, rows in contents.updates:
        for key, seats, delay in rows:
            seen.setdefault((key, window), []).append({"seats": seats, "delay": delay})
    found = []
    for (key, window), values in seen.items():
        if window in contents.dropped_windows:
            continue
        parts: dict[str, Json] = {}
        result: dict[str, Json] = {}
        for aggregate in contents.columnar.aggregates:
            column = None if aggregate.column is None else [value[aggregate.column] for value in values]
            stored, shown = _folded(aggregate.function, len(values), column, is_float=aggregate.column == "delay")
            parts |= {f"{aggregate.output}{name}": plain(value) for name, value in stored.items()}
            result[aggregate.output] = plain(shown)
        found.append({"key": plain(key), "window": window, "parts": parts, "result": result})
    return in_order(found)


def table_rows_of(contents: Contents, parallelism: int) -> list[Json]:
    """Rows of the row table: an order is the number of a row among those that came to its subtask."""
    found = []
    came: dict[int, int] = {}
    for number, (key, namespace, moment, row) in enumerate(contents.appended):
        subtask = key_group([key_hash(str(contents.key_type), key)], ["key"], MAX_PARALLELISM) * parallelism // MAX_PARALLELISM
        order = came[subtask] = came.get(subtask, -1) + 1
        if contents.deleted(key, namespace, row) or (namespace in contents.dropped and number < contents.dropped_before):
            continue
        shown = {name: plain(value) for name, value in row.items()}
        found.append({"key": plain(key), "namespace": namespace, "order": order, "time": moment, "row": shown})
    return in_order(found)


def _folded(function: str, count: int, column: list[float | None] | None, *, is_float: bool) -> tuple[dict[str, Any], Any]:
    """(what is stored, by what comes behind the output's name; the result)."""
    values = [value for value in column or () if value is not None]
    numbers = [value for value in values if not math.isnan(value)]
    total: float | int = math.fsum(values) if is_float else sum(values)
    match function:
        case "count":
            shown: Any = count if column is None else len(values)
        case "sum":
            shown = total if values else None
        case "min":
            shown = min(numbers, default=math.nan) if values else None
        case "max":
            shown = (math.nan if len(numbers) < len(values) else max(values)) if values else None
        case _:
            mean = total / len(values) if values else None
            return {".sum": total, ".count": len(values)}, mean
    return {"": shown}, shown


def expected(contents: Contents, parallelism: int) -> Json:
    """All that is to be found of an operator."""
    states: dict[str, Json] = {}
    for held in contents.held:
        kind = held.descriptor.kind
        states[held.descriptor.name] = {"kind": kind, "value_type": held.value_type, "rows": rows_of(held)}
    if contents.columnar is not None:
        states[contents.columnar.name] = {"kind": "columnar", "value_type": contents.columnar_type, "rows": windows_of(contents)}
    if contents.row_table is not None:
        rows = table_rows_of(contents, parallelism)
        states[contents.row_table.name] = {"kind": "row_table", "value_type": contents.row_table_type, "rows": rows}
    for name, timers in contents.timers.items():
        rows = [{"key": plain(key), "namespace": namespace.hex(), "time": moment} for key, namespace, moment in timers]
        states[name] = {"kind": "timers", "value_type": "int", "rows": in_order(rows)}
    for descriptor, entries in contents.lists.items():
        subtasks = [[entry.hex() for entry in entries_of(descriptor, entries, index, parallelism)] for index in range(parallelism)]
        states[descriptor.name] = {"kind": descriptor.kind, "value_type": "bytes", "subtasks": subtasks}
    return {"parallelism": parallelism, "max_parallelism": MAX_PARALLELISM, "key_type": contents.key_type, "states": states}


def in_order(rows: list[Json]) -> list[Json]:
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))
