"""Output of the CLI: tables for people, JSON for programs, one line on stderr for an error.

It decides widths, units and exit codes; it knows no command."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from holdfast.statebackends.errors import HoldfastError, InvalidConfigError

EXIT_FAILED = 1
EXIT_REFUSED = 2
"""Wrong usage or settings, or refused before anything was started; for snapshot tools, any reason that prevents an answer."""

EXIT_NO_VERDICT = 3
"""Of `holdfast status`: nobody answered for the job, so nothing is known of it. Of `holdfast audit verify`: nothing is recorded."""

_TIME_MS_MAX = 253_402_300_799_999
"""End of the year 9999, the last that Python's calendar knows."""

_PIPE_WIDTH = 10_000_000
"""More columns than a table has that is written to a file or a pipe: whoever reads it has no width, and misses what is cut."""

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_LINES_AND_DIRECTIONS = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_ESCAPED_SURROGATES = {code: repr(chr(code))[1:-1] for code in _SURROGATES}
_UNPRINTABLE = {code: repr(chr(code))[1:-1] for code in (*_CONTROLS, *_LINES_AND_DIRECTIONS, *_SURROGATES)}
"""Characters that control a terminal, end a line, change the text's direction or can't be encoded; names of files, states and jobs
may contain them."""


def printable(text: str) -> str:
    """Return the text on one line, with control characters escaped."""
    return text.translate(_UNPRINTABLE)


def exit_code(error: BaseException) -> int:
    """Exit code of the process for an error."""
    return EXIT_REFUSED if isinstance(error, InvalidConfigError) else EXIT_FAILED


@contextmanager
def trouble(code: int = EXIT_REFUSED) -> Iterator[None]:
    """Turn every typed error of the block, and a wait that took too long, into one line and an exit code: for commands whose exit
    code 1 is a result."""
    try:
        yield
    except (HoldfastError, TimeoutError) as error:
        show_error(error)
        raise typer.Exit(code) from error


_first: list[Callable[[], None]] = []
"""Called before any output."""


@contextmanager
def before_output(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` before each output within the block: it removes its own line from the terminal."""
    _first.append(call)
    try:
        yield
    finally:
        _first.remove(call)


def _make_room() -> None:
    for call in _first:
        call()


def show_error(error: BaseException) -> None:
    """Print one line on stderr that ends with the error's class, for programs and searches."""
    _make_room()
    text = " ".join(str(error).split()) or type(error).__name__
    kind = f" [{type(error).__name__}]" if isinstance(error, HoldfastError) else ""
    typer.echo(printable(f"holdfast: {text}{kind}"), err=True)


def show_note(text: str) -> None:
    """Print one line on stderr, beside the requested output."""
    _make_room()
    typer.echo(printable(f"holdfast: {' '.join(text.split())}"), err=True)


def show_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    _make_room()
    text = json.dumps(_keyed_by_text(value), indent=2, ensure_ascii=False, default=_plain)
    typer.echo(text.translate(_ESCAPED_SURROGATES))  # surrogates of names that are no text; everything else can be encoded


def _keyed_by_text(value: Any) -> Any:
    """Convert the keys of dicts to text, as JSON requires; keys of stored dicts may have any type."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _text(key): _keyed_by_text(member) for key, member in value.items()}
    return [_keyed_by_text(member) for member in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    return json.dumps(_keyed_by_text(value), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """JSON form of column values beyond JSON's own types."""
    return value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str) -> None:
    """Print a table on stdout, or the line `empty`. Numbers are right-aligned. On a terminal cells wrap; elsewhere a row is a line,
    however long."""
    _make_room()
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        typer.echo(empty)
        return
    is_terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = all(row[index][:1].isdigit() or row[index] == "-" for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=not is_terminal)
    for row in cells:
        table.add_row(*row)
    if is_terminal:
        Console(highlight=False, markup=False, emoji=False).print(table)
        return
    whole = io.StringIO()
    Console(file=whole, width=_PIPE_WIDTH, highlight=False, markup=False, emoji=False).print(table)
    typer.echo("\n".join(line.rstrip(" ") for line in whole.getvalue().removesuffix("\n").split("\n")))


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return printable(value if isinstance(value, str) else _text(value))


def show_line(text: str) -> None:
    """Print one line on stdout."""
    _make_room()
    typer.echo(printable(text))


def time_text(timestamp_ms: int) -> str:
    """Milliseconds since 1970 as UTC, to the second."""
    if not 0 <= timestamp_ms <= _TIME_MS_MAX:
        return "-"  # unknown or out of range: a snapshot from elsewhere may contain any number
    return datetime.fromtimestamp(timestamp_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
