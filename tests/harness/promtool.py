"""Prometheus' own tool, which `scripts/setup --tests` fetches."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.harness.installed import ROOT

_FETCHED = ROOT / "build" / "promtool" / "promtool"


def run_promtool(*arguments: str, text: str | None = None) -> tuple[int, str]:
    """Exit code, and what it says. Skips the test where the tool is not installed."""
    found = shutil.which("promtool") or (str(_FETCHED) if _FETCHED.exists() else None)
    if found is None:
        pytest.skip("promtool is not installed: scripts/setup --tests")
    done = subprocess.run([found, *arguments], input=text, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr
