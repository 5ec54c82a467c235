"""Codecs of stored states from their text alone, without the user's classes. Pickled values stay bytes: nothing runs."""

from __future__ import annotations

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.serialization.mapkeys import Form
from holdfast.statebackends.serialization.shapes import OpaqueShape
from holdfast.statebackends.serialization.state_serializer import CODED_KINDS, StampedCodec, StateCodec, value_texts
from holdfast.statebackends.serialization.type_serializer import TypeSpec

PICKLED = "pickled"

_OPAQUE = TypeSpec(PICKLED, OpaqueShape(PICKLED, bytes, bytes), bytes, bytes)


def stored_type(text: str) -> TypeSpec:
    """The type of stored values, with `pickled` as plain bytes. Raises InvalidConfigError."""
    return _OPAQUE if text == PICKLED else TypeSpec.parse(text)


def codec_of_meta(meta: StateMeta) -> StateCodec | None:
    """Codec of a keyed state; None for one of a kind with columns of its own. Raises InvalidConfigError."""
    if meta.kind not in CODED_KINDS:
        return None
    key_text, value_text, stamped = value_texts(meta)
    map_key = stored_type(key_text) if meta.kind == "map" else None
    form = None if map_key is None else _form_of(map_key)
    return (StampedCodec if stamped else StateCodec)(meta, stored_type(value_text), map_key, None, form)


def _form_of(map_key: TypeSpec) -> Form | None:
    try:
        return map_key.shape.key_form()
    except InvalidConfigError:
        return None  # no job declares such a map any more: its keys are what their bytes are
