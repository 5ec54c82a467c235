"""A failure as a Java object: the bytes that a JVM has read back (`make compat` has one read them again), and any text at all."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.api.flink.serialized_throwable import CHARACTERS_MAX, modified_utf8, serialize_throwable

GOLDEN = Path(__file__).parents[1] / "golden" / "serialized_throwables.json"
CASES = (
    ("declined", "a task declined"),
    ("SnapshotClaimedError", "snapshot /sp/a was claimed by job b:\n\tstart from a copy of it"),
    ("expired", ""),
    ("UserFunctionError", "null \0, accents éß, beyond the basic plane \U0001f600, half of a pair \ud83d"),
)


def golden() -> dict[str, tuple[str, bytes]]:
    """Text and bytes by class name."""
    return {case["class"]: (case["text"], base64.b64decode(case["bytes"])) for case in json.loads(GOLDEN.read_text())}


def test_the_bytes_are_those_that_a_jvm_read() -> None:
    assert {kind: (text, serialize_throwable(kind, text)) for kind, text in CASES} == golden()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a~", b"a~"),
        ("\0", b"\xc0\x80"),
        ("é", b"\xc3\xa9"),
        ("€", b"\xe2\x82\xac"),
        ("\U0001f600", b"\xed\xa0\xbd\xed\xb8\x80"),
        ("\ud83d", b"\xed\xa0\xbd"),
    ],
)
def test_texts_are_in_javas_own_utf_8(text: str, expected: bytes) -> None:
    assert modified_utf8(text) == expected


@given(st.text(alphabet=st.characters(codec=None)))
def test_no_text_breaks_the_stream(text: str) -> None:
    encoded = modified_utf8(text)
    assert b"\0" not in encoded
    assert max(encoded, default=0) < 0xF0, "no sequence of four bytes, which Java's form does not have"
    assert encoded in serialize_throwable("declined", text)


def test_a_long_text_is_cut_and_its_length_takes_eight_bytes() -> None:
    stream = serialize_throwable("k" * 2 * CHARACTERS_MAX, "\U0001f600" * 2 * CHARACTERS_MAX)
    size = 6 * CHARACTERS_MAX
    assert b"\x7c" + size.to_bytes(8, "big") + b"\xed\xa0\xbd\xed\xb8\x80" in stream
    assert len(stream) < 2 * size + 3 * CHARACTERS_MAX
