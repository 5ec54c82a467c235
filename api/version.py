"""Versions that the service shows."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    try:
        return metadata.version("holdfast")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0.0.0"


VERSION = _installed()

DIALECT_VERSION = f"2.3.0+holdfast.{VERSION}"
"""Flink's version whose REST dialect is implemented, with ours as build metadata: clients parse the first three numbers."""

REVISION = f"holdfast-{VERSION}"
