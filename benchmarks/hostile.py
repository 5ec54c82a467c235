"""Peak memory of each tool, and of a restore, on snapshots made to exhaust memory.

Run `python -m benchmarks.hostile`. Each tool runs in a process of its own, whose address space ends at `--limit-gib`, so that it
fails in the place of the machine. Shown is the process's largest resident set; `nothing` only opens the snapshot."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.handles import StateMeta
from tests.statebackends.foreign_tables import GROUPS, KEY, describe_table

META = StateMeta("s", "value", "str", "utf8")
MIB = 1 << 20
ROWS = 50_000
TOOLS = ("nothing", "inspect", "verify", "export", "diff", "copy", "edit", "Spark", "memory", "filesystem", "rocksdb")


def _keys(count: int) -> dict[str, Any]:
    column = KEY.column_of_values([f"user-{number}" for number in range(count)], max_parallelism=8)
    order = np.argsort(column.key_groups, kind="stable")
    return {
        "key_group": pa.array(column.key_groups[order]),
        "key": column.arrays[0].take(pa.array(order)),
        "namespace": pa.array([b""] * count, pa.binary()),
    }


def _parquet(table: pa.Table, path: Path, **options: Any) -> None:
    pq.write_table(table, path, compression="zstd", **options)


def _one_value(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        value = pa.DictionaryArray.from_arrays(pa.array(np.zeros(ROWS, np.int32)), pa.array(["x" * size]))
        _parquet(pa.table({**_keys(ROWS), "value": value}), path)

    return write


def _page(path: Path) -> None:
    _parquet(pa.table({**_keys(1), "value": ["\0" * (700 * MIB)]}), path, use_dictionary=False)


def _rows(path: Path) -> None:
    count = 100_000_000
    schema = pa.schema([("key_group", pa.int32()), ("key", pa.utf8()), ("namespace", pa.binary()), ("value", pa.utf8())])
    zeros = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), pa.array(["a"]))
    columns = [pa.array(np.zeros(1_000_000, np.int32)), zeros, zeros.cast(pa.binary()), zeros]
    batch = pa.table(dict(zip(schema.names, columns, strict=True)))
    with pq.ParquetWriter(path, batch.schema, compression="zstd") as writer:
        for _ in range(count // 1_000_000):
            writer.write_table(batch, 1_000_000)


def _arrow_dictionary(path: Path) -> None:
    value = pa.DictionaryArray.from_arrays(pa.array(np.zeros(ROWS, np.int32)), pa.array(["x" * 300_000]))
    _arrow(pa.table({**_keys(ROWS), "value": value}), path, "lz4")


def _arrow_buffer(path: Path) -> None:
    _arrow(pa.table({**_keys(1), "value": ["\0" * (700 * MIB)]}), path, "zstd")


def _arrow(table: pa.Table, path: Path, compression: str) -> None:
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)


HOSTILE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "one value of 300 kB in 50,000 rows": ("parquet", _one_value(300_000)),
    "one value of 4 kB in 50,000 rows": ("parquet", _one_value(4_000)),
    "a page of 700 MiB": ("parquet", _page),
    "100 M rows that are all one": ("parquet", _rows),
    "an Arrow dictionary of one value": ("arrow", _arrow_dictionary),
    "an Arrow buffer of 700 MiB": ("arrow", _arrow_buffer),
}
"""Name -> (format of the table, its writer). The second one unpacks to less than is refused."""


def make(folder: Path, name: str) -> Path:
    """A savepoint with one such table."""
    table_format, write = HOSTILE[name]
    folder.mkdir(parents=True)
    path = folder / f"rows.{table_format}"
    write(path)
    describe_table(path, table_format, META)
    return folder


def use(tool: str, folder: Path, scratch: Path) -> None:
    """A user's use of one tool; in a process of its own."""
    import holdfast as hf
    from holdfast.operators.spark.datasource.state import ReadOptions, StateReader
    from holdfast.statebackends.factory import create_keyed_backend
    from holdfast.statebackends.storage.directory import LocalStorage

    snapshot = hf.Snapshot(folder)
    if tool in ("memory", "filesystem", "rocksdb"):
        backend = create_keyed_backend(
            tool,  # type: ignore[arg-type]
            descriptors=(hf.ValueStateDescriptor("s", str),),
            key_type=KEY,
            key_groups=GROUPS,
            max_parallelism=8,
            operator="op",
            subtask=0,
            local_dir=str(scratch / "local"),
        )
        backend.restore(snapshot.metadata.operators[0].subtasks[0].keyed, LocalStorage(folder.parent), folder.name)
        return
    spark = StateReader(ReadOptions(str(folder), "op", "s"))
    uses: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "inspect": lambda: next(snapshot.rows("op", "s")),
        "verify": snapshot.verify,
        "export": lambda: snapshot.export(scratch / "target"),
        "diff": lambda: snapshot.diff(snapshot),
        "copy": lambda: snapshot.copy(scratch / "target"),
        "edit": lambda: snapshot.edit(scratch / "target", uid="op", state="s", function=lambda batch: batch),
        "Spark": lambda: [batch.num_rows for each in spark.partitions() for batch in spark.read(each)],
    }
    uses[tool]()


def measured(tool: str, folder: Path, limit_gib: int) -> tuple[int, str]:
    """(peak in bytes, result) of one tool."""
    with tempfile.TemporaryDirectory(prefix="holdfast-hostile-") as scratch:
        command = [sys.executable, "-m", "benchmarks.hostile", "--use", tool, str(folder), scratch, "--limit-gib", str(limit_gib)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (result.stdout + result.stderr).strip().splitlines() or [f"signal {-result.returncode}"]
    peak, _, outcome = lines[-1].partition(" ")
    return (int(peak), outcome) if peak.isdigit() else (0, lines[-1])


def _child(tool: str, folder: Path, scratch: Path, limit_gib: int) -> None:
    limit = limit_gib << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        use(tool, folder, scratch)
        outcome = "done"
    except BaseException as error:
        outcome = type(error).__name__
    # getrusage would give the parent's peak before the exec, if that was higher
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:")]
    peak = int(line.split()[1]) * 1024
    sys.stdout.write(f"{peak} {outcome}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-gib", type=int, default=8)
    parser.add_argument("--only", default="", help="snapshots whose names hold this")
    parser.add_argument("--use", nargs=3, metavar=("TOOL", "FOLDER", "SCRATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.use:
        tool, folder, scratch = options.use
        _child(tool, Path(folder), Path(scratch), options.limit_gib)
        return
    sys.stdout.write(f"peak memory in MiB, on {os.cpu_count()} cores; + done, - refused, ! anything else\n")
    with tempfile.TemporaryDirectory(prefix="holdfast-hostile-") as root:
        width = max(map(len, HOSTILE))
        sys.stdout.write(f"{'SNAPSHOT':{width}} {'SIZE KiB':>9} " + " ".join(f"{tool:>11}" for tool in TOOLS) + "\n")
        for number, name in enumerate(name for name in HOSTILE if options.only in name):
            folder = make(Path(root) / f"savepoint-{number}", name)
            size = sum(path.stat().st_size for path in folder.iterdir())
            cells = []
            for tool in TOOLS:
                peak, outcome = measured(tool, folder, options.limit_gib)
                mark = {"done": "+", "CorruptStateError": "-"}.get(outcome, f"! {outcome[:30]} ")
                cells.append(f"{peak / MIB:.0f} {mark}")
            sys.stdout.write(f"{name:{width}} {size / 1024:9.0f} " + " ".join(f"{cell:>11}" for cell in cells) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
