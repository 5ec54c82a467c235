"""What msgspec raises for bytes that nobody vouches for: one tuple, so that no reader of files forgets a kind of it."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Not the format, or not the type; a text that is not UTF-8; nested deeper than the interpreter's stack."""
