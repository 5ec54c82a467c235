"""Processes of a benchmark that say nothing, or die, are named: a benchmark never waits for one without a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.harness import ProcessFailedError, end, first_line, last_words


@contextmanager
def shell(script: str, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    with errors.open("wb") as told:
        process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_follows_the_first_line_is_left_for_the_end(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with shell("echo begun; echo more; cat; echo end", errors) as process:
        assert first_line(process, "it", 10, errors) == b"begun\n"
        assert last_words(process, "it", 10, errors) == b"more\nend\n"


@pytest.mark.parametrize("script", ["exec sleep 60", "printf half; exec sleep 60"])
def test_a_process_without_a_line_is_named_when_the_time_is_up(script: str, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    says_nothing = pytest.raises(ProcessFailedError, match=r"the flood: said nothing within 0.05 s")
    with shell(script, errors) as process, says_nothing:
        first_line(process, "the flood", 0.05, errors)


def test_a_process_that_dies_is_named_with_its_last_error(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    is_named = pytest.raises(ProcessFailedError, match=r"the flood: died \(exit code 3\): no such port")
    with shell("echo no such port >&2; exit 3", errors) as process, is_named:
        first_line(process, "the flood", 10, errors)
    with shell("echo begun; cat; echo too late >&2; exit 4", errors) as process:
        first_line(process, "the flood", 10, errors)
        with pytest.raises(ProcessFailedError, match=r"the flood: died \(exit code 4\): too late"):
            last_words(process, "the flood", 10, errors)


def test_a_process_that_does_not_end_is_named_and_can_be_ended(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with shell("trap '' TERM; echo begun; exec sleep 60", errors) as process:
        first_line(process, "the flood", 10, errors)
        with pytest.raises(ProcessFailedError, match=r"the flood: not ended within 0.05 s"):
            last_words(process, "the flood", 0.05, errors)
        end(process, 0.05)
        assert process.returncode == -9
