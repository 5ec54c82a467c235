"""The master hooks that are installed where a coordinator runs: entry points of the group `holdfast.master_hooks`.

It imports none of their code: that is done in their own processes."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points

from holdfast.barriers.jobgraph import check_hook_name
from holdfast.coordinator.hooks.process import ProcessHooks
from holdfast.statebackends.errors import InvalidConfigError

logger = logging.getLogger(__name__)

GROUP = "holdfast.master_hooks"
INSTALLED_MAX = 1_000
"""Hooks in one registry."""


def find_missing(module: str) -> str:
    """The first of a module and the packages around it that is not there; empty: none is known to be missing.

    It asks the finders of imports and imports nothing: whether a module can be imported is known when its process does it. What a
    finder can't tell, and what lies in a module that is no package, counts as there."""
    path: Sequence[str] | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, path)) is not None), None)
            if spec is None:
                return name
            if spec.submodule_search_locations is None:
                return ""
            path = list(spec.submodule_search_locations)
        except Exception:
            return ""
    return ""


class HookRegistry:
    """Implements `HookHost`: hooks by name. Thread-safe."""

    def __init__(self, *, discover: bool = False) -> None:
        """`discover`: look for entry points when a hook is first asked for."""
        self._specs: dict[str, str] = {}
        self._lock = threading.Lock()
        self._discovers = discover

    def register(self, name: str, spec: str) -> bool:
        """Add a hook, `spec` being its `module:name`; False if the name is taken, and the hook that has it stays.

        Raises InvalidConfigError for a name that a hook can't have."""
        check_hook_name(name)
        with self._lock:
            if name in self._specs or len(self._specs) >= INSTALLED_MAX:
                return False
            self._specs[name] = spec
            return True

    def names(self) -> tuple[str, ...]:
        """Of all hooks, in order."""
        self._discover()
        with self._lock:
            return tuple(sorted(self._specs))

    def check(self, names: Collection[str]) -> None:
        """As `HookHost`; modules that are not there are found, too."""
        if not names:
            return
        known = self.names()
        missing = sorted(set(names) - set(known))
        if missing:
            installed = ", ".join(known[:20]) or "none"
            message = f"master hook {missing[0]!r} is not installed where the coordinator runs; in {GROUP} there are: {installed}"
            raise InvalidConfigError(message, setting="master_hooks")
        for name in sorted(set(names)):
            self._check_module(name)

    def _check_module(self, name: str) -> None:
        spec = self._specs[name]
        missing = find_missing(spec.partition(":")[0])
        if missing:
            message = f"master hook {name!r} is installed as {spec}, and there is no module {missing!r} where the coordinator runs"
            raise InvalidConfigError(message, setting="master_hooks")

    def of_job(self, job_id: str, epoch: int) -> ProcessHooks:
        """As `HookHost`."""
        self._discover()
        with self._lock:
            return ProcessHooks(dict(self._specs), job_id, epoch)

    def _discover(self) -> None:
        with self._lock:
            wanted, self._discovers = self._discovers, False
        if not wanted:
            return
        for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
            try:
                is_first = self.register(point.name, point.value.partition("[")[0].strip())
            except InvalidConfigError as error:
                logger.warning("entry point %s of %s is left out: %s", point.value, GROUP, error)
                continue
            if not is_first:
                logger.warning("master hook %r is installed twice: %s is left out", point.name, point.value)
