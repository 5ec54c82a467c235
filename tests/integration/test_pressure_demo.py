"""examples/pressure.py, the whole of it, on Spark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAST_LINE = r"PRESSURE OK aligned_ms=(\d+) unaligned_ms=(\d+) inflight_rows=(\d+) kills=(\d+) exact=true"


@pytest.mark.spark
@pytest.mark.endurance
def test_a_job_is_exact_though_it_is_killed_with_records_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "pressure.py"), "--seed=3", f"--keep={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    found = re.fullmatch(LAST_LINE, lines[-1])
    assert found, done.stdout + done.stderr
    aligned_ms, unaligned_ms, rows, kills = map(int, found.groups())
    assert unaligned_ms < aligned_ms
    assert rows > 0
    assert kills == 4
