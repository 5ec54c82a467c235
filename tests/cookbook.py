"""The recipes of examples/cookbook as modules, loaded from their files as a user runs them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

COOKBOOK = Path(__file__).resolve().parents[1] / "examples" / "cookbook"
RECIPES = ("velocity_rule", "sessions", "deduplicate", "latest_row", "enrich", "score_batches")


def load(name: str) -> ModuleType:
    """A file of the cookbook; the same module each time."""
    full = f"cookbook_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, COOKBOOK / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]
