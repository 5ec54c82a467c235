"""Which windows the state of an operator is of, as its snapshots keep it: other ones would take it for theirs."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.operators.base import OperatorContext
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.bounds import slide_of
from holdfast.operators.functions.windows.kept_entries import kept_entries
from holdfast.statebackends.decoding import decode_msgpack
from holdfast.statebackends.errors import IncompatibleStateError
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution

ASSIGNER = OperatorListStateDescriptor("assigner", Redistribution.UNION)
"""One entry a subtask: msgpack list that says which windows the state is of."""


def keep_assigner(context: OperatorContext, own: list[Any]) -> None:
    """As the entry of this subtask."""
    context.operator_state.list_state(ASSIGNER.name).update([msgspec.msgpack.encode(own)])


def _decoded(entry: bytes) -> list[str | int]:
    return decode_msgpack(entry, list[str | int])


def check_assigner(context: OperatorContext, own: list[Any], state: str, what: str, advice: str) -> None:
    """Raises IncompatibleStateError for state of other windows, CorruptStateError for an entry of another form. `what`: what the
    lists say; `advice`: what to do about it.

    Snapshots from before this was stored say nothing."""
    for stored in kept_entries(context, ASSIGNER.name, "which windows it is of", _decoded, bool):
        if stored != own:
            raise IncompatibleStateError(
                f"operator {context.uid!r}: the snapshot has rows of windows {stored}, and the job declares {own} "
                f"({what}): {advice}",
                operator=context.uid,
                state=state,
                stored=str(stored),
                declared=str(own),
            )


def keep_lengths(context: OperatorContext, windows: Tumbling | Sliding | Session) -> None:
    """Of an operator whose namespaces are times of windows."""
    keep_assigner(context, _lengths(windows))


def check_lengths(context: OperatorContext, windows: Tumbling | Sliding | Session, state: str) -> None:
    """Raises IncompatibleStateError for state of other lengths: its namespaces would be taken for those of `windows`."""
    advice = "give windows of another length, offset or gap a uid of their own"
    check_assigner(context, _lengths(windows), state, "kind, lengths in ms", advice)


def _lengths(windows: Tumbling | Sliding | Session) -> list[Any]:
    if isinstance(windows, Session):
        return ["session", windows.gap_ms]
    return ["sliding", windows.size_ms, slide_of(windows), windows.offset_ms]  # tumbling ones are those that slide by their size
