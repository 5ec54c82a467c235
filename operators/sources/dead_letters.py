"""Records of a source that can't be read, as a side output of it: `stream.side_output(hf.DEAD_LETTERS)`. Public.

Each leaves once, with the position that it is at, as records do. Where nothing reads them the first one fails the job."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.side_outputs import OutputTag
from holdfast.operators.sources.splits import DeadLetter
from holdfast.operators.task.source_operator import DEAD_LETTER_SCHEMA, DEAD_LETTERS_TAG

DEAD_LETTERS = OutputTag(DEAD_LETTERS_TAG, DEAD_LETTER_SCHEMA)
"""Rows (split, position, error, raw) of a connector's source, without event times: the split's id, the numbers of the record's
position, what is wrong with it, and its bytes as they came (null if the source has none)."""


def batch_of(split_id: str, letters: Sequence[DeadLetter]) -> Batch | None:
    """Those of one split; None for none."""
    if not letters:
        return None
    columns = [
        pa.array([split_id] * len(letters), pa.string()),
        pa.array([each.position for each in letters], DEAD_LETTER_SCHEMA.field("position").type),
        pa.array([each.error for each in letters], pa.string()),
        pa.array([each.raw for each in letters], pa.binary()),
    ]
    return Batch(columns=pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTER_SCHEMA))
