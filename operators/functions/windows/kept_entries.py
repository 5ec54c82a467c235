"""Entries of operator list state, decoded as what they are declared to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from holdfast.operators.base import OperatorContext
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError

T = TypeVar("T")


def kept_entries(
    context: OperatorContext, state: str, what: str, decode: Callable[[bytes], T], is_known: Callable[[T], bool]
) -> list[T]:
    """Each entry of a list state. `what`: what they say; `is_known`: False for what the operator can't have stored.

    Raises CorruptStateError for that, and for another form."""
    found = []
    for entry in context.operator_state.list_state(state).entries:
        try:
            value = decode(entry)
            if not is_known(value):
                raise msgspec.ValidationError(f"{value!r} is out of bounds")
        except UNDECODABLE as error:
            raise CorruptStateError(
                f"operator {context.uid!r}: {what} (state {state!r}) is not readable: {error}",
                operator=context.uid,
                state=state,
                subtask=context.subtask,
                reason=str(error),
            ) from error
        found.append(value)
    return found
