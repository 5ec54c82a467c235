"""Redistribution of state over a new parallelism. Pure: it moves entries and handles, and never opens them.

Union and broadcast state moves by whole handles; only split state has to be read before it is redistributed. The scenarios named
here (P01-P10) are in docs/invariants.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, OperatorSubtaskState
from holdfast.statebackends.keygroups import assign_key_groups

E = TypeVar("E")

OldEntries = Mapping[str, Sequence[Sequence[E]]]
"""State name -> entries, or handles, of each old subtask; every name has the same number of subtasks."""

NewEntries = list[dict[str, list[E]]]
"""Per new subtask: state name -> entries; every name at every subtask."""


def split_redistribute(old: OldEntries[E], new_parallelism: int) -> NewEntries[E]:
    """Deal list entries out evenly: concatenated in old-subtask order, cut into contiguous shares whose sizes differ by at most 1.

    States are dealt in the order of their names. Each begins at the subtask where the extra entries of the one before ended, so
    that many small states don't all load subtask 0. At equal parallelism every subtask keeps its own. Scenarios P01-P10."""
    old_parallelism = _old_parallelism(old, new_parallelism)
    if old_parallelism == new_parallelism:
        return [{name: list(old[name][index]) for name in sorted(old)} for index in range(new_parallelism)]
    new: NewEntries[E] = [{} for _ in range(new_parallelism)]
    first = 0
    for name in sorted(old):
        entries = [entry for subtask in old[name] for entry in subtask]
        size, extras = divmod(len(entries), new_parallelism)
        start = 0
        for turn in range(new_parallelism):
            stop = start + size + (turn < extras)
            new[(first + turn) % new_parallelism][name] = entries[start:stop]
            start = stop
        first = (first + extras) % new_parallelism
    return new


def union_redistribute(old: OldEntries[E], new_parallelism: int) -> NewEntries[E]:
    """Give every new subtask all entries, in old-subtask order; also at equal parallelism. Scenarios P06, P08."""
    _old_parallelism(old, new_parallelism)
    merged = {name: [entry for subtask in old[name] for entry in subtask] for name in sorted(old)}
    return [{name: list(entries) for name, entries in merged.items()} for _ in range(new_parallelism)]


def broadcast_redistribute(old: OldEntries[E], new_parallelism: int) -> NewEntries[E]:
    """Give new subtask i the copy of old subtask i mod old parallelism, or the next copy if that subtask had finished without one.

    Scenarios P07, P10."""
    old_parallelism = _old_parallelism(old, new_parallelism)
    return [
        {name: list(_copy_at(old[name], index % old_parallelism)) for name in sorted(old)} for index in range(new_parallelism)
    ]


def _copy_at(copies: Sequence[Sequence[E]], index: int) -> Sequence[E]:
    """The first copy with entries, from `index` on and around; empty if all are."""
    return next((entries for entries in (*copies[index:], *copies[:index]) if entries), ())


def _old_parallelism(old: OldEntries[E], new_parallelism: int) -> int:
    if new_parallelism < 1:
        raise InvalidConfigError(f"parallelism must be at least 1, not {new_parallelism}", parallelism=new_parallelism)
    parallelisms = {len(subtasks) for subtasks in old.values()}
    if len(parallelisms) > 1 or 0 in parallelisms:
        raise InvalidConfigError(f"states of one operator have entries of {sorted(parallelisms)} subtasks")
    return parallelisms.pop() if parallelisms else new_parallelism


class KeyedShare(NamedTuple):
    """An old handle, and the key groups of it that a new subtask takes."""

    handle: KeyedStateHandle
    key_groups: KeyGroupRange
    """Never empty."""


def keyed_redistribute(
    old: Sequence[OperatorSubtaskState], max_parallelism: int, new_parallelism: int
) -> list[list[KeyedShare]]:
    """Per new subtask: each old keyed handle whose key groups intersect its range, with the intersection; in old-subtask order.

    Raises InvalidConfigError on a parallelism out of bounds."""
    return [
        _shares(old, assign_key_groups(max_parallelism, new_parallelism, index)) for index in range(new_parallelism)
    ]


def _shares(old: Sequence[OperatorSubtaskState], wanted: KeyGroupRange) -> list[KeyedShare]:
    shares = []
    for subtask in old:
        for handle in subtask.keyed:
            common = handle.key_groups.intersection(wanted)
            if len(common):
                shares.append(KeyedShare(handle, common))
    return shares
