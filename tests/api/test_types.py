"""What a type checker says of a user's job, with Holdfast installed from its wheel as a user has it."""

from __future__ import annotations

import inspect
import os
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


def _found(python: Path, folder: Path, *jobs: str) -> tuple[dict[str, set[tuple[int, str]]], str]:
    """By job (line, code) of each error, and all that mypy printed. One run reads all jobs, as most of its time goes to what they
    import, and keeps nothing for another run."""
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(f'{name}.*' for name in UNSEEN)}]\nfollow_imports = skip\n")
    flags = ["--strict", "--python-executable", str(python), "--cache-dir", os.devnull, "--no-pretty"]
    for job in jobs:
        shutil.copy(JOBS / job, folder / job)
    done = subprocess.run([sys.executable, "-m", "mypy", *flags, *jobs], cwd=folder, capture_output=True, text=True, check=False)
    found: dict[str, set[tuple[int, str]]] = {job: set() for job in jobs}
    for file, line, code in re.findall(r"^(\S+?):(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE):
        found.setdefault(file, set()).add((int(line), code))
    return found, done.stdout + done.stderr


@pytest.mark.slow
def test_a_right_job_has_no_errors_and_each_planted_mistake_is_found(installed: Path, tmp_path: Path) -> None:
    planted = {
        (number, line.rpartition("# E: ")[2])
        for number, line in enumerate((JOBS / "mistakes.py").read_text().splitlines(), 1)
        if "# E: " in line
    }
    assert len(planted) > 30
    found, said = _found(installed, tmp_path, "job.py", "mistakes.py")
    assert found == {"job.py": set(), "mistakes.py": planted}, said
    assert "in 1 file (checked 2 source files)" in said


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
