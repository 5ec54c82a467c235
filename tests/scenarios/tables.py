"""Reads the Markdown tables of a scenario file: rows by group, with their cells by column name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ROW_ID = re.compile(r"^\**`?([A-Z])(\d+)([a-z]?)`?\**$")
HEADING = re.compile(r"^#+\s*([A-Z0-9])\b[.:)]?\s*(.*)$")
SEPARATOR = re.compile(r"^:?-+:?$")
UID_VECTOR = re.compile(r"`([^`]+)`\s+`?([0-9a-f]{32})\b")


class UnparsedError(Exception):
    """A cell is not in the notation."""


@dataclass(frozen=True)
class Row:
    """One row of one table, or one vector of the uid line."""

    id: str
    group: str
    header: tuple[str, ...]
    cells: tuple[str, ...]
    line: int

    def cell(self, *prefixes: str, default: str | None = None) -> str:
        """The cell whose column name begins with one of the prefixes. Raises UnparsedError if there is none and no default."""
        for prefix in prefixes:
            for name, cell in zip(self.header, self.cells, strict=False):
                if name.startswith(prefix):
                    return cell
        if default is not None:
            return default
        raise UnparsedError(f"no column named {' or '.join(prefixes)} in {list(self.header)}")


def split_cells(line: str) -> list[str]:
    """Cells of a table line. A bar inside backticks or behind a backslash belongs to its cell."""
    cells, cell, quoted, escaped = [], "", False, False
    for sign in line.strip().strip("|") + "|":
        if sign == "|" and not quoted and not escaped:
            cells.append(cell.strip())
            cell = ""
            continue
        if sign == "`":
            quoted = not quoted
        escaped = sign == "\\" and not escaped
        cell += sign
    if quoted:
        return [part.strip() for part in line.strip().strip("|").split("|")]
    return cells


def column_name(cell: str) -> str:
    return re.sub(r"[`*]", "", cell).strip().lower()


def parse_rows(text: str) -> Iterator[Row]:
    """Every row of every table, in order, and every `uid` hash pair that a line of text gives."""
    heading, previous = "", ""
    header: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if found := HEADING.match(line):
            heading, header = found.group(1), ()
        elif line.lstrip().startswith("|"):
            cells = split_cells(line)
            if all(SEPARATOR.match(cell) for cell in cells if cell) and any(cells):
                header = tuple(column_name(cell) for cell in split_cells(previous))
            elif row := _row(heading, header, cells, number):
                yield row
        else:
            header = ()
            for uid, digest in UID_VECTOR.findall(line):
                yield Row(f"uid {uid}", "O", ("uid", "operator id"), (uid, digest), number)
        previous = line


def _row(heading: str, header: tuple[str, ...], cells: list[str], line: int) -> Row | None:
    """A row by its id, or a vector by its header; None for a header line and for tables of another kind."""
    if found := ROW_ID.match(cells[0]):
        group = found.group(1)
        return Row(cells[0].strip("*`"), group, header or DEFAULT_HEADERS.get(group, ()), tuple(cells), line)
    if header and header[0] in ("input hash", "string key"):
        return Row(f"{header[0].split()[-1]} {cells[0].strip('`')}", "O", header, tuple(cells), line)
    if header and heading in NOTATION_GROUPS and header[0] == "id":
        return Row(cells[0], heading, header, tuple(cells), line)
    return None


NOTATION_GROUPS = ("A", "C", "D", "E", "I", "M", "O", "P", "Y")
"""Groups whose rows are data in the notation, or (I) are played by their ids; the others are requirements, each with its own
tests."""

DEFAULT_HEADERS: dict[str, tuple[str, ...]] = {
    "A": ("id", "n", "input", "expected trace", "cut", "what it shows"),
    "E": ("id", "n", "input", "expected trace", "what it shows"),
    "M": ("id", "n", "input → output", "all output", "what it shows"),
    "O": ("id", "case", "expected"),
    "P": ("id", "mode", "old", "new p", "expected"),
}
"""Columns of a table that comes without its header."""
