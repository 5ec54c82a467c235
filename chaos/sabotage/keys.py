"""Mistakes with keys: two that differ count as one."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.statebackends.serialization.key_fields import DecimalField, Utf8Field


def _folds(original: Any) -> Any:
    def encoded(self: Utf8Field, array: pa.Array, *, nested: bool = False) -> list[bytes]:
        texts = [unicodedata.normalize("NFC", text) for text in array.to_pylist()]
        found: list[bytes] = original(self, pa.array(texts, array.type), nested=nested)
        return found

    return encoded


def _keeps_the_low_half(original: Any) -> Any:
    def bodies(self: DecimalField, array: pa.Array) -> Any:
        found = np.array(original(self, array))
        found[:, :8] = found[:1, :8]
        return found

    return bodies


def _does_not_escape(original: Any) -> Any:
    def encoded(self: Any, array: pa.Array, *, nested: bool = False) -> list[bytes]:
        whole: Sequence[bytes] = original(self, array)
        return [row.replace(b"\0", b"") + b"\0" for row in whole] if nested else list(whole)

    return encoded


SABOTAGES = (
    Sabotage(
        "folded_keys",
        "texts that look alike are one key",
        ("I7", "I26", "I3", "I5", "I11", "I1", "I2"),
        (Mutant(Utf8Field, "encoded", _folds),),
        workloads=("keys",),
        seeds_max=80,
    ),
    Sabotage(
        "narrow_keys",
        "of a decimal key only the low half counts",
        ("I7", "I26", "I3", "I5", "I11", "I1", "I2"),
        (Mutant(DecimalField, "_bodies", _keeps_the_low_half),),
        workloads=("keys",),
        seeds_max=80,
    ),
    Sabotage(
        "unescaped_keys",
        "zeros in the texts and bytes of a key of several fields are lost",
        ("I7", "I26", "I3", "I5", "I11", "I1", "I2"),
        (Mutant(Utf8Field, "encoded", _does_not_escape),),
        workloads=("keys",),
        seeds_max=80,
    ),
)
