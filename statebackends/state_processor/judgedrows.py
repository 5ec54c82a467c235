"""Rows on their way to a reader, judged as a restore judges them: what it would refuse is refused here.

Values are judged batch by batch; which rows there are, a stretch of whole key groups at a time, before any of it is given out. Of a
key group with more rows than a stretch, what came first is given out, and only what the rows are about is held until its end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import pyarrow as pa

from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.snapshot.row_rules import RowRules

STRETCH_ROWS = 1 << 17
"""Rows judged together, but for a key group of more."""
STRETCH_BYTES = 32 << 20
"""Held back until they are judged, and one batch."""


def judged_rows(batches: Iterable[pa.RecordBatch], rules: RowRules, names: Collection[str]) -> Iterator[pa.RecordBatch]:
    """The batches, which come in key-group order, with the state's columns in their types: those of `names`, and `rules.identity`.

    Raises as `RowRules` does: for a row that is there twice at the latest after these rows."""
    wanted = {*names, *rules.identity}
    held: list[pa.RecordBatch] = []
    identities: list[pa.Table] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        table = rules.canonical(batch, wanted)
        rules.judge_values(table, wanted)
        identities.append(_copy(table.select(rules.identity)))
        held += table.to_batches()
        size += table.nbytes
        if size >= STRETCH_BYTES or sum(map(len, identities)) >= STRETCH_ROWS:
            identities = _judge_whole_groups(identities, rules)
            yield from held
            held, size = [], 0
    if identities:
        rules.judge_identities(pa.concat_tables(identities))
    yield from held


def _copy(table: pa.Table) -> pa.Table:
    """A slice of a batch would keep its values in memory."""
    return table.take(pa.array(np.arange(len(table))))


def _judge_whole_groups(held: list[pa.Table], rules: RowRules) -> list[pa.Table]:
    """Judges all but the last key group, of which more rows may come; that is what is returned."""
    newest = held[-1].column(KEY_GROUP)[-1].as_py()
    if held[0].column(KEY_GROUP)[0].as_py() == newest:
        return held
    table = pa.concat_tables(held)
    cut = int(np.searchsorted(table.column(KEY_GROUP).to_numpy(), newest))
    rules.judge_identities(table.slice(0, cut))
    return [_copy(table.slice(cut))]
