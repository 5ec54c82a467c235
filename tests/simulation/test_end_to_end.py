"""The commands over real runs: a campaign, a failure that comes back by its own command, a pipeline from a file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.chaos.workloads import WORKLOADS

runner = CliRunner()
pytestmark = pytest.mark.slow

PIPELINE = """
import random

import pyarrow as pa
import holdfast as hf

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64())])


def make_batch(indices):
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % 3)], schema=SCHEMA)


def steady(env):
    numbers = env.from_source(hf.GeneratorSource(make_batch, 300, SCHEMA, rows_per_second=500)).uid("numbers")
    twice = numbers.map(lambda row: {**row, "i": row["i"] * 2}, returns=SCHEMA).uid("twice")
    twice.sink_to(hf.ParquetSink("/out/mine"), uid="mine")


def shaky(env):
    numbers = env.from_source(hf.GeneratorSource(make_batch, 300, SCHEMA, rows_per_second=500)).uid("numbers")
    drawn = numbers.filter(lambda row: random.random() < 0.5).uid("drawn")
    drawn.sink_to(hf.ParquetSink("/out/mine"), uid="mine")
"""


def call(*arguments: str, code: int) -> str:
    result = runner.invoke(holdfast.command_line(), ["chaos", *arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout


@pytest.mark.endurance
def test_a_campaign_over_all_workloads_holds() -> None:
    seeds = str(len(WORKLOADS))
    found = json.loads(call("sim", "--seeds", seeds, "--jobs", "2", "--no-coverage", "--json", code=0))
    summary = found["summary"]
    assert (summary["seeds"], summary["violations"], set(summary["workloads"])) == (len(WORKLOADS), 0, set(WORKLOADS))
    assert summary["crashes"] > 0
    assert summary["checkpoints"] > 50


def test_a_failure_comes_back_by_the_command_that_it_ends_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sabotage = ("--sabotage", "replayed_record", "--workload", "counter", "--json")
    (failure,) = json.loads(call("sim", *sabotage, "--jobs", "1", code=1))["failures"]
    assert failure["minimised"]
    words = shlex.split(failure["replay"])
    assert words[:2] == ["holdfast", "chaos"]
    again = json.loads(call(*words[2:], "--events", "12", "--json", code=1))
    (violation,) = again["result"]["violations"]
    assert (violation["invariant"], violation["message"]) == (failure["invariant"], failure["message"])
    assert again["events"] == failure["events"]
    assert (tmp_path / f"{failure['seed']}.trace").read_text().splitlines()[-12:] == failure["events"]


def test_a_pipeline_from_a_file_is_run_and_checked_for_determinism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(PIPELINE)
    monkeypatch.chdir(tmp_path)
    call("sim", "--seeds", "2", "--workload", "mine.py:steady", "--no-coverage", code=0)
    found = json.loads(call("sim", "--seeds", "1", "--workload", "mine.py:shaky", "--no-coverage", "--json", code=1))
    (failure,) = found["failures"]
    assert failure["invariant"] == "determinism"
    assert failure["replay"].endswith("--check-determinism")
