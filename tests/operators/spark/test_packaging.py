from __future__ import annotations

import subprocess
import sys
import types
import zipfile
from pathlib import Path

import cloudpickle
import pytest

from holdfast.operators.spark.packaging import build_package, modules_by_value, user_modules, write_package


def test_the_package_is_compiled_complete_and_reproducible(tmp_path: Path) -> None:
    path = write_package(tmp_path)
    assert write_package(tmp_path) == path
    assert build_package() == build_package()
    names = zipfile.ZipFile(path).namelist()
    modules = ("operators/spark/slots", "barriers/elements", "statebackends/storage/directory", "__init__", "operators/__init__")
    assert {f"holdfast/{name}.pyc" for name in modules} <= set(names)
    assert all(name.startswith("holdfast/") and name.endswith(".pyc") for name in names)
    assert not any(name.startswith(("holdfast/api", "holdfast/coordinator")) for name in names)
    declarations = {"holdfast/chaos/__init__.pyc", "holdfast/chaos/expectations.pyc"}
    assert {name for name in names if name.startswith("holdfast/chaos")} == declarations


def test_a_bare_interpreter_runs_from_the_zip(tmp_path: Path) -> None:
    path = write_package(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(path)!r}); import holdfast.operators.spark.slots as t; print(t.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{path}/holdfast/operators/spark/slots.pyc"


def test_a_module_that_says_what_the_simulator_must_find_can_be_imported_on_an_executor(tmp_path: Path) -> None:
    path = write_package(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(path)!r}); import holdfast as hf\n"
        "hf.chaos.expect(last_value_per_key='key')\n"
        "print(sorted(name for name in sys.modules if name.startswith(('holdfast.chaos', 'holdfast.api', 'holdfast.coordinator'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['holdfast.chaos', 'holdfast.chaos.expectations']"


def test_blocks_of_several_threads_end_in_any_order_and_leave_what_the_user_registered() -> None:
    mine, both = types.ModuleType("mine_of_packaging"), types.ModuleType("both_of_packaging")
    before = cloudpickle.list_registry_pickle_by_value()
    names = {mine.__name__, both.__name__}
    with pytest.MonkeyPatch.context() as patch:
        for module in (mine, both):
            patch.setitem(sys.modules, module.__name__, module)
        cloudpickle.register_pickle_by_value(mine)
        first, second = modules_by_value([mine, both]), modules_by_value([both, both])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert names <= cloudpickle.list_registry_pickle_by_value(), "the other block still pickles"
        second.__exit__(None, None, None)
        assert cloudpickle.list_registry_pickle_by_value() == before | {mine.__name__}
        cloudpickle.unregister_pickle_by_value(mine)


def test_a_module_that_can_not_be_registered_leaves_no_other_registered() -> None:
    mine, gone = types.ModuleType("mine_of_packaging"), types.ModuleType("gone_of_packaging")
    before = cloudpickle.list_registry_pickle_by_value()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, mine.__name__, mine)
        with pytest.raises(ValueError, match="gone_of_packaging"), modules_by_value([mine, gone]):
            pass
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_modules_of_the_user_travel_by_value_and_ours_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text("FACTOR = 3\ndef triple(x):\n    return FACTOR * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rules  # type: ignore[import-not-found]

    found = {module.__name__ for module in user_modules()}
    assert "my_rules" in found
    assert not {"holdfast.operators.spark.packaging", "numpy", "json", "pyarrow"} & found
    before = cloudpickle.list_registry_pickle_by_value()
    with modules_by_value(user_modules()):
        data = cloudpickle.dumps(my_rules.triple)
    assert cloudpickle.list_registry_pickle_by_value() == before
    code = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read())(14))"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", input=data, capture_output=True, check=True)
    assert done.stdout.strip() == b"42"
