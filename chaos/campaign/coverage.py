"""Branches of the product that ran in simulated runs, and modules that never did: a campaign says nothing about these.

Measured in an interpreter of its own that imports the whole product first, so that a definition does not count as a run."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import pkgutil
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from holdfast.chaos.campaign.runner import RUN_SEED, Task, interpreter, perform, resolve
from holdfast.chaos.campaign.summary import CoverageReport

if TYPE_CHECKING:
    from holdfast.chaos.cluster.world import RunRequest

PACKAGES = ("statebackends", "barriers", "operators", "coordinator")
"""Packages that are measured, and listed where they never ran."""

RUNS_MAX = 40
"""Runs in a sample."""
TRACED = 5
"""Times as long as without tracing a run may take, about as much slower as it is."""
ENDS_TIMEOUT_S = 600.0
"""For what comes before the first run and behind the last one, the product's imports and the report: seconds, minutes on a machine
that is busy with other things."""
SEEDS_PER_RUN = 10
"""Seeds of a campaign for one run in its sample, which has every kind of run at least once."""

MISSING = "install it with: pip install 'holdfast[chaos]'"


def sample(seeds: range, kinds: tuple[int, ...]) -> list[int]:
    """Some seeds of a campaign: the first of each kind of run, then further ones from the beginning."""
    count = min(RUNS_MAX, max(len(kinds), len(seeds) // SEEDS_PER_RUN))
    return list(dict.fromkeys((*kinds, *seeds[:RUNS_MAX])))[:count]


def measure(
    requests: list[RunRequest], *, limit_s: float, entry: str = RUN_SEED, packages: Sequence[str] = PACKAGES
) -> CoverageReport:
    """Run them under coverage. Raises nothing for failures there: the report says why it has no figures.

    limit_s: how long a run may take without tracing. What is late is one run, not all together, nor the imports and the report.
    packages: of PACKAGES, those that are measured."""
    if find_spec("coverage") is None:
        return CoverageReport(unavailable=MISSING)
    with tempfile.NamedTemporaryFile(suffix=".json") as answer, tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as told:
        pickle.dump((requests, tuple(packages)), asked)
        asked.seek(0)
        limits_s = [ENDS_TIMEOUT_S, *[limit_s * TRACED] * len(requests), ENDS_TIMEOUT_S]
        code = _run_child(entry, answer.name, asked, told, limits_s)
        if code is None:
            return CoverageReport(unavailable="a run under coverage did not end")
        if code != 0:
            told.seek(0)
            last = told.read().decode(errors="replace").strip().splitlines()[-1:]
            return CoverageReport(unavailable=f"its process ended with code {code}: {' '.join(last)}")
        return msgspec.json.decode(Path(answer.name).read_bytes(), type=CoverageReport)


def _run_child(entry: str, answer: str, asked: IO[bytes], told: IO[bytes], limits_s: Sequence[float]) -> int | None:
    """The code that the measuring interpreter ended with; None if a step of it took longer than its limit."""
    reads, writes = os.pipe()
    try:
        command = interpreter("holdfast.chaos.campaign.coverage:run_measured", entry, answer, str(writes))
        try:
            child = subprocess.Popen(command, stdin=asked, stdout=subprocess.DEVNULL, stderr=told, pass_fds=(writes,))
        finally:
            os.close(writes)
        with child:
            if _closes(reads, limits_s):
                return child.wait()
            child.kill()
            return None
    finally:
        os.close(reads)


def _closes(reads: int, limits_s: Sequence[float]) -> bool:
    """Whether the other end is closed in time: each step, told by a byte, within its limit."""
    for limit_s in limits_s:
        ready, _, _ = select.select([reads], [], [], limit_s)
        if not ready:
            return False
        if not os.read(reads, 1):
            return True
    return False


def run_measured(entry: str, answer: str, progress: str) -> None:
    """The measuring interpreter: requests from stdin, the report into a file, a byte to `progress` behind the imports and behind
    each run."""
    import coverage

    requests: list[RunRequest]
    packages: tuple[str, ...]
    requests, packages = pickle.load(sys.stdin.buffer)
    run = resolve(entry)
    modules = dict(product_modules(packages))
    sources = [f"holdfast.{name}" for name in packages]
    meter = coverage.Coverage(branch=True, data_file=None, source_pkgs=sources, config_file=False, messages=False)
    meter.set_option("run:disable_warnings", ["module-not-measured", "already-imported", "no-data-collected"])
    meter.exclude(r"if TYPE_CHECKING:")
    os.write(int(progress), b".")
    meter.start()
    for request in requests:
        perform(run, Task(request))
        os.write(int(progress), b".")
    meter.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        meter.json_report(outfile=found.name)
        files = json.loads(Path(found.name).read_bytes())["files"]
    measured = {str(Path(path).resolve()): figures for path, figures in files.items()}
    Path(answer).write_bytes(msgspec.json.encode(report(modules, measured, len(requests), packages)))


def product_modules(packages: Sequence[str] = PACKAGES) -> Iterator[tuple[str, Path]]:
    """Every module of the product that can be imported, with its file. Imports them."""
    for package in packages:
        whole = f"holdfast.{package}"
        for found in pkgutil.walk_packages(importlib.import_module(whole).__path__, prefix=f"{whole}."):
            module = importlib.import_module(found.name)
            yield found.name, Path(str(module.__file__)).resolve()


def report(
    modules: dict[str, Path], measured: dict[str, dict[str, Any]], runs: int, packages: Sequence[str] = PACKAGES
) -> CoverageReport:
    """The report from coverage's JSON figures, by absolute path. A module without functions can't run."""
    covered = dict.fromkeys(packages, 0)
    branches = dict.fromkeys(packages, 0)
    never_ran = []
    for name, path in sorted(modules.items()):
        figures = measured.get(str(path), {"summary": {}, "executed_lines": []})
        package = name.split(".")[1]
        covered[package] += figures["summary"].get("covered_branches", 0)
        branches[package] += figures["summary"].get("num_branches", 0)
        if not figures["executed_lines"] and has_functions(path.read_text("utf-8")):
            never_ran.append(name)
    return CoverageReport(
        runs=runs,
        branches_percent=_percent(sum(covered.values()), sum(branches.values())),
        packages={package: _percent(covered[package], branches[package]) for package in packages},
        never_ran=tuple(never_ran),
    )


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


def has_functions(source: str) -> bool:
    """Whether a function in it does something: more than a docstring, `...` or `pass`."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(not all(_is_empty(statement) for statement in function.body) for function in functions)


def _is_empty(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
