"""What Spark's Python daemon has done before it forks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PRELOAD = """
import json, os, sys, threading

def threads():
    named = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return sorted(named)

import numpy, rocksdict, pyarrow.parquet  # their allocators and BLAS have threads that know of forks
before = threads()
from holdfast.operators.spark.daemon import preload
preload()
print(json.dumps([before, threads(), threading.active_count(), "pandas" in sys.modules]))
"""
FORKED = """
import os, sys, time
from holdfast.operators.spark.daemon import preload
preload()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
loaded = set(sys.modules)
from holdfast.operators.worker.main import warm_imports
warm_imports()
import pyarrow as pa
assert pa.table({"a": [1, 2]}).to_pandas()["a"].sum() == 3, "Arrow's pool begins in the copy"
late = sorted(name for name in set(sys.modules) - loaded if name.partition(".")[0] in ("pandas", "pyarrow", "numpy", "holdfast"))
os._exit(len(late) and print(late, flush=True) is None)
"""


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True, timeout=240).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_starts_no_thread_that_a_fork_would_lose() -> None:
    before, after, of_python, has_pandas = json.loads(run(PRELOAD))
    assert after == before
    assert of_python == 1
    assert has_pandas, "else each worker imports it: a fifth of a second of CPU"


def test_a_worker_forked_from_it_imports_nothing_more() -> None:
    assert run(FORKED) == ""
