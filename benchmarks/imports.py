"""CPU seconds of what processes import: a worker, Spark's Python daemon, a worker that it forked, a driver, the command line.

Each figure is the median over fresh processes, which take turns, so that a busy machine is as busy for all. Modules are compiled
beforehand. `--beside DIR` measures another checkout in the same turns.

    python -m benchmarks.imports [--turns 10] [--beside DIR]"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import jobs
from holdfast.operators.datastream.graph import build_plan
from holdfast.operators.worker.main import pickle_plan

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent

_IMPORTED = """
import sys, time
began = time.process_time()
{code}
print(len(sys.modules), time.process_time() - began)
"""
_COMMAND = """
import contextlib, io
import holdfast
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    holdfast.command_line()({arguments})
"""
_FORKED = """
import os, pickle, sys, time
from holdfast.operators.spark.daemon import preload
preload()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
began, before = time.process_time(), len(sys.modules)
with open({plan!r}, "rb") as file:
    pickle.load(file)
from holdfast.operators.worker.main import warm_imports
warm_imports()
print(len(sys.modules) - before, time.process_time() - began, flush=True)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    code: str
    aim_s: float | None = None


def programs(plan: str) -> list[Program]:
    """`plan`: path of a pickled plan, of W1."""
    return [
        Program("worker, main module", _IMPORTED.format(code="import holdfast.operators.worker.main"), 0.4),
        Program("daemon, before the fork", _IMPORTED.format(code="import holdfast.operators.spark.daemon as d; d.preload()")),
        Program("worker, after the fork", _FORKED.format(plan=plan), 0.05),
        Program("driver, import holdfast", _IMPORTED.format(code="import holdfast")),
        Program("driver, hf.Environment", _IMPORTED.format(code="import holdfast; holdfast.Environment")),
        Program("holdfast --help", _IMPORTED.format(code=_COMMAND.format(arguments=["--help"]))),
        Program("holdfast status --help", _IMPORTED.format(code=_COMMAND.format(arguments=["status", "--help"]))),
    ]


def run(program: Program, root: Path) -> tuple[int, float]:
    """Modules and CPU seconds of one fresh process. Raises CalledProcessError."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", program.code]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=120)
    modules, seconds = done.stdout.split()[-2:]
    return int(modules), float(seconds)


def measure(turns: int, beside: Path | None = None) -> list[Row]:
    """One row for each program; with `beside`, what the other checkout takes."""
    env = jobs.w1(1_000, 100, 1, "memory", 1_000)
    with tempfile.TemporaryDirectory(prefix="holdfast-imports-") as folder:
        plan = Path(folder) / "plan"
        plan.write_bytes(pickle_plan(build_plan(env.graph, env.name, env.config, env.parallelism)))
        roots = [ROOT, *([beside] if beside is not None else [])]
        return [_row(program, roots, turns) for program in programs(str(plan))]


def _row(program: Program, roots: list[Path], turns: int) -> Row:
    for root in roots:
        run(program, root)  # writes what Python compiles
    found = [[run(program, root) for root in roots] for _ in range(turns)]
    row: Row = {"workload": "imports", "process": program.name, "modules": found[0][0][0]}
    row["cpu_s"] = round(statistics.median(turn[0][1] for turn in found), 3)
    if program.aim_s is not None:
        row["aim_s"] = program.aim_s
    if len(roots) > 1:
        row["modules_beside"] = found[0][1][0]
        row["cpu_s_beside"] = round(statistics.median(turn[1][1] for turn in found), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--beside", type=Path, help="another checkout")
    options = parser.parse_args()
    for row in measure(options.turns, options.beside):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
