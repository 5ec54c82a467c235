"""The `filesystem` backend: state as Python objects in memory, snapshots as files in checkpoint storage.

A checkpoint stores what changed since the one before it: see tablechains.py."""

from __future__ import annotations

from holdfast.statebackends.backends.heap import HeapKeyedBackend


class FilesystemKeyedBackend(HeapKeyedBackend):
    """Parts below the target's inline threshold travel in the acknowledgement, all others are files."""
