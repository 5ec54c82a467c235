"""Which operators and states of a snapshot a new savepoint is to have, under which names, in how many key groups.

A picture of the end, and not a list of steps: names that are swapped, or given back, cost nothing. It reads `_metadata` alone."""

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
    """Name in the savepoint -> name in the snapshot; those left out are gone."""

    @property
    def names(self) -> dict[str, str]:
        """Name in the snapshot -> name in the savepoint."""
        return {stored: name for name, stored in self.states.items()}


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What becomes of a snapshot; each step gives another one."""

    snapshot: StoredSnapshot
    operators: Mapping[str, KeptOperator]
    """By uid in the savepoint."""

    @staticmethod
    def of(snapshot: StoredSnapshot) -> Arrangement:
        """All as it is."""
        kept = {
            operator.uid: KeptOperator(operator.uid, operator.max_parallelism, {name: name for name in states_of(operator)})
            for operator in snapshot.metadata.operators
        }
        return Arrangement(snapshot, kept)

    def without_operator(self, uid: str) -> Arrangement:
        """Raises NotFoundError, as all that follow do for what is not there."""
        self.operator(uid)
        return replace(self, operators={each: kept for each, kept in self.operators.items() if each != uid})

    def without_state(self, uid: str, name: str) -> Arrangement:
        kept = self._with_state(uid, name)
        return self._with(uid, replace(kept, states={each: stored for each, stored in kept.states.items() if each != name}))

    def with_operator_renamed(self, uid: str, to: str) -> Arrangement:
        """Raises InvalidConfigError if there is one of that uid, or it can't be one."""
        self.operator(uid)
        operator_id(to)
        if to != uid and to in self.operators:
            raise InvalidConfigError(f"operator {uid!r} can't become {to!r}: there is one of that uid", operator=uid)
        return replace(self, operators={to if each == uid else each: kept for each, kept in self.operators.items()})

    def with_state_renamed(self, uid: str, name: str, to: str) -> Arrangement:
        """Raises InvalidConfigError if there is one of that name, it can't be one, or the state is timers."""
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
        """Of one operator, or of all. Raises InvalidConfigError if it is out of bounds, or less than an operator's parallelism."""
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
        """Raises NotFoundError naming the operators that there are."""
        if uid not in self.operators:
            known = ", ".join(sorted(self.operators)) or "none"
            raise NotFoundError(f"the savepoint has no operator {uid!r} from the snapshot; it has: {known}", operator=uid)
        return self.operators[uid]

    def metas(self, uid: str) -> dict[str, StateMeta]:
        """The states that are kept of an operator, by their names in the savepoint."""
        kept = self.operator(uid)
        stored = states_of(self.snapshot.operator(kept.source))
        return {name: renamed(stored[own].meta, name) for name, own in kept.states.items()}

    @property
    def renamed_operators(self) -> dict[str, str]:
        """Uid in the snapshot -> another one in the savepoint."""
        return {kept.source: uid for uid, kept in self.operators.items() if kept.source != uid}

    def described(self) -> Iterator[str]:
        """What differs from the snapshot, a few words each."""
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
