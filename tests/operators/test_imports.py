"""What a process has loaded when it has imported us: a worker begins, and a dead one's successor, with what it needs alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.operators.spark.preloads import PRELOAD, S3, ask_for

ROOT = Path(__file__).parents[2]

LATER = frozenset(
    {
        "asyncio",  # jobs with coroutines
        "boto3",  # a state directory, a source or a sink on S3
        "botocore",
        "duckdb",
        "fastapi",
        "pandas",  # Arrow's first array: behind the registration, or before the fork
        "pydantic",
        "pyspark",  # Spark's own worker
        "rich",
        "rocksdict",  # state in RocksDB
        "s3transfer",
        "starlette",
        "tenacity",  # storage on S3, and calls of functions that are repeated
        "tornado",
        "typer",
        "uvicorn",
    }
)
"""Packages that only some jobs need, or that only other processes have."""
LATER_MODULES = frozenset(
    {
        "holdfast.api",
        "holdfast.chaos",
        "holdfast.coordinator",
        "holdfast.statebackends.rocksdb",
        "holdfast.statebackends.storage.s3",
        "holdfast.statebackends.storage.s3_connection",
        "pyarrow.dataset",
        "pyarrow.fs",
        "pyarrow.parquet",
    }
)
OTHERS = frozenset(
    {
        "cloudpickle",
        "cython_runtime",
        "holdfast",
        "mmh3",
        "msgspec",
        "numpy",
        "pyarrow",
        "typing_extensions",
        "urllib3",
        "xxhash",
        "zmq",
    }
)
"""What a worker takes from others. Another package here is one more that every worker of every job loads."""
MODULES_MAX = 510
"""Bound on all modules, the standard library's among them: 484 with Python 3.11."""

LISTING = """
import importlib, json, sys
before = set(sys.modules)
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded(*modules: str, program: str = LISTING, environment: Sequence[tuple[str, str]] = ()) -> set[str]:
    command = [sys.executable, "-c", program, *modules]
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **dict(environment)}
    done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=True, timeout=240)
    return set(json.loads(done.stdout))


def tops(modules: set[str]) -> set[str]:
    """Packages of others among them."""
    names = {module.partition(".")[0] for module in modules}
    return {name for name in names - sys.stdlib_module_names if not name.startswith(("_", "__editable__"))}


def test_a_worker_loads_what_it_needs_and_no_more() -> None:
    found = loaded("holdfast.operators.worker.main")
    names = {module.partition(".")[0] for module in found}
    assert not names & LATER
    assert not found & LATER_MODULES
    assert tops(found) <= OTHERS, "one more package that every worker loads: lazily, or listed here with its price"
    assert len(found) <= MODULES_MAX


def test_s3_comes_with_its_first_request_or_before() -> None:
    module = "holdfast.statebackends.storage.s3_connection"
    assert not {"boto3", "botocore", "tenacity"} & loaded(module)
    early = LISTING.replace("print(", f"sys.modules['{module}'].load()\nprint(")
    assert {"boto3", "botocore", "tenacity"} <= loaded(module, program=early)


def test_the_facade_loads_nothing_else() -> None:
    assert tops(loaded("holdfast")) <= {"holdfast"}
    assert not {module for module in loaded("holdfast") if module.startswith("holdfast.")}


COMMAND_LINE = """
import contextlib, io, json, sys
before = set(sys.modules)
import holdfast
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    holdfast.command_line()(sys.argv[1:])
assert "Usage" in shown.getvalue()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
OF_DATA = {
    "asyncio",
    "boto3",
    "fastapi",
    "numpy",
    "pandas",
    "pyarrow",
    "pyspark",
    "rocksdict",
    "tenacity",
    "uvicorn",
    "zmq",
}


@pytest.mark.parametrize("command", ["", "status"])
def test_the_command_line_answers_without_what_touches_data(command: str) -> None:
    found = loaded(*command.split(), "--help", program=COMMAND_LINE)
    assert not OF_DATA & {module.partition(".")[0] for module in found}


DAEMON = """
import json, sys
from holdfast.operators.spark.daemon import preload
preload()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("asked", ["", S3, f"of a newer driver,{S3}"])
def test_the_daemon_loads_s3_where_a_driver_asks_for_it(asked: str) -> None:
    found = loaded(program=DAEMON, environment=[(PRELOAD, asked)])
    assert ("boto3" in found) == (S3 in asked)
    early = {"pyarrow.parquet", "pandas", "pyspark.worker", "rocksdict"}
    assert early <= found, "what workers come to is loaded once, before the fork"


def test_a_driver_asks_for_what_the_storage_of_its_jobs_needs() -> None:
    environment: dict[str, str] = {}
    ask_for(environment, ["/tmp/state", "file:///tmp/state"])
    assert environment == {}, "a different environment is a different daemon"
    ask_for(environment, ["s3://bucket/state"])
    assert environment == {PRELOAD: S3}
    ask_for(environment, ["/tmp/state"])
    assert environment == {PRELOAD: S3}, "a second job does not start a third daemon"
    environment[PRELOAD] = "theirs"
    ask_for(environment, ["s3://bucket/state"])
    assert environment == {PRELOAD: f"{S3},theirs"}
