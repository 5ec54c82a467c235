"""Values of states declared `Pickled`, including those that name Holdfast's modules by their old names.

Pickle stores a class by its module and name. Values stored before Holdfast was one package name `statebackends.errors` or
`operators.time`, and are read as today's classes (docs/adr/0049). A user's project may have packages of those names, whose classes
come first. Only stored state is read this way, never rows from a network."""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.statebackends.errors import CorruptStateError, StateValueError

_BY_NAME = (
    "Pickle stores a class by its name, by which workers import it: one of the program itself can't be. Declare the state with a "
    "dataclass or a msgspec.Struct instead, which is stored by its fields"
)

_HOME = Path(__file__).resolve().parents[2]
"""The folder that holds our packages: of a checkout, its root."""

_OLD_NAMES = re.compile(rb"(?:api|barriers|coordinator|operators|statebackends)\.")
"""Old names of modules; bytes without one go to pickle as they are."""

_MOVED = {
    "api.snapshots.fsck": "holdfast.api.snapshots.maintenance",
    "api.snapshots.savepoints": "holdfast.api.snapshots.savepoint",
    "barriers.stagedsink": "holdfast.barriers.sinks.staged",
    "coordinator.preflight": "holdfast.coordinator.restore.preflight",
    "operators.functions.rich": "holdfast.operators.functions.context",
    "operators.functions.time": "holdfast.operators.functions.windows.assigners",
    "operators.functions.watermarks": "holdfast.operators.functions.event_time.watermarks",
    "operators.keyed": "holdfast.operators.datastream.stream",
    "operators.launcher": "holdfast.operators.datastream.launcher",
    "operators.sinks.parquet": "holdfast.operators.sinks.files.parquet",
    "operators.sinks.positions": "holdfast.operators.sinks.targets.positions",
    "operators.sinks.staged": "holdfast.operators.sinks.targets.staged",
    "operators.sinks.target": "holdfast.operators.sinks.targets.target",
    "operators.state_source": "holdfast.operators.spark.datasource.state",
    "operators.stream": "holdfast.operators.datastream.stream",
    "operators.time": "holdfast.operators.functions.windows.assigners",
    "statebackends.serializers": "holdfast.statebackends.state",
    "statebackends.ttl": "holdfast.statebackends.state",
}
"""Old module -> today's, for all names that `hf.` exports; other modules only got the prefix `holdfast.`. A module that moved since
then is here by its name behind that prefix."""


def pickle_value(value: Any) -> bytes:
    """Pickle of a value. Raises StateValueError for a value that can't be pickled."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        kind = type(value).__qualname__
        hint = f". {_BY_NAME}" if isinstance(error, pickle.PicklingError) else ""
        raise StateValueError(f"a {kind} can't be pickled: {error}{hint}", type="pickled", value=kind) from error


def unpickle_value(encoded: bytes) -> Any:
    """The value of a stored pickle. Runs code of its classes. Raises CorruptStateError."""
    try:
        if _OLD_NAMES.search(encoded) is None:
            return pickle.loads(encoded)
        return _Unpickler(io.BytesIO(encoded)).load()
    except Exception as error:
        raise CorruptStateError(f"a pickled value can't be loaded: {error}", reason="value encoding") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if package == "holdfast":
            return super().find_class(_MOVED.get(module.removeprefix("holdfast."), module), name)
        if _OLD_NAMES.fullmatch(f"{package}.".encode()) is None:
            return super().find_class(module, name)
        if _is_the_users(package):
            try:
                return super().find_class(module, name)
            except (ImportError, AttributeError):
                pass  # an old name of ours after all
        return super().find_class(_MOVED.get(module, f"holdfast.{module}"), name)


@functools.cache
def _is_the_users(package: str) -> bool:
    """Whether a package of this name can be imported that is not a folder of Holdfast's checkout on the path."""
    found = find_spec(package)
    return found is not None and (found.origin is None or not Path(os.path.realpath(found.origin)).is_relative_to(_HOME / package))
