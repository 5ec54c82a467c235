"""A reader of snapshots written from docs/snapshot-format.md alone; it imports nothing of Holdfast, which a test checks.

    python -m independent_reader FOLDER      prints the contents of a savepoint or checkpoint as JSON

Values are plain JSON as in plainjson.py. Whatever the document says to refuse is refused with UnreadableError."""

from .container import open_envelope, path_of, read_snapshot
from .errors import UnreadableError
from .keys import decode_key, key_hash, spread
from .tables import rows_of_table

__all__ = ["UnreadableError", "decode_key", "key_hash", "open_envelope", "path_of", "read_snapshot", "rows_of_table", "spread"]
