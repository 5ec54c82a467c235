"""Arrangement of a new savepoint: which operators and states of a snapshot it has, under which names, with which max parallelism.

It describes the result and not the steps to it, so swapped or restored names cost nothing. It reads `_metadata` alone; arrange.py
writes the savepoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.keygroups import check_parallelism, operator_id
from holdfast.statebackends.serialization.state_serializer import TIMERS_KIND
from holdfast.statebackends.state_processor.contents import StoredSnapshot, states_of


@dataclass(frozen=True, slots=True)
class KeptOperator:
    """An operator of the snapshot that goes into the savepoint."""

    source: str
    """Its uid in the snapshot."""
    max_parallelism: int
    states: Mapping[str, str]
    """Name in the savepoint -> name in the snapshot; other states are removed."""

    @property
    def names(self) -> dict[str, str]:
        """Name in the snapshot -> name in the savepoint."""
        return {stored: name for name, stored in self.states.items()}


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The wanted savepoint; immutable, each change gives another one. Methods that name an operator or state raise NotFoundError if
    it is not kept."""

    snapshot: StoredSnapshot
    operators: Mapping[str, KeptOperator]
    """By uid in the savepoint."""

    @staticmethod
    def of(snapshot: StoredSnapshot) -> Arrangement:
        """The snapshot unchanged."""
        kept = {
            operator.uid: KeptOperator(operator.uid, operator.max_parallelism, {name: name for name in states_of(operator)})
            for operator in snapshot.metadata.operators
        }
        return Arrangement(snapshot, kept)

    def without_operator(self, uid: str) -> Arrangement:
        self.operator(uid)
        return replace(self, operators={each: kept for each, kept in self.operators.items() if each != uid})

    def without_state(self, uid: str, name: str) -> Arrangement:
        kept = self._with_state(uid, name)
        return self._with(uid, replace(kept, states={each: stored for each, stored in kept.states.items() if each != name}))

    def with_operator_renamed(self, uid: str, to: str) -> Arrangement:
        """Raises InvalidConfigError if `to` is the uid of another operator, or an invalid one."""
        self.operator(uid)
        operator_id(to)
        if to != uid and to in self.operators:
            raise InvalidConfigError(f"operator {uid!r} can't become {to!r}: there is one of that uid", operator=uid)
        return replace(self, operators={to if each == uid else each: kept for each, kept in self.operators.items()})

    def with_state_renamed(self, uid: str, name: str, to: str) -> Arrangement:
        """Raises InvalidConfigError if `to` is the name of another state or an invalid one, and for timers."""
        kept = self._with_state(uid, name)
        wrong = ""
        if states_of(self.snapshot.operator(kept.source))[kept.states[name]].meta.kind == TIMERS_KIND:
            wrong = "timers are found by this name alone"
        elif not to or not to.isprintable():
            wrong = "it is no name"
        elif to != name and to in kept.states:
            wrong = "there is one of that name"
        if wrong:
            raise InvalidConfigError(f"operator {uid!r}: state {name!r} can't become {to!r}: {wrong}", operator=uid, state=name)
        return self._with(uid, replace(kept, states={to if each == name else each: stored for each, stored in kept.states.items()}))

    def with_max_parallelism(self, max_parallelism: int, uid: str | None = None) -> Arrangement:
        """Set it for one operator, or for all. Raises InvalidConfigError if it is out of bounds, or below a parallelism."""
        changed = {}
        for each in self.operators if uid is None else (uid,):
            kept = self.operator(each)
            parallelism = self.snapshot.operator(kept.source).parallelism
            check_parallelism(max_parallelism, 1)
            if max_parallelism < parallelism:
                raise InvalidConfigError(
                    f"operator {each!r}: max parallelism {max_parallelism} is less than {parallelism}, at which the snapshot "
                    f"was taken: take one at a parallelism of {max_parallelism} at most",
                    operator=each,
                )
            changed[each] = replace(kept, max_parallelism=max_parallelism)
        return replace(self, operators={**self.operators, **changed})

    def operator(self, uid: str) -> KeptOperator:
        """A kept operator. Raises NotFoundError naming the kept ones."""
        if uid not in self.operators:
            known = ", ".join(sorted(self.operators)) or "none"
            raise NotFoundError(f"the savepoint has no operator {uid!r} from the snapshot; it has: {known}", operator=uid)
        return self.operators[uid]

    def metas(self, uid: str) -> dict[str, StateMeta]:
        """Kept states of an operator, by name in the savepoint."""
        kept = self.operator(uid)
        stored = states_of(self.snapshot.operator(kept.source))
        return {name: renamed(stored[own].meta, name) for name, own in kept.states.items()}

    @property
    def renamed_operators(self) -> dict[str, str]:
        """Uid in the snapshot -> uid in the savepoint, of renamed operators."""
        return {kept.source: uid for uid, kept in self.operators.items() if kept.source != uid}

    def described(self) -> Iterator[str]:
        """Each difference from the snapshot in a few words."""
        kept = {operator.source: (uid, operator) for uid, operator in self.operators.items()}
        for operator in self.snapshot.metadata.operators:
            if operator.uid not in kept:
                yield f"{operator.uid} removed"
                continue
            uid, found = kept[operator.uid]
            if uid != operator.uid:
                yield f"{operator.uid} renamed to {uid}"
            if found.max_parallelism != operator.max_parallelism:
                yield f"{uid} to max parallelism {found.max_parallelism} from {operator.max_parallelism}"
            for name in states_of(operator):
                to = found.names.get(name)
                if to != name:
                    yield f"{uid}.{name} " + ("removed" if to is None else f"renamed to {to}")

    def _with(self, uid: str, kept: KeptOperator) -> Arrangement:
        return replace(self, operators={**self.operators, uid: kept})

    def _with_state(self, uid: str, name: str) -> KeptOperator:
        kept = self.operator(uid)
        if name not in kept.states:
            known = ", ".join(kept.states) or "none"
            reason = f"operator {uid!r} has no state {name!r} from the snapshot; it has: {known}"
            raise NotFoundError(reason, operator=uid, state=name)
        return kept


def renamed(meta: StateMeta, name: str) -> StateMeta:
    return StateMeta(name, meta.kind, meta.value_type, meta.key_type)
