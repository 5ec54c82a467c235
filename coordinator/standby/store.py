"""Flows over the records of members: look, claim, give a sign of life, forget the dead.

Each may be killed between any two operations. A look costs one listing and the files that are new since the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from holdfast.coordinator.ha.records import decode_record, encode_record
from holdfast.coordinator.ha.store import put_once
from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, ObjectMissingError, UnsupportedVersionError
from holdfast.statebackends.layout import (
    MEMBERS_FOLDER,
    SERVICE_LEADERS_FOLDER,
    parse_sign_name,
    service_leader_path,
    sign_path,
)
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import DeleteFile, Flow, ListFolder, StatFile, WriteFile

MEMBERS_MAX = 32
"""Members beside the active one whose signs are read; further ones are not known of."""


def observe(known: Observation) -> Flow[Observation]:
    """The records as they are now. `known`: the last observation, whose records are not read again. Raises CorruptStateError for a
    damaged record of the active member."""
    active = yield from _find_active(known.active)
    names: list[str] = yield ListFolder(MEMBERS_FOLDER)
    beats: dict[str, int] = {}
    for member, beat in map(parse_sign_name, names):
        if member:
            beats[member] = max(beat, beats.get(member, 0))
    signs: dict[str, SignOfLife] = {}
    for member in _read_of(beats, active):
        beat, before = beats[member], known.signs.get(member)
        found = before if before is not None and before.beat == beat else (yield from _read_sign(member, beat))
        if found is not None:
            signs[member] = found
        elif before is not None:
            signs[member] = before  # the next one has taken its place since the listing
    return Observation(active, signs, beats)


def _read_of(beats: Mapping[str, int], active: ActiveRecord | None) -> list[str]:
    """Members whose signs are read: the active one, and of the others those with the most signs. One that is started again and
    again leaves members behind that gave few: they hide none that has lived for some seconds."""
    leads = active.member if active is not None else ""
    others = sorted((member for member in beats if member != leads), key=lambda member: (-beats[member], member))
    return [leads, *others[:MEMBERS_MAX]] if leads in beats else others[:MEMBERS_MAX]


def _find_active(known: ActiveRecord | None) -> Flow[ActiveRecord | None]:
    """Epochs have no gaps: only the one behind the known one is looked for."""
    if known is not None and (yield StatFile(service_leader_path(known.epoch + 1))) is None:
        return known
    names: list[str] = yield ListFolder(SERVICE_LEADERS_FOLDER)
    epoch = max((int(name) for name in names if name.isdecimal()), default=0)
    if epoch <= (known.epoch if known is not None else 0):
        return known
    path = service_leader_path(epoch)
    return decode_record(ActiveRecord, (yield from read_whole(path)), path)


def _read_sign(member: str, beat: int) -> Flow[SignOfLife | None]:
    path = sign_path(member, beat)
    try:
        sign = decode_record(SignOfLife, (yield from read_whole(path)), path)
    except (ObjectMissingError, CorruptStateError, UnsupportedVersionError):
        return None
    return sign if (sign.member, sign.beat) == (member, beat) else None


def claim(record: ActiveRecord) -> Flow[ActiveRecord]:
    """Become the active member of an epoch, if nobody is; returns the one that is."""
    path = service_leader_path(record.epoch)
    return decode_record(ActiveRecord, (yield from put_once(path, encode_record(record))), path)


def give_sign(sign: SignOfLife) -> Flow[None]:
    """Store the next sign of a member, then delete the one before, as far as storage lets it: the higher one counts."""
    yield WriteFile(sign_path(sign.member, sign.beat), [encode_record(sign)])
    if sign.beat > 1:
        with contextlib.suppress(HoldfastError):
            yield DeleteFile(sign_path(sign.member, sign.beat - 1))


def forget(members: Sequence[str]) -> Flow[None]:
    """Delete all signs of members. One that lives after all gives its next sign, and is known again."""
    names: list[str] = yield ListFolder(MEMBERS_FOLDER)
    forgotten = frozenset(members)
    for member, beat in map(parse_sign_name, names):
        if member in forgotten:
            yield DeleteFile(sign_path(member, beat))
