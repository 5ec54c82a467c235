"""A user's pipeline by name, `FILE.py:function` or `module:function`, for tools that need a job and do not run it.

The function gets an Environment and builds its job on it; it may change settings (`env.parallelism`, `env.config`), or return an
Environment of its own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.operators.datastream.environment import Environment
from holdfast.statebackends.errors import InvalidConfigError


def load_function(name: str, what: str, *, takes: str = "the Environment") -> tuple[Callable[[Any], Any], ModuleType]:
    """Load the function that builds the pipeline, and its module. Errors mention `what` it is for and what it `takes`.

    Raises InvalidConfigError: no such file, module or function, or one that can't be called with one argument."""
    where, _, function_name = name.rpartition(":")
    if not where:
        raise refused(name, what, "name a function as FILE.py:function or module:function")
    module = _module(where, name, what)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise refused(name, what, f"{where} has no function {function_name!r}")
    try:
        inspect.signature(function).bind(object())
    except (TypeError, ValueError) as error:
        raise refused(name, what, f"the function must take one argument, {takes}: {error}") from error
    return function, module


def build_environment(
    function: Callable[[Any], Any], name: str, what: str, *, parallelism: int | None = None, default_parallelism: int = 1
) -> Environment:
    """Build the job on an Environment, at this parallelism if given. Raises InvalidConfigError naming the pipeline."""
    given = Environment(name.rpartition(":")[2], parallelism=parallelism or default_parallelism)
    try:
        returned = function(given)
    except InvalidConfigError as error:
        raise refused(name, what, str(error)) from error
    except Exception as error:
        raise refused(name, what, f"the function raised {type(error).__name__}: {error}") from error
    environment = returned if isinstance(returned, Environment) else given
    if parallelism is not None:
        environment.parallelism = parallelism
    return environment


def refused(name: str, what: str, reason: str) -> InvalidConfigError:
    return InvalidConfigError(f"{what} {name}: {reason}", setting=what)


def _module(where: str, name: str, what: str) -> ModuleType:
    """Import the module of a file or of a module name."""
    is_file = where.endswith(".py")
    # A program imports its neighbours from its own folder, a module from the working directory.
    folder = str(Path(where).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _file_module(Path(where), name, what) if is_file else importlib.import_module(where)
    except InvalidConfigError:
        raise
    except Exception as error:
        raise refused(name, what, f"{where} can't be imported: {type(error).__name__}: {error}") from error


def _file_module(path: Path, name: str, what: str) -> ModuleType:
    if not path.is_file():
        raise refused(name, what, f"there is no file {path}")
    module_name = f"holdfast_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise refused(name, what, f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # type hints of its records are resolved there
    spec.loader.exec_module(module)
    return module
