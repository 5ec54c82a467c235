"""`import holdfast as hf`: cheap, complete, and the only name that Holdfast has."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from pyspark.errors import PySparkRuntimeError

import holdfast as hf
from holdfast.api.errors import decode_error, encode_error
from holdfast.statebackends.errors import InvalidConfigError

ROOT = Path(hf.__file__).parent.parent


def test_every_name_is_found() -> None:
    for name in hf.__all__:
        assert getattr(hf, name) is not None
    assert hf.__version__
    assert set(hf.__all__) <= set(dir(hf))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(hf.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found = {(node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    seen = found - {("holdfast", package) for package in hf._PACKAGES_SHOWN}
    exported = {(module, name) for module, names in hf._EXPORTS.items() for name in names if name != "VERSION"}
    assert seen == exported


def test_what_the_documentation_names_is_there() -> None:
    """Errors to be caught, and descriptors to be given: by `hf.` alone."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    of_the_protocol_alone = {"ObjectMissingError"}
    of_others = {"ArrowMemoryError", "AssertionError", "KeyError", "OSError", "ValueError"}
    named = set(re.findall(r"\b\w+(?:Error|StateDescriptor)\b", pages)) - of_the_protocol_alone - of_others
    assert named <= set(hf.__all__)
    assert {"OperatorListStateDescriptor", "Redistribution", "ColumnarStateDescriptor", "ColumnAggregate"} <= set(hf.__all__)


@pytest.mark.parametrize(
    "name", ["BodyTooLargeError", "BusyError", "ConnectionLostError", "NotLeaderError", "RecoveringError", "RemoteError"]
)
def test_what_a_coordinator_answers_a_driver_with_is_caught_by_its_name(name: str) -> None:
    """Any call of JobHandle, and `execute()`, may raise it once its patience is over."""
    answer = encode_error(getattr(hf, name)("no"))
    with pytest.raises(getattr(hf, name)):
        raise decode_error(answer.status, answer.body, answer.headers)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf.nothing


def test_importing_loads_nothing_else() -> None:
    program = "import sys, holdfast; print([name for name in sys.modules if name.startswith('holdfast.')])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_workers_use_loads_neither_api_nor_coordinator() -> None:
    program = (
        "import sys, holdfast as hf\n"
        "hf.ProcessFunction, hf.ValueStateDescriptor, hf.Tumbling, hf.count, hf.HoldfastError\n"
        "others = ('holdfast.api', 'holdfast.coordinator', 'fastapi', 'pyspark')\n"
        "print([name for name in sys.modules if name.startswith(others)])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_python_m_holdfast_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "holdfast", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("holdfast ")


def test_an_environment_without_a_session_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_active() -> None:
        raise PySparkRuntimeError(errorClass="NO_ACTIVE_OR_DEFAULT_SESSION", messageParameters={})

    sql = importlib.import_module("pyspark.sql")
    monkeypatch.setattr(sql.SparkSession, "active", staticmethod(none_is_active))
    env = hf.Environment("job")
    assert env.launcher is not None
    with pytest.raises(InvalidConfigError, match="SparkSession"):
        env.launcher.launch(types.SimpleNamespace(sources={}), None)  # type: ignore[arg-type]
