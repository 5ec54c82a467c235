"""Which SQL expressions are taken: scalar ones over the columns of one row, whose value follows from these alone.

DuckDB parses the text and its catalog says of each function what it is; the tree that it gives is checked here, class by class, and
what is not known is refused. It knows no rows: `expressions.py` evaluates."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.statebackends.errors import GraphError, InvalidConfigError, UnknownColumnError

if TYPE_CHECKING:
    import duckdb

EXPRESSION_CHARACTERS_MAX = 10_000
"""Longest text of an expression."""

DUCKDB_VERSION_MIN = 2
"""First major version that scans an object anew each time a bound query runs."""

_CONFIG = {
    "threads": "1",
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false",
    "temp_directory": "",
}
"""Neither files nor network nor extensions, and rows in the order in which they came."""

_CLASSES = frozenset(
    (
        *("COLUMN_REF", "CONSTANT", "FUNCTION", "OPERATOR", "CONJUNCTION", "COMPARISON"),
        *("CASE", "CAST", "BETWEEN", "COLLATE", "LAMBDA", "TYPE"),
    )
)
"""Kinds of parsed expressions that are of one row, whatever is in them."""

_WHY_NOT = {
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function, which works across rows",
    "STAR": "`*` or COLUMNS(...): name the columns",
    "PARAMETER": "a parameter: write its value",
    "POSITIONAL_REFERENCE": "a reference by position: name the column",
    "DEFAULT": "DEFAULT, which has no meaning here",
}

_OUTSIDE = "its value does not follow from its arguments"
_MISDECLARED = {
    "current_localtime": _OUTSIDE,
    "current_localtimestamp": _OUTSIDE,
    "version": _OUTSIDE,
    "user": _OUTSIDE,
    "session_user": _OUTSIDE,
    "getenv": _OUTSIDE,
    "unnest": "it makes rows",
}
"""Functions that DuckDB's catalog calls consistent, or lacks, and why they are refused all the same."""

_WORDS = frozenset(("localtime", "localtimestamp", "user", "session_user"))
"""Functions that are written without parentheses, as a column is; and all that begin with `current_`."""


def connect(operator: str) -> duckdb.DuckDBPyConnection:
    """A connection of its own to this process's database, which is empty, in memory, and can reach nothing else, for ever; its time
    zone is UTC. Another database for each connection would cost twenty times as much.

    Raises InvalidConfigError where DuckDB is not installed, or too old."""
    try:
        import duckdb
    except ImportError as error:
        raise _needs_duckdb(operator, "") from error
    if int(duckdb.__version__.partition(".")[0]) < DUCKDB_VERSION_MIN:
        raise _needs_duckdb(operator, f" {DUCKDB_VERSION_MIN}, not {duckdb.__version__}")
    return _database(os.getpid()).cursor()


@cache
def _database(pid: int) -> duckdb.DuckDBPyConnection:
    """Of a process. One that a fork has copied has lost its threads: it is neither used nor closed."""
    import duckdb

    connection = duckdb.connect(":memory:", config=_CONFIG)
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection


def _needs_duckdb(operator: str, version: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"operator {operator!r}: SQL expressions need DuckDB{version}, here and on the executors: pip install 'holdfast[sql]'",
        operator=operator,
        package="duckdb",
    )


@dataclass(frozen=True, slots=True)
class Expression:
    """A text that was checked."""

    name: str
    """Column of the result; empty: a condition."""
    text: str
    """As the user wrote it."""
    sql: str
    """As DuckDB reads it: columns that are called like a keyword are quoted."""
    columns: tuple[str, ...]
    """Columns that it reads."""

    @property
    def column(self) -> str | None:
        """The column that it is, as it stands; None: it is more than a column, or written otherwise."""
        name = self.text.strip()
        return name if self.columns == (name,) and name.isidentifier() else None

    @property
    def shown(self) -> str:
        return f"{self.name} = {self.text!r}" if self.name else repr(self.text)


def refusal(operator: str, shown: str, reason: str, **fields: Any) -> GraphError:
    """Error of an expression that is refused when the graph is built."""
    return GraphError(f"operator {operator!r}: {shown}: {reason}", operator=operator, expression=shown, **fields)


class ExpressionChecker:
    """Checks the expressions of one operator over the columns of one schema."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, schema: pa.Schema, operator: str) -> None:
        self._connection = connection
        self._schema = schema
        self._operator = operator

    def check(self, name: str, text: str) -> Expression:
        """Raises GraphError with the reason, UnknownColumnError."""
        written = Expression(name, text, text, ())
        if not isinstance(text, str) or not 0 < len(text) <= EXPRESSION_CHARACTERS_MAX:
            raise self._refusal(written, f"an expression is text of 1 to {EXPRESSION_CHARACTERS_MAX} characters")
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise self._refusal(written, "it has half a character")
        try:
            sql, tree = self._parse(written)
            columns = tuple(dict.fromkeys(self._columns(tree, written)))
        except RecursionError as error:
            raise self._refusal(written, "it is nested too deep") from error
        self._check_columns(columns, written)
        return Expression(name, text, sql, columns)

    def _refusal(self, expression: Expression, reason: str) -> GraphError:
        return refusal(self._operator, expression.shown, reason)

    def _parse(self, written: Expression) -> tuple[str, Any]:
        """(text that DuckDB can read, its tree)."""
        reply = _serialized(self._connection, written.text)
        text = written.text
        if reply["error"]:
            text = _quoted(text, self._schema.names)
            reply = reply if text == written.text else _serialized(self._connection, text)
        if reply["error"]:
            raise self._refusal(written, f"it is not one SQL expression: {_first_line(str(reply['error_message']))}")
        found = _single(self._connection, reply)
        if found is None:
            raise self._refusal(written, "it is more than one expression: neither FROM, WHERE, AS, LIMIT nor a further statement")
        return text, found

    def _columns(self, tree: Any, written: Expression) -> Iterator[str]:
        """Columns that the tree reads. Raises GraphError for what is not of one row."""
        names = {name.lower(): name for name in self._schema.names}
        for node, bound in _walk(tree):
            kind = node["class"]
            if kind == "COLUMN_REF":
                first = node["column_names"][0]
                if first in self._schema.names:
                    yield first
                elif first.lower() in names:
                    yield names[first.lower()]
                elif first.lower() in _WORDS or first.lower().startswith("current_"):
                    raise self._refusal(written, f"{first} is refused: {_OUTSIDE}")
                elif first.lower() not in bound:
                    raise self._unknown(first, written)
            elif (reason := _reason(self._connection, node)) is not None:
                raise self._refusal(written, reason)

    def _unknown(self, name: str, written: Expression) -> UnknownColumnError:
        available = list(self._schema.names)
        return UnknownColumnError(
            f"operator {self._operator!r}: {written.shown}: there is no column {name!r}; "
            f"available: {', '.join(available) or 'none'}",
            operator=self._operator,
            column=name,
            available=available,
            expression=written.shown,
        )

    def _check_columns(self, columns: Sequence[str], written: Expression) -> None:
        if len({name.lower() for name in columns}) < len(columns):
            raise self._refusal(written, "SQL takes columns whose names differ in case alone for one: rename one of them")
        for name in columns:
            data_type = self._schema.field(name).type
            if self._schema.names.count(name) > 1:
                raise self._refusal(written, f"two columns are called {name!r}")
            if pa.types.is_timestamp(data_type) and data_type.tz is not None and data_type.unit == "ns":
                reason = f"column {name!r} is {data_type}, which DuckDB cuts off: cast nanoseconds to microseconds"
                raise self._refusal(written, reason)


def _serialized(connection: duckdb.DuckDBPyConnection, text: str) -> Any:
    # The line break ends a comment in the text.
    (found,) = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {text}\n"]).fetchall()
    return json.loads(found[0])


def _single(connection: duckdb.DuckDBPyConnection, reply: Any) -> Any:
    """The tree of the one expression of a statement that has nothing else; None if there is more."""
    statements = reply["statements"]
    plain = _serialized(connection, "1")["statements"][0]["node"]
    node = statements[0]["node"]
    if len(statements) != 1 or any(node.get(part) != plain[part] for part in plain if part != "select_list"):
        return None
    if len(node["select_list"]) != 1 or node["select_list"][0].get("alias"):
        return None
    return node["select_list"][0]


def _walk(tree: Any) -> Iterator[tuple[Any, frozenset[str]]]:
    """Each expression in a tree, with the lower-case names that the lambdas around it bind."""
    stack: list[tuple[Any, frozenset[str]]] = [(tree, frozenset())]
    while stack:
        node, bound = stack.pop()
        if isinstance(node, list):
            stack.extend((each, bound) for each in node)
        elif isinstance(node, dict):
            if node.get("class") == "LAMBDA":
                # `json -> path` is parsed as a lambda, too: a column on the left is read, whatever it turns out to be.
                bound |= {each["column_names"][0].lower() for each, _ in _walk(node["lhs"]) if each["class"] == "COLUMN_REF"}
            if "class" in node:
                yield node, bound
            stack.extend((each, bound) for each in node.values())


def _reason(connection: duckdb.DuckDBPyConnection, node: Any) -> str | None:
    """Why an expression, its parts aside, is refused; None: it is not."""
    kind = node["class"]
    if kind not in _CLASSES or node["type"] == "GROUPING_FUNCTION":
        return f"it has {_WHY_NOT.get(kind, node['type'].lower())}"
    if kind != "FUNCTION":
        return None
    name = str(node["function_name"]).lower()
    if name == "age" and len(node["arguments"] if "arguments" in node else node["children"]) < 2:
        return "age() of one argument reads the clock"
    found = _function_reason(connection, name, frozenset())
    return None if found is None else f"{name}() is refused: {found}"


def _function_reason(connection: duckdb.DuckDBPyConnection, name: str, seen: frozenset[str]) -> str | None:
    """Why a function is refused, by its catalog entries. A macro is what it expands to."""
    if name in _MISDECLARED or name.startswith(("current_", "__internal")):
        return _MISDECLARED.get(name, _OUTSIDE)
    overloads = [each for each in _catalog().get(name, ()) if each.kind in ("scalar", "aggregate", "window", "macro")]
    if not overloads:
        return "it makes rows" if name in _catalog() else "DuckDB has no such function"
    for each in overloads:
        if each.kind in ("aggregate", "window"):
            return "it works across rows"
        if each.kind == "scalar" and each.stability != "CONSISTENT":
            return _OUTSIDE
        if each.kind == "macro" and name not in seen:
            reason = _macro_reason(connection, each, seen | {name})
            if reason is not None:
                return f"it is {each.definition}: {reason}"
    return None


def _macro_reason(connection: duckdb.DuckDBPyConnection, macro: _Function, seen: frozenset[str]) -> str | None:
    reply = _serialized(connection, macro.definition)
    tree = None if reply["error"] else _single(connection, reply)
    if tree is None:
        return "what it does is not known"
    for node, bound in _walk(tree):
        if node["class"] == "COLUMN_REF":
            name = node["column_names"][0].lower()
            if name not in bound and name not in macro.parameters:
                return f"it reads {name}"
        elif node["class"] == "FUNCTION":
            reason = _function_reason(connection, str(node["function_name"]).lower(), seen)
            if reason is not None:
                return reason
        elif (reason := _reason(connection, node)) is not None:
            return reason
    return None


@dataclass(frozen=True, slots=True)
class _Function:
    kind: str
    stability: str
    parameters: frozenset[str]
    definition: str


@cache
def _catalog() -> dict[str, list[_Function]]:
    """Entries of each function that DuckDB comes with, by lower-case name."""
    connection = connect("sql")
    try:
        rows = connection.execute(
            "SELECT lower(function_name), function_type, stability, parameters, macro_definition FROM duckdb_functions()"
        ).fetchall()
    finally:
        connection.close()
    found: dict[str, list[_Function]] = {}
    for name, kind, stability, parameters, definition in rows:
        lowered = frozenset(str(each).lower() for each in parameters or ())
        found.setdefault(name, []).append(_Function(kind, stability or "", lowered, definition or ""))
    return found


def _quoted(text: str, names: Sequence[str]) -> str:
    """The text with its keywords in quotes where they are spelt as a column is, such as `at`, and can be no part of the syntax."""
    import duckdb

    encoded = text.encode()
    tokens = [(offset, kind == duckdb.token_type.keyword) for offset, kind in duckdb.tokenize(text)]
    ends = [offset for offset, _ in tokens[1:]] + [len(encoded)]
    words = [encoded[offset:end].decode(errors="replace").strip() for (offset, _), end in zip(tokens, ends, strict=True)]
    for index in reversed(range(len(tokens))):
        (offset, is_keyword), word = tokens[index], words[index]
        following = words[index + 1].lower() if index + 1 < len(words) else ""
        if is_keyword and word in names and not (word == "at" and following == "time"):
            encoded = encoded[:offset] + f'"{word}"'.encode() + encoded[offset + len(word.encode()) :]
    return encoded.decode()


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
