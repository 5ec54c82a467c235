"""Ctrl-C at any moment of a tool: exit code 130, no target left, and nobody's function blamed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from holdfast.api.cli.interrupts import EXIT_INTERRUPTED, interruptible
from holdfast.api.cli.main import app
from holdfast.statebackends.storage.directory import LocalStorage
from tests.examples import FACTOR
from tests.statebackends.snapshot_harness import SOME, UID, files_below, write

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""An interrupt within a callback of the garbage collector is lost there: the command counts as interrupted all the same."""

runner = CliRunner()
STEP = 7 if FACTOR == 1 else 3
"""Moments from one interrupt to the next."""
FUNCTIONS = f"""
import os, signal
import pyarrow as pa
import holdfast as hf

def same(batch):
    return batch

def interrupting(batch):
    os.kill(os.getpid(), signal.SIGINT)
    return batch

def translating(batch):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
    except KeyboardInterrupt:
        raise RuntimeError("Query interrupted")     # as databases have it

swallowed = []

def swallowing(batch):
    try:
        while not swallowed:
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        swallowed.append(True)
    return batch

def twice(batch):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
    finally:
        os.kill(os.getpid(), signal.SIGINT)

def history(savepoint):
    rows = pa.table({{"key": ["a"], "value": [1]}})
    return savepoint.with_state({UID!r}, hf.ValueStateDescriptor("count", int), rows)
"""


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return Path(write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location)


def commands(savepoint: Path, target: Path, function: str = "same") -> dict[str, list[str]]:
    functions = savepoint.parent.parent / "functions.py"
    edit = ["edit", str(savepoint), str(target), "--uid", UID, "--state", "count", "--function", f"{functions}:{function}"]
    return {
        "copy": ["copy", str(savepoint), str(target)],
        "export": ["export", str(savepoint), str(target)],
        "edit": edit,
        "bootstrap": ["bootstrap", str(target), "--function", f"{functions}:history", "--max-parallelism", "8"],
        "diff": ["diff", str(savepoint), str(savepoint)],
        "verify": ["verify", str(savepoint)],
    }


@pytest.fixture(autouse=True)
def python_s_own_handler() -> Iterator[None]:
    """As in a process of its own: PySpark leaves its handler in the one that the tests share."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """An interrupt comes right before (even numbers) or after (odd ones) an operation on storage of a number."""
    moment = {"count": 0, "at": -1}
    original = LocalStorage.execute

    def execute(self: LocalStorage, operation: Any) -> Any:
        for after in (False, True):
            moment["count"] += 1
            if moment["count"] - 1 == moment["at"]:
                os.kill(os.getpid(), signal.SIGINT)
            if not after:
                result = original(self, operation)
        return result

    monkeypatch.setattr(LocalStorage, "execute", execute)
    return moment


COMMANDS = ("copy", "export", "edit", "bootstrap", "diff", "verify")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_at_any_operation_leaves_nothing(savepoint: Path, tmp_path: Path, at: dict[str, int], name: str) -> None:
    """The step is odd: moments before operations and behind them are met in turn. Each command starts at a moment of its own."""
    before = files_below(savepoint)
    first = COMMANDS.index(name) % STEP
    for moment in itertools.count(first, STEP):
        at.update(count=0, at=moment)
        target = tmp_path / "targets" / f"t{moment}"
        result = runner.invoke(app, ["snapshot", *commands(savepoint, target)[name]])
        if at["count"] <= moment:
            assert result.exit_code == 0, result.output
            assert moment > first
            break
        assert result.exit_code == EXIT_INTERRUPTED, (moment, result.output, result.exception)
        assert not target.exists(), (moment, files_below(target))
        assert result.stderr == ""
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert files_below(savepoint) == before


@pytest.mark.parametrize("function", ["interrupting", "translating", "swallowing", "twice"])
def test_an_interrupt_in_a_users_function_is_not_its_fault(savepoint: Path, tmp_path: Path, function: str) -> None:
    target = tmp_path / "edited"
    result = runner.invoke(app, ["snapshot", *commands(savepoint, target, function)["edit"]])
    assert result.exit_code == EXIT_INTERRUPTED
    assert result.stdout == result.stderr == ""
    assert not target.exists()


def test_what_earlier_commands_of_a_process_wrote_stays(savepoint: Path, tmp_path: Path) -> None:
    assert runner.invoke(app, ["snapshot", *commands(savepoint, tmp_path / "first")["copy"]]).exit_code == 0
    result = runner.invoke(app, ["snapshot", *commands(savepoint, tmp_path / "second", "interrupting")["edit"]])
    assert result.exit_code == EXIT_INTERRUPTED
    assert (tmp_path / "first/_metadata").exists()
    assert not (tmp_path / "second").exists()


def test_a_target_that_was_in_use_is_not_deleted(savepoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "used"
    target.mkdir()
    (target / "mine").write_text("mine")
    assert runner.invoke(app, ["snapshot", *commands(savepoint, target)["copy"]]).exit_code == 2
    assert (target / "mine").read_text() == "mine"


@pytest.mark.timeout(60)
def test_a_process_that_is_interrupted_while_it_starts(savepoint: Path, tmp_path: Path) -> None:
    """As soon as our own code runs: while modules are imported."""
    code = (
        "import os, signal, sys, holdfast\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'holdfast.api.cli.snapshots': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['holdfast', 'snapshot', 'verify', {str(savepoint)!r}]\n"
        "holdfast.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (EXIT_INTERRUPTED, "", "")


def test_a_key_that_is_held_down_ends_the_command_all_the_same() -> None:
    """Pressed again between the end of the block and the first line behind it, it came through as a KeyboardInterrupt."""
    pressed: list[str] = []

    def press(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name in ("__exit__", "interruptible", "_clean_up") and signal.getsignal(signal.SIGINT) is not before:
            pressed.append(frame.f_code.co_name)
            signal.raise_signal(signal.SIGINT)
        return press

    def hold_down(tracer: Any) -> None:
        with interruptible():
            sys.settrace(tracer)
            signal.raise_signal(signal.SIGINT)

    before, traced = signal.getsignal(signal.SIGINT), sys.gettrace()
    try:
        with pytest.raises(typer.Exit) as ended:
            hold_down(press)
    finally:
        sys.settrace(traced)
    assert ended.value.exit_code == EXIT_INTERRUPTED
    assert {"__exit__", "_clean_up"} <= set(pressed)
    assert signal.getsignal(signal.SIGINT) is before
