"""Clients of connectors are imported when one is used, and only there: none comes with Holdfast itself."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.statebackends.errors import InvalidConfigError


def import_extra(module: str, extra: str, connector: str) -> Any:
    """A module that the extra `holdfast[<extra>]` installs. Raises InvalidConfigError, naming the extra, where it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # of a package that the module needs itself
        raise InvalidConfigError(
            f"{connector} needs {error.name}, here and on the workers: pip install 'holdfast[{extra}]'", package=error.name
        ) from error
