"""Results of asynchronous calls come in order, or at least before their watermark (I34).

A workload's function behind the calls keeps what it has seen; this checker reads it in every live subtask. That each row has its
result once is seen in the output (I1, I2)."""

from __future__ import annotations

from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.workloads.async_io import Watch


class AsyncChecker(Checker):
    """Reads the marks of `Watch`."""

    invariants: ClassVar[tuple[str, ...]] = ("I34",)

    def look(self) -> None:
        for host in self.world.workers():
            for each in host.subtasks():
                for node in each.subtask.chain.nodes:
                    function = getattr(node.operator, "function", None)
                    if isinstance(function, Watch) and function.marked:
                        self.report("I34", f"{node.uid} ({each.subtask.key.subtask}): result {function.marked[0]}")
                        function.marked.clear()
