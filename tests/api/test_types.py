"""What a type checker says of a user's job, with Holdfast installed from its wheel as a user has it."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import msgspec
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import JobConfig
from holdfast.operators.datastream.settings import Settings
from tests.harness.installed import installed_once

ROOT = Path(hf.__file__).parent.parent
JOBS = Path(__file__).parent / "typed"
UNSEEN = ("IPython", "anyio", "click", "fastapi", "opentelemetry", "prometheus_client", "pydantic", "rich", "starlette", "tornado")
"""Packages of Holdfast's own service and of what shows progress: nothing that a job is written with has a type of theirs, and mypy
reads a thousand files of them."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, and the packages that it needs."""
    return installed_once(tmp_path_factory).python


def _found(python: Path, job: str, folder: Path) -> tuple[set[tuple[int, str]], str]:
    """(line, code) of each error in a job, and all that mypy printed."""
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(f'{name}.*' for name in UNSEEN)}]\nfollow_imports = skip\n")
    flags = ["--strict", "--python-executable", str(python), "--cache-dir", str(folder / "cache"), "--no-pretty"]
    shutil.copy(JOBS / job, folder / job)
    done = subprocess.run([sys.executable, "-m", "mypy", *flags, job], cwd=folder, capture_output=True, text=True, check=False)
    errors = re.findall(rf"^{re.escape(job)}:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    return {(int(line), code) for line, code in errors}, done.stdout + done.stderr


@pytest.mark.slow
def test_a_right_job_has_no_errors_and_each_planted_mistake_is_found(installed: Path, tmp_path: Path) -> None:
    found, said = _found(installed, "job.py", tmp_path)
    assert found == set(), said
    assert "Success" in said
    planted = {
        (number, line.rpartition("# E: ")[2])
        for number, line in enumerate((JOBS / "mistakes.py").read_text().splitlines(), 1)
        if "# E: " in line
    }
    assert len(planted) > 30
    found, said = _found(installed, "mistakes.py", tmp_path)
    assert found == planted, said


def test_the_package_says_that_its_annotations_can_be_believed() -> None:
    """Type checkers look for it in the top package alone (PEP 561)."""
    assert (ROOT / "holdfast" / "py.typed").is_file()


def _plain(annotation: typing.Any) -> typing.Any:
    """A choice of texts is text to JobConfig, which checks it; beside another type it is a name of one of that."""
    if typing.get_origin(annotation) is typing.Literal:
        return str
    others = [each for each in typing.get_args(annotation) if typing.get_origin(each) is not typing.Literal]
    return others[0] if len(others) == 1 else annotation


def test_the_keywords_of_an_environment_are_the_settings_of_a_job() -> None:
    declared = {name: _plain(annotation) for name, annotation in typing.get_type_hints(Settings).items()}
    assert declared == typing.get_type_hints(JobConfig)


def test_help_shows_each_setting_with_its_default() -> None:
    shown = inspect.signature(hf.Environment).parameters
    for field in msgspec.structs.fields(JobConfig):
        assert shown[field.name].default == field.default
    assert {"name", "parallelism", "coordinator", "token", "state_dir"} <= set(shown)


def test_the_docstring_of_environment_tells_each_setting_and_its_default() -> None:
    told = dict(re.findall(r"^ +(\w+) \((.*?)\): \S", hf.Environment.__doc__ or "", re.MULTILINE))
    told["restart"] = told["restart"].rstrip(")") + ")"
    for field in msgspec.structs.fields(JobConfig):
        default = repr(field.default).replace("'", '"')
        assert told.get(field.name) == ("RestartStrategy()" if field.name == "restart" else default), field.name
