"""The user's code in one simulated process: modules and classes of its own, which die with it.

All processes of a run share one interpreter, in which cloudpickle returns the class that was pickled, and `import` an existing
module: what a function keeps in a class or a module would outlive every crash. Here each process unpickles classes of its own and
imports the user's modules again; installed packages and Python's own modules are shared."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import cloudpickle

from holdfast.operators.base import JobPlan
from holdfast.operators.spark.packaging import is_user_module

TRACKED = ("_make_skeleton_class", "_make_skeleton_enum", "_make_typevar")
"""Functions that cloudpickle calls to rebuild what it pickled by value, once for each identity."""
IDENTITY = "class_tracker_id"
"""Their parameter that holds the identity."""

_numbers = itertools.count(1)
"""Numbers of processes, over all runs of this interpreter, so that no process shares an identity with one of an earlier run."""


class UserModules:
    """The user's modules and classes in one process. Only code inside of its `running` block sees them."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: modules that are the user's, as this interpreter has imported them."""
        self.names = names
        self._modules: dict[str, ModuleType] = {}
        self._number = next(_numbers)
        # cloudpickle knows them weakly: a class between two deployments would be the same one until the next collection of garbage
        self._rebuilt: dict[str, Any] = {}

    def load(self, plan: bytes) -> JobPlan:
        """The plan with classes of this process, the same ones for each call. Raises as unpickling does."""
        loaded = _Unpickler(io.BytesIO(plan), f"{self._number}/", self._rebuilt).load()
        assert isinstance(loaded, JobPlan)
        return loaded

    @property
    def imported(self) -> dict[str, ModuleType]:
        """The user's modules that this process has imported by name."""
        return {**self._modules, **{name: sys.modules[name] for name in self.names if name in sys.modules}}

    def enter(self) -> dict[str, ModuleType]:
        """Install this process's modules in the interpreter; returns the ones that were there."""
        kept = {name: module for name in self.names if (module := sys.modules.pop(name, None)) is not None}
        sys.modules.update(self._modules)
        return kept

    def leave(self, kept: dict[str, ModuleType], known: tuple[str, ...]) -> None:
        """Remove them, with those imported meanwhile: `known` are the modules when this process had entered."""
        same = len(sys.modules) == len(known) and next(reversed(sys.modules)) == known[-1]  # new modules stand at the end
        imported = () if same else sys.modules.keys() - set(known)
        fresh = {name for name in imported if name in self.names or is_user_module(name, sys.modules[name])}
        for name in (*self._modules, *fresh):
            module = sys.modules.pop(name, None)
            if module is not None:
                self._modules[name] = module
        sys.modules.update(kept)


_current: UserModules | None = None


@contextlib.contextmanager
def running(modules: UserModules | None) -> Iterator[None]:
    """Run code of a process, or (None) of the simulator, within the block. Blocks may be nested."""
    global _current
    before = _current
    if modules is before:
        yield
        return
    with _absent(before), _present(modules):
        _current = modules
        try:
            yield
        finally:
            _current = before


_names: tuple[str, ...] = ("",)


def _imported() -> tuple[str, ...]:
    """Names of all modules, in the order of import: the same tuple while their number and the newest of them are.

    There are thousands, and a turn of a process imports none as a rule."""
    global _names
    if len(_names) != len(sys.modules) or _names[-1] != next(reversed(sys.modules)):
        _names = tuple(sys.modules)
    return _names


_entered: list[tuple[dict[str, ModuleType], tuple[str, ...]]] = []
"""(result of `enter` of the current process, modules at that time in the order of import), innermost last."""


@contextlib.contextmanager
def _present(modules: UserModules | None) -> Iterator[None]:
    if modules is None:
        yield
        return
    kept = modules.enter()
    _entered.append((kept, _imported()))
    try:
        yield
    finally:
        modules.leave(*_entered.pop())


@contextlib.contextmanager
def _absent(modules: UserModules | None) -> Iterator[None]:
    """Undo `enter` within the block."""
    if modules is None:
        yield
        return
    modules.leave(*_entered.pop())
    try:
        yield
    finally:
        kept = modules.enter()
        _entered.append((kept, _imported()))


class _Unpickler(pickle.Unpickler):
    """Rebuilds objects with identities of this process, which are kept in `rebuilt`."""

    def __init__(self, file: io.BytesIO, prefix: str, rebuilt: dict[str, Any]) -> None:
        super().__init__(file)
        self._prefix = prefix
        self._rebuilt = rebuilt

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name in TRACKED and module.partition(".")[0] == cloudpickle.__name__:
            return self._with_prefix(found)
        return found

    def _with_prefix(self, make: Callable[..., Any]) -> Callable[..., Any]:
        place = list(inspect.signature(make).parameters).index(IDENTITY)

        def made(*arguments: Any) -> Any:
            if arguments[place] is None:
                return make(*arguments)
            identity = f"{self._prefix}{arguments[place]}"
            rebuilt = make(*arguments[:place], identity, *arguments[place + 1 :])
            self._rebuilt[identity] = rebuilt
            return rebuilt

        return made


class _Files(MetaPathFinder):
    """Finds modules of files whose names no search of a path would find."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        location = self.paths.get(fullname)
        return None if location is None else importlib.util.spec_from_file_location(fullname, location)


_files = _Files()


def importable(module: ModuleType) -> None:
    """Let a process import the module of a file again, whatever its name."""
    if module.__file__ is not None:
        _files.paths[module.__name__] = module.__file__
    if _files not in sys.meta_path:
        sys.meta_path.append(_files)
