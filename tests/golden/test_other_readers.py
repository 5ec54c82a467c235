"""Golden snapshots are read by programs that have nothing of Holdfast: the independent reader, DuckDB, pandas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.goldens import NAMES, described, folder_of
from tests.golden.independent_reader.tables import apply_run
from tests.golden.make_snapshots import GOLDEN

HERE = Path(__file__).parent
OURS = {"holdfast", "tests"}


def alone(arguments: list[str], folder: Path, program_folder: Path | None = None) -> Any:
    """What a program prints as JSON, in a process that has none of our packages."""
    guard = "import sys, json\nsys.path = [p for p in sys.path if p]\n"
    if program_folder is not None:
        guard += f"sys.path.insert(0, {str(program_folder)!r})\n"
    check = f"\nassert not set(sys.modules) & {OURS!r}\n"
    # Arrow's threads may still be starting when so short a process ends, and abort it then
    check += "import os; sys.stdout.flush(); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", guard + arguments[0] + check, *arguments[1:]],
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


READ = """
import contextlib, io, runpy, traceback
found = {}
for name in sys.argv[1:]:
    said = io.StringIO()
    sys.argv = ["reader", name]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module("independent_reader", run_name="__main__")
        found[name] = json.loads(said.getvalue())
    except BaseException:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By golden snapshot, at another place: what is in it, or why it can't be read. One process, which imports Arrow, for all."""
    elsewhere, places = tmp_path_factory.mktemp("elsewhere"), {}
    for name in NAMES:
        folder = folder_of(name).relative_to(GOLDEN)
        if not (elsewhere / folder.parts[0]).exists():
            shutil.copytree(GOLDEN / folder.parts[0], elsewhere / folder.parts[0])
        places[name] = str(elsewhere.joinpath(*folder.parts))
    found = alone([READ, *places.values()], elsewhere, HERE)
    return {name: found[place] for name, place in places.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_independent_reader_alone_finds_what_was_put_in(name: str, found_alone: dict[str, Any]) -> None:
    wanted = described(name)
    del wanted["snapshot"]
    assert found_alone[name] == wanted


def test_delta_runs_replace_what_changed() -> None:
    def row(key: str, namespace: Any, **rest: Any) -> dict[str, Any]:
        return {"key": key, "namespace": namespace, **rest}

    before = [row("a", b"", value=1), row("a", b"n", value=2), row("b", b"", value=3), row("c", b"", value=4)]
    run = [
        row("a", b"", value=5, tombstone=False),
        row("b", b"", value=None, tombstone=True),
        row("d", b"", value=6, tombstone=False),
    ]
    after = [row("a", b"n", value=2), row("c", b"", value=4), row("a", b"", value=5), row("d", b"", value=6)]
    assert apply_run(before, run, []) == after
    windows = [row("a", 0, rows=1), row("a", 60, rows=2)]
    assert apply_run(windows, [row("b", 60, rows=3, tombstone=False)], [60]) == [row("a", 0, rows=1), row("b", 60, rows=3)]
    timers = [row("a", b"", time=1), row("a", b"", time=2)]
    assert apply_run(timers, [row("a", b"", time=2, tombstone=True)], []) == timers[:1]


DUCKDB = """
import duckdb
def sql(state, columns, operator="fl_ge_1"):
    return sorted(map(list, duckdb.sql(f"SELECT {columns} FROM '{operator}-*-{state}.parquet'").fetchall()), key=repr)
print(json.dumps({
    "count": sql("count", "key, hex(namespace), value"),
    "note": sql("note", "key, value"),
    "amount": sql("amount", "key, CAST(value AS DOUBLE)"),
    "at": sql("at", "key, epoch_us(value)"),
    "scalars": sql("scalars", "key, value.flag, value.count, value.ratio, hex(value.raw), CAST(value.day AS TEXT), value.note"),
    "trip": sql("trip", "key, value['plane-type'], len(value.stops), value.stops[2].delay, value.seats['0'], "
                        "list_sort(value.tags), value.extra['a'], value.first.code"),
    "seen": sql("seen", "key, hex(namespace), position, value"),
    "routes": sql("routes", "key, map_key['0'], map_key['1'], value.code"),
    "windows": sql("windows", "key, namespace, flights, seats, "
                   'CASE WHEN "load.count" > 0 THEN "load.sum" / "load.count" END, delay'),
    "timers": sql("_event_time_timers", "key, hex(namespace), time"),
    "pairs": sql("latest", "key_0, key_1, key_2, hex(key_4), CAST(key_5 AS TEXT), epoch_us(key_6), CAST(key_7 AS TEXT), value",
                 "pairs"),
}))
"""
PANDAS = """
import glob, pandas
def rows(state, *columns, operator="fl_ge_1"):
    table = pandas.concat([pandas.read_parquet(file) for file in sorted(glob.glob(f"{operator}-*-{state}.parquet"))])
    found = [list(row) for row in table[list(columns)].itertuples(index=False)]
    def plain(value):
        if isinstance(value, bytes):
            return value.hex().upper()
        return None if value is None or value != value else value.item() if hasattr(value, "item") else value
    return sorted(([plain(value) for value in row] for row in found), key=repr)
print(json.dumps({
    "count": rows("count", "key", "namespace", "value"),
    "note": rows("note", "key", "value"),
    "seen": rows("seen", "key", "namespace", "position", "value"),
    "timers": rows("_event_time_timers", "key", "namespace", "time"),
    "windows": rows("windows", "key", "namespace", "flights", "seats", "delay"),
}))
"""
W = "7700FF"
WITH_SQL: dict[str, list[list[Any]]] = {
    "count": [["", "", 0], ["AA", "", 1], ["AA", W, 7], ["UA", "", -(2**63)], ["键", "", 2**63 - 1]],
    "note": [["AA", None], ["UA", "größer"]],
    "amount": [["AA", 1.5], ["UA", -1e30]],
    "at": [["AA", 1_767_323_045_678_901], ["UA", -1]],
    "scalars": [["AA", True, 1, 2.5, "00FF", "2026-01-02", None], ["UA", False, -1, -0.5, "", "0001-01-01", "noted"]],
    "trip": [["AA", "A320", 2, 5, 12, ["x", "y"], [1, 2], "FRA"], ["UA", "", 0, None, 0, [], None, None]],
    "seen": [["AA", "", 0, "one"], ["AA", "", 1, None], ["AA", "", 2, "three"], ["AA", W, 0, "two"], ["AA", W, 1, "one"],
             ["UA", "", 0, ""]],
    "routes": [["AA", "FRA", 1, "FRA"], ["AA", "JFK", 2, None]],
    "timers": [["AA", "", 1_000], ["AA", "", 2_000], ["UA", W, -5]],
    "pairs": [
        ["", 0, False, "", "1970-01-01", 0, "0.00", 2],
        ["a\0b", -1, True, "00FF00", "2026-01-02", 1_767_323_045_678_901, "12.34", 1],
        ["größe", 2**63 - 1, True, "7F", "9999-12-31", -1, "-99999999.99", 3],
    ],
}  # fmt: skip
WINDOWS = [  # airline, window, flights, seats, mean of seats, delay; NaN prints as such
    ["AA", -60_000, 2, 1, 0.5, "nan"],
    ["AA", 0, 2, 150, 75.0, -0.5],
    ["DL", 86_400_000, 1, 3, 3.0, "nan"],
    ["UA", 0, 2, 200, 200.0, 0.25],
    ["WN", 0, 2, None, None, None],
    ["键", 86_400_000, 1, 2**31 - 1, 2.0**31 - 1, "inf"],
]


def test_duckdb_alone_reads_the_savepoint() -> None:
    found = alone([DUCKDB], folder_of("v1-savepoint"))
    windows = [
        [str(value) if value in (float("inf"),) or value != value else value for value in row] for row in found.pop("windows")
    ]
    assert sorted(windows, key=repr) == sorted(WINDOWS, key=repr)
    assert found == {name: sorted(rows, key=repr) for name, rows in WITH_SQL.items()}


def test_pandas_alone_reads_the_savepoint() -> None:
    found = alone([PANDAS], folder_of("v1-savepoint"))
    windows = [[*row[:3], None if row[3] is None else int(row[3]), row[4]] for row in found.pop("windows")]
    missing: dict[Any, Any] = {"nan": None, "inf": float("inf")}  # pandas has one for NaN and null
    wanted = [[*row[:4], missing.get(row[5], row[5])] for row in WINDOWS]
    assert sorted(windows, key=repr) == sorted(wanted, key=repr)
    assert found == {name: sorted(WITH_SQL[name], key=repr) for name in found}
    assert set(found) == {"count", "note", "seen", "timers"}
