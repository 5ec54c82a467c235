"""Master hooks: code of the operator that takes part in checkpoints on the coordinator, each hook in a process of its own."""

from __future__ import annotations
