"""Mistakes of event time in operators: what leaves behind a watermark, where late records go, what stays in state for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.functions.windows.row_functions import WindowOperator
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.operators.task.chain import ChainNode, OperatorChain


def _forwards_first(original: Any) -> Any:
    def fire(self: OperatorChain, node: ChainNode, timestamp_ms: int, slices: Iterator[None]) -> Iterator[None]:
        yield from original(self, node, timestamp_ms, iter(()))
        yield from slices

    return fire


def _keeps_contents(original: Any) -> Any:
    def clear(self: WindowOperator, pane: Any) -> None:
        contents, pane.contents = pane.contents, _Untouched()
        original(self, pane)
        pane.contents = contents

    return clear


class _Untouched:
    def clear(self) -> None: ...


SABOTAGES = (
    Sabotage(
        "hasty_forwarding",
        "a watermark is passed on in front of what it fires",
        ("I31",),
        (Mutant(OperatorChain, "_fire", _forwards_first),),
        workloads=("windows", "timers", "sliding", "latecomers"),
    ),
    Sabotage(
        "lost_latecomers",
        "a late record is neither in the late output nor counted",
        ("I32",),
        (Mutant(WindowOperator, "_take_late", constant(None)),),
        workloads=("latecomers",),
    ),
    Sabotage(
        "kept_contents",
        "the contents of a window stay in state when it is cleaned up",
        ("I35",),
        (Mutant(WindowOperator, "_clear", _keeps_contents),),
        workloads=("latecomers",),
    ),
    Sabotage(
        "kept_panes",
        "panes that no window needs any more stay in state",
        ("I35", "I7"),
        (Mutant(SlidingWindowOperator, "_clean", constant(None)),),
        workloads=("sliding",),
    ),
)
