"""Side outputs: streams of an operator beside its main one, each with a tag and rows of its own type.

Tags and types are declared when the graph is built. What a function emits is kept until its batch, or its slice of timers, is
done, and then leaves as one batch for each tag, with the event times of the records or timers that it was emitted for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.functions.row_loops import emitted_copier
from holdfast.operators.functions.schema import UNDECLARED, RowType, declared_type
from holdfast.statebackends.errors import GraphError, UndeclaredOutputError

TAG_CHARACTERS_MAX = 100
SIDE_OUTPUTS_MAX = 100
"""Of one operator."""
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, eq=False, slots=True)
class OutputTag:
    """A side output: its name, and what its rows are.

    `returns`: pa.Schema, {column: type} or a record type; None: rows of undeclared type. The name has 1..100 letters, digits,
    dots, dashes or underscores; else GraphError is raised."""

    name: str
    returns: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or len(self.name) > TAG_CHARACTERS_MAX or not _TAG.fullmatch(self.name):
            raise GraphError(
                f"the name of a side output must be 1..{TAG_CHARACTERS_MAX} letters, digits, dots, dashes or underscores, "
                f"not {self.name!r}"
            )


SideOutputDeclarations: TypeAlias = Mapping[str, Any] | Iterable[OutputTag]
"""Tag -> `returns`, or tags that say it themselves."""


def tag_name(tag: OutputTag | str) -> str:
    return tag.name if isinstance(tag, OutputTag) else tag


def declared_side_outputs(declared: SideOutputDeclarations, operator: str) -> dict[str, RowType]:
    """Tag -> rows. Raises GraphError naming the operator for what is no declaration, or has a tag twice."""
    tags = [OutputTag(name, returns) for name, returns in declared.items()] if isinstance(declared, Mapping) else declared
    found: dict[str, RowType] = {}
    for tag in tags:
        if not isinstance(tag, OutputTag):
            raise GraphError(
                f"operator {operator!r}: side_outputs is {{tag: columns}} or has hf.OutputTag(...) in it, not {tag!r}",
                operator=operator,
            )
        if tag.name in found:
            raise GraphError(f"operator {operator!r}: two side outputs are called {tag.name!r}", operator=operator)
        found[tag.name] = UNDECLARED if tag.returns is None else declared_type(tag.returns, operator)
    if len(found) > SIDE_OUTPUTS_MAX:
        raise GraphError(
            f"operator {operator!r} declares {len(found)} side outputs; it may have {SIDE_OUTPUTS_MAX}", operator=operator
        )
    return found


class _Side:
    """Rows of one tag that wait to be emitted."""

    __slots__ = ("own", "rows", "stamps", "type")

    def __init__(self, row_type: RowType, *, copies: bool) -> None:
        self.type = row_type
        self.own = emitted_copier(row_type) if copies else None
        self.rows: list[Any] = []
        self.stamps: list[int | None] = []


class SideOutputs:
    """What the function of one subtask emits to side outputs. Rows for a tag that nobody reads are not kept."""

    __slots__ = ("_copies", "_declared", "_operator", "_output", "_sides", "_takes")

    def __init__(
        self, declared: Mapping[str, RowType], operator: OperatorContext, output: Output, *, copies: bool = False
    ) -> None:
        """`copies`: the function may emit what it keeps as state."""
        self._copies = copies
        self._declared = declared
        self._operator = operator
        self._output = output
        self._sides: dict[str, _Side] = {}
        self._takes = False

    def begin(self) -> None:
        """The function was opened: from now on it gets records, and may emit."""
        self._takes = True
        read = ((tag, rows) for tag, rows in self._declared.items() if self._output.has_readers(tag))
        self._sides = {tag: _Side(rows, copies=self._copies) for tag, rows in read}

    def end(self) -> None:
        """It is about to be closed, and may emit no more."""
        self._takes = False
        self._sides = {}

    def add(self, tag: OutputTag | str, row: Any, timestamp_ms: int | None) -> None:
        """Raises UndeclaredOutputError."""
        name = tag.name if isinstance(tag, OutputTag) else tag
        side = self._sides.get(name)
        if side is not None:
            side.rows.append(row if side.own is None else side.own(row))
            side.stamps.append(timestamp_ms)
        elif not self._takes or name not in self._declared:
            raise self._refused(name)

    def flush(self) -> None:
        """Emit what was added since the last call, for records that all have event times, or none of them."""
        for tag, side in self._sides.items():
            if not side.rows:
                continue
            rows, stamps, side.rows, side.stamps = side.rows, side.stamps, [], []
            self._output.collect_side(
                tag,
                Batch(
                    rows=rows,
                    schema=side.type.schema,
                    timestamps=None if stamps[0] is None else np.array(stamps, np.int64),
                    row_factory=side.type.record,
                    producer=self._operator.uid,
                ),
            )

    def _refused(self, name: str) -> UndeclaredOutputError:
        uid = self._operator.uid
        if name in self._declared:
            reason = "has no rows in open() and close(): rows belong to a record or a timer"
        else:
            declared = ", ".join(self._declared) or "none"
            reason = f"is not among the declared ones ({declared}): add it to `side_outputs` of the function or of process(...)"
        return UndeclaredOutputError(f"operator {uid!r}: side output {name!r} {reason}", operator=uid, side_output=str(name))
