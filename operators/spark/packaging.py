"""Packaging for executors: our packages as a zip of compiled modules, and the user's modules by value.

A worker imports only statebackends, barriers and operators. Thirty `.py` files in a zip cost every fresh worker 275 ms of
compilation; as `.pyc` 12 ms."""

from __future__ import annotations

import functools
import importlib.util
import io
import marshal
import os
import sys
import sysconfig
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType

import cloudpickle
import xxhash

from holdfast.operators.pickling import NAME, is_own_module

WORKER_PACKAGES = ("statebackends", "barriers", "operators")
FACADE = ("__init__", "__main__")
"""Modules of the top package itself."""
DECLARATIONS = ("__init__", "expectations")
"""Modules of `chaos` in the zip: a user's module that calls `hf.chaos.expect` may be imported on an executor, too."""
_TIMESTAMP = (2020, 1, 1, 0, 0, 0)
"""Modification time of every entry, fixed so that equal code gives equal bytes."""


def build_package(packages: Iterable[str] = WORKER_PACKAGES) -> bytes:
    """Build a zip of the packages' modules, compiled for this interpreter; works from a checkout, a wheel or a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        root = files(NAME)
        # User code says `import holdfast as hf`; the facade imports lazily, so it costs a worker nothing.
        for name in FACADE:
            archive.writestr(zipfile.ZipInfo(f"{NAME}/{name}.pyc", _TIMESTAMP), _module(root, NAME, name))
        for package in packages:
            for name, code in sorted(_modules(root / package, f"{NAME}/{package}")):
                archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), code)
        for name in DECLARATIONS:
            folder = f"{NAME}/chaos"
            archive.writestr(zipfile.ZipInfo(f"{folder}/{name}.pyc", _TIMESTAMP), _module(root / "chaos", folder, name))
    return buffer.getvalue()


@functools.cache
def _own_package() -> bytes:
    """Our zip, built once for all jobs: imported code does not change, and compiling takes half a second."""
    return build_package()


def write_package(folder: Path) -> Path:
    """Write the zip as `holdfast-<hash of the content>.zip` to a folder."""
    data = _own_package()
    path = folder / f"holdfast-{xxhash.xxh3_64_hexdigest(data)}.zip"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)
    return path


def _modules(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    """(name in the zip, compiled bytes) of every module below a package."""
    for item in folder.iterdir():
        if item.is_dir():
            if item.name.isidentifier() and item.name != "__pycache__":
                yield from _modules(item, f"{prefix}/{item.name}")
        elif item.name.endswith(".py"):
            name = f"{prefix}/{item.name}"
            yield f"{name}c", _compile(item.read_bytes(), name)
        elif item.name.endswith(".pyc"):
            yield f"{prefix}/{item.name}", item.read_bytes()


def _module(folder: Traversable, prefix: str, name: str) -> bytes:
    """One module of a package, compiled."""
    source = folder / f"{name}.py"
    if source.is_file():
        return _compile(source.read_bytes(), f"{prefix}/{name}.py")
    return (folder / f"{name}.pyc").read_bytes()


def _compile(source: bytes, name: str) -> bytes:
    """Compile to a `.pyc` that is never compared with its source: unchecked hash (flags 1), and any hash value."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


def user_modules() -> list[ModuleType]:
    """Imported modules that executors can't be expected to have: not installed, not ours, not of Python's library."""
    return [module for name, module in sorted(sys.modules.items()) if is_user_module(name, module)]


def is_user_module(name: str, module: ModuleType) -> bool:
    """Whether an imported module is one of `user_modules`."""
    path = getattr(module, "__file__", None)
    if name == "__main__" or is_own_module(name) or not isinstance(path, str) or not path.endswith(".py"):
        return False
    return not _is_installed(path)


@functools.lru_cache(maxsize=1 << 14)
def _is_installed(path: str) -> bool:
    """Whether a module's file is installed. Cached: a program with pandas has two thousand modules, checked for each submission."""
    real = os.path.realpath(path)
    return any(real.startswith(f"{folder}{os.sep}") for folder in _installed()) or "site-packages" in real


@functools.cache
def _installed() -> frozenset[str]:
    """Folders of Python's library and of installed packages."""
    return frozenset(os.path.realpath(path) for key, path in sysconfig.get_paths().items() if key != "data" and path)


_registering = threading.Lock()
_registered: Counter[str] = Counter()
"""Name of a module registered for the duration of a block -> number of such blocks."""


@contextmanager
def modules_by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Pickle these modules' definitions by value while the block runs, in any thread; blocks of several threads may overlap. The
    user's own registrations stay."""
    added: list[ModuleType] = []
    try:
        with _registering:
            already = cloudpickle.list_registry_pickle_by_value() - _registered.keys()
            for module in [module for module in modules if module.__name__ not in already]:
                cloudpickle.register_pickle_by_value(module)
                _registered[module.__name__] += 1
                added.append(module)
        yield
    finally:
        with _registering:
            for module in added:
                _registered[module.__name__] -= 1
                if not _registered[module.__name__]:
                    del _registered[module.__name__]
                    cloudpickle.unregister_pickle_by_value(module)
