"""All queries, by name."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.api.nexmark import closing, joined, pass_through, totals, windowed
from holdfast.api.nexmark.query import Query
from holdfast.statebackends.errors import InvalidConfigError

QUERIES: dict[str, Query] = {
    query.name: query
    for query in sorted(
        (query for room in (pass_through, joined, closing, windowed, totals) for query in room.QUERIES),
        key=lambda query: int(query.name[1:]),
    )
}
"""q0 to q22."""


def named_queries(names: Sequence[str]) -> list[Query]:
    """Those of these names; all where there is none. Raises InvalidConfigError naming the choices."""
    for name in names:
        if name not in QUERIES:
            raise InvalidConfigError(f"there is no query {name!r}; choose from {', '.join(QUERIES)}", setting="queries")
    return [query for query in QUERIES.values() if not names or query.name in names]
