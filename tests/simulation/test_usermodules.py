"""Modules and classes of simulated processes: each has its own, and the interpreter has its own again behind them."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.chaos.pipelines.modules import IDENTITY, TRACKED, UserModules, running
from holdfast.chaos.pipelines.undeclared import changed, memory_of
from holdfast.chaos.sim.kernel import Kernel, Process, Streams, Trace
from holdfast.operators.base import JobPlan
from holdfast.operators.pickling import dumps_by_value

NAME = "module_of_a_user"
SOURCE = """
import enum

SEEN = []

class Colour(enum.Enum):
    RED = 1

class Total:
    counts = {}

    def add(self, key):
        self.counts[key] = self.counts.get(key, 0) + 1
        SEEN.append(key)
        return self.counts[key]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    (tmp_path / "late_module_of_a_user.py").write_text("SEEN = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = __import__(NAME)
    cloudpickle.register_pickle_by_value(loaded)
    yield loaded
    cloudpickle.unregister_pickle_by_value(loaded)
    for name in (NAME, "late_module_of_a_user"):
        sys.modules.pop(name, None)


def plan_of(**operators: object) -> bytes:
    return dumps_by_value(JobPlan(JobGraph("job", (), (), JobConfig()), operators, {}, {}, {}))  # type: ignore[arg-type]


def test_cloudpickle_has_the_names_that_are_relied_upon() -> None:
    import inspect

    for name in TRACKED:
        assert IDENTITY in inspect.signature(getattr(cloudpickle.cloudpickle, name)).parameters


def test_each_process_has_classes_of_its_own_and_keeps_them(module: types.ModuleType) -> None:
    plan = plan_of(total=module.Total(), red=module.Colour.RED)
    one, other = UserModules(frozenset({NAME})), UserModules(frozenset({NAME}))
    first, again, second = one.load(plan).operators, one.load(plan).operators, other.load(plan).operators
    kinds = [type(found["total"]) for found in (first, again, second)]
    assert kinds[0] is kinds[1]
    assert len({*kinds, module.Total}) == 3
    assert type(first["red"]) is type(again["red"]) is not type(second["red"])
    assert isinstance(first["total"], kinds[1])


def test_a_process_keeps_its_classes_where_no_deployment_has_them(module: types.ModuleType) -> None:
    """Else what a class holds would be lost as garbage is collected, and a run would depend on when."""
    plan = plan_of(total=module.Total())
    one = UserModules(frozenset({NAME}))
    type(one.load(plan).operators["total"]).later = 1  # type: ignore[attr-defined]
    gc.collect()
    assert type(one.load(plan).operators["total"]).later == 1  # type: ignore[attr-defined]


def test_what_a_class_and_a_global_hold_is_seen_by_no_other_process(module: types.ModuleType) -> None:
    plan = plan_of(total=module.Total())
    one, other = (UserModules(frozenset({NAME})).load(plan).operators["total"] for _ in range(2))
    assert [one.add("a"), one.add("a"), other.add("a")] == [1, 2, 1]  # type: ignore[attr-defined]
    assert (module.Total.counts, module.SEEN) == ({}, [])


def test_an_import_gives_a_process_its_own_module(module: types.ModuleType) -> None:
    one, other = UserModules(frozenset({NAME})), UserModules(frozenset({NAME}))

    def note(name: str, what: str) -> list[str]:
        seen: list[str] = __import__(name).SEEN
        seen.append(what)
        return list(seen)

    for name in (NAME, "late_module_of_a_user"):  # that the simulating program has imported, and one that it has not
        with running(one):
            assert note(name, "a") == ["a"]
        with running(other):
            assert note(name, "b") == ["b"]
        with running(one):
            assert note(name, "c") == ["a", "c"]
    assert sys.modules[NAME] is module
    assert module.SEEN == []
    assert "late_module_of_a_user" not in sys.modules


def test_a_module_stays_with_its_process_also_where_another_one_was_dropped(module: types.ModuleType) -> None:
    """As many modules as before are not the same ones."""
    one, other = UserModules(frozenset({NAME})), UserModules(frozenset({NAME}))
    sys.modules["dropped_by_a_user"] = types.ModuleType("dropped_by_a_user")
    with running(one):
        del sys.modules["dropped_by_a_user"]
        late = __import__("late_module_of_a_user")
    assert "late_module_of_a_user" not in sys.modules
    with running(other):
        assert __import__("late_module_of_a_user") is not late
    with running(one):
        assert __import__("late_module_of_a_user") is late


def test_who_simulates_runs_with_its_own_modules_in_the_middle_of_a_process(module: types.ModuleType) -> None:
    one, other = UserModules(frozenset({NAME})), UserModules(frozenset({NAME}))
    with running(one):
        own = __import__(NAME)
        with running(None):
            assert __import__(NAME) is module
            with running(other):
                assert __import__(NAME) not in (own, module)
            assert __import__(NAME) is module
        assert __import__(NAME) is own
    assert __import__(NAME) is module


def test_an_error_leaves_the_interpreter_as_it_was(module: types.ModuleType) -> None:
    def fail() -> None:
        with running(UserModules(frozenset({NAME}))):
            __import__(NAME)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sys.modules[NAME] is module


def test_an_event_of_a_process_sees_its_modules_and_one_of_nobody_does_not(module: types.ModuleType) -> None:
    streams = Streams(0)
    kernel = Kernel(streams, Trace(lambda: 0))
    process = Process("worker-0.1", "worker", modules=UserModules(frozenset({NAME})))
    seen: list[types.ModuleType] = []
    kernel.after(0, lambda: seen.append(__import__(NAME)), process)
    kernel.after(1, lambda: seen.append(__import__(NAME)))
    assert kernel.step()
    assert kernel.step()
    assert seen[0] is not module
    assert seen[1] is module


class _Operator:
    """As much of an operator as is looked at."""

    def __init__(self, function: object) -> None:
        self.function = function


def test_what_changed_in_memory_is_named_and_what_did_not_is_not(module: types.ModuleType) -> None:
    function = module.Total()
    function.limits, function.handle = {"a": 1}, open
    operator = _Operator(function)

    def look() -> dict[str, bytes]:
        return memory_of(operator, {}, frozenset({NAME}))  # type: ignore[arg-type]

    before = look()
    assert {"self.limits", "Total.counts", "SEEN"} <= set(before)
    assert "self.handle" not in before
    assert changed(before, look()) == []
    function.add("a")
    assert changed(before, look()) == ["SEEN", "Total.counts"]
