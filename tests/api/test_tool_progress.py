"""The line that says how far a tool is: when it is shown, what it says, that it is gone before the result."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.api.cli import console
from holdfast.api.cli.progress import ProgressLine, progress_line
from holdfast.api.snapshots.preflight import preflight_offline
from holdfast.barriers.jobgraph import Submission
from holdfast.operators.datastream.pipelines import build_environment, load_function
from holdfast.statebackends.state_processor.progress import Work, noted
from tests.statebackends.snapshot_harness import SOME, write


def test_the_line_says_what_rows_bytes_and_time() -> None:
    assert progress_line("diff", 1_310_720, 88_290_000, "totals.count", 12_000) == (
        "holdfast: diff: totals.count, 1,310,720 rows, 84.2 MiB read, 12.0 s"
    )
    assert progress_line("fsck", 0, 0, "", 3_000) == "holdfast: fsck: 3.0 s"
    hostile = progress_line("edit", 5, 0, "\x1b[2J" + "x" * 300, 3_000)
    assert len(hostile) <= 100
    assert hostile.endswith("..., 5 rows, 3.0 s")
    assert "\x1b" not in hostile


def test_nothing_is_shown_before_two_seconds_or_after_the_end() -> None:
    now = [0]
    stream = io.StringIO()
    line = ProgressLine("diff", stream, clock_ms=lambda: now[0])
    with noted(line.work):
        line.work.add(7, 0, "a.b")
        now[0] = 1_999
        line.tick()
        assert stream.getvalue() == ""
        now[0] = 2_000
        line.tick()
        assert stream.getvalue() == "\r\x1b[Kholdfast: diff: a.b, 7 rows, 2.0 s"
        line.end()
        line.end()
        line.tick()
        assert stream.getvalue() == "\r\x1b[Kholdfast: diff: a.b, 7 rows, 2.0 s\r\x1b[K"


def test_a_short_tool_ends_without_a_word() -> None:
    stream = io.StringIO()
    line = ProgressLine("diff", stream, clock_ms=lambda: 0)
    line.tick()
    line.end()
    assert stream.getvalue() == ""


def test_the_line_is_taken_back_before_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("diff", sys.stdout, clock_ms=lambda: 5_000, silent_ms=0)
    with console.before_output(line.end):
        line.tick()
        console.show_line("same")
    assert capsys.readouterr().out == "\r\x1b[Kholdfast: diff: 0 ms\r\x1b[Ksame\n"


def test_the_line_is_taken_back_before_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("diff", sys.stderr, clock_ms=lambda: 5_000, silent_ms=0)
    with console.before_output(line.end):
        line.tick()
        console.show_note("seen")
    assert capsys.readouterr().err == "\r\x1b[Kholdfast: diff: 0 ms\r\x1b[Kholdfast: seen\n"


def test_a_terminal_that_is_gone_ends_the_line_and_not_the_tool() -> None:
    stream = io.StringIO()
    line = ProgressLine("diff", stream, clock_ms=lambda: 0, silent_ms=0)
    stream.close()
    line.tick()
    line.tick()
    line.end()


_TOOL = """
import sys
from holdfast.api.cli import progress
progress.SILENT_MS, progress._INTERVAL_MS = 0, 1
from holdfast import main
sys.argv = ["holdfast", *sys.argv[1:]]
main()
"""


def on_terminal(*arguments: str) -> tuple[str, str]:
    """(stdout, what came to the terminal that stderr is) of a tool that takes so long that it shows how far it is."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", _TOOL, *arguments], stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            try:
                piece = os.read(master, 4_096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        out, _ = process.communicate(timeout=60)
    finally:
        os.close(master)
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0, (out, shown)
    return out, shown.decode()


@pytest.mark.parametrize(
    "tool", ["verify", "edit", *(pytest.param(tool, marks=pytest.mark.endurance) for tool in ("export", "copy"))]
)
def test_every_tool_shows_it_on_a_terminal_and_never_with_json(tmp_path: Path, tool: str) -> None:
    location = write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location
    more = {"verify": [], "edit": ["--rename-operator", "totals=sums"]}
    targets = [] if tool == "verify" else [str(tmp_path / "a")]
    out, shown = on_terminal("snapshot", tool, location, *targets, *more.get(tool, []))
    assert f"\r\x1b[Kholdfast: {tool}: " in shown
    assert shown.endswith("\r\x1b[K")
    assert out
    targets = [] if tool == "verify" else [str(tmp_path / "b")]
    _, shown = on_terminal("snapshot", tool, location, *targets, *more.get(tool, []), "--json")
    assert shown == ""


_JOB = """
import pyarrow as pa
import holdfast as hf

def job(env):
    schema = pa.schema([("user", pa.string())])
    rows = env.from_source(hf.GeneratorSource(lambda numbers: pa.RecordBatch.from_pydict({}), 1, schema)).uid("rows")
    states = [hf.ValueStateDescriptor("n", int)]
    rows.key_by("user").process(lambda value, ctx, out: None, states=states).uid("totals").sink_to(hf.Blackhole()).uid("out")
"""


def test_a_preflight_shows_what_it_reads_and_nothing_with_json(tmp_path: Path) -> None:
    rows = pa.table({"key": [f"user-{number}" for number in range(300_000)], "value": range(300_000)})
    savepoint = hf.Savepoint.create(max_parallelism=128).with_state("totals", hf.ValueStateDescriptor("n", int), rows)
    location = savepoint.write(tmp_path / "savepoint").location
    (tmp_path / "mine.py").write_text(_JOB)
    out, shown = on_terminal("preflight", location, f"{tmp_path}/mine.py:job")
    assert out.endswith("fits\n")
    assert "\r\x1b[Kholdfast: preflight: " in shown
    assert shown.endswith("\r\x1b[K")
    _, shown = on_terminal("preflight", location, f"{tmp_path}/mine.py:job", "--json")
    assert shown == ""
    work = Work()
    with noted(work):
        environment = build_environment(load_function(f"{tmp_path}/mine.py:job", "job")[0], "mine.py:job", "job", parallelism=None)
        assert preflight_offline(Submission(environment.build().graph, restore=location), None).fits
    assert work.size >= sum(path.stat().st_size for path in Path(location).iterdir())


def test_nothing_is_shown_where_stderr_is_no_terminal(tmp_path: Path) -> None:
    location = write(tmp_path, "savepoint-7", SOME, canonical=True).location
    done = subprocess.run([sys.executable, "-c", _TOOL, "snapshot", "verify", location], capture_output=True, text=True, check=True)
    assert done.stderr == ""
