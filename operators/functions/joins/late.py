"""Side outputs of the late rows of a join's inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.side_outputs import OutputTag, tag_name
from holdfast.statebackends.errors import GraphError


@dataclass(frozen=True, slots=True)
class LateOutputs:
    """Side outputs of late rows."""

    tags: tuple[str, str] = ("", "")
    """Of the left and of the right; empty: its late rows are dropped and counted."""
    types: dict[str, RowType] = field(default_factory=dict)
    """Tag -> its rows, which are those of the input."""


def late_outputs(
    tags: tuple[OutputTag | str | None, OutputTag | str | None], inputs: tuple[RowType, RowType], operator: str
) -> LateOutputs:
    """Of `late_left=` and `late_right=`. Raises GraphError for what is no name, or is the name of both."""
    names = tuple("" if tag is None else OutputTag(tag_name(tag)).name for tag in tags)
    if names[0] and names[0] == names[1]:
        raise GraphError(f"operator {operator!r}: two side outputs are called {names[0]!r}", operator=operator)
    types = {name: row_type for name, row_type in zip(names, inputs, strict=True) if name}
    return LateOutputs((names[0], names[1]), types)
