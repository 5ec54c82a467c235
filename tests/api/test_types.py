"""What a type checker says of a user's job, with Holdfast installed from its wheel as a user has it."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import typing
import zipfile
from pathlib import Path

import msgspec
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import JobConfig
from holdfast.operators.datastream.settings import Settings

ROOT = Path(hf.__file__).parent.parent
JOBS = Path(__file__).parent / "typed"
UNSEEN = ("IPython", "anyio", "click", "fastapi", "opentelemetry", "prometheus_client", "pydantic", "rich", "starlette", "tornado")
"""Packages of Holdfast's own service and of what shows progress: nothing that a job is written with has a type of theirs, and mypy
reads a thousand files of them."""


def _build_wheel(folder: Path) -> Path:
    """Of a copy, since setuptools leaves its work where it builds."""
    source = folder / "source"
    packages = ("statebackends", "barriers", "operators", "coordinator", "api", "chaos", "holdfast")
    for name in packages:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has this wheel, and the packages that it needs."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = _build_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(packages)
    # Entries of this one are not read for `.pth` files: the checkout itself is not on the path.
    (packages / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv" / "bin" / "python"


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
