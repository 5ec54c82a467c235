"""Names that a user can choose, the meaning of each, and the errors for unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.chaos.faults.faults import FAMILIES, KINDS, Fault, decode_plan, expand_kinds
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    from holdfast.chaos.sabotage import Sabotage

BACKENDS = ("memory", "filesystem", "rocksdb")


def check_choice(what: str, name: str, choices: Iterable[str], *, setting: str) -> None:
    """Raise InvalidConfigError naming the choices."""
    known = sorted(choices)
    if name not in known:
        raise InvalidConfigError(f"there is no {what} {name!r}; choose from {', '.join(known)}", setting=setting)


def choose_workloads(names: tuple[str, ...], sabotage: Sabotage | None) -> tuple[str, ...]:
    """The named ones, else those in which the sabotage shows, else all. Raises InvalidConfigError."""
    from holdfast.chaos.workloads import WORKLOADS, find_workload

    for name in names:
        find_workload(name)
    return names or (sabotage.workloads if sabotage is not None else ()) or tuple(WORKLOADS)


def choose_sabotage(name: str | None) -> Sabotage | None:
    """The sabotage of a name. Raises InvalidConfigError."""
    if name is None:
        return None
    from holdfast.chaos.sabotage import SABOTAGES

    check_choice("sabotage", name, (*SABOTAGES, "all"), setting="sabotage")
    return SABOTAGES[name]


def choose_backend(name: str | None) -> str | None:
    """The state backend of a name. Raises InvalidConfigError."""
    if name is not None:
        check_choice("state backend", name, BACKENDS, setting="backend")
    return name


def choose_faults(text: str | None, sabotage: Sabotage | None = None) -> tuple[tuple[str, ...], tuple[Fault, ...] | None]:
    """Single kinds, or the plan of a file (`@plan.json`); without a name the faults that make the sabotage show, else all kinds.

    Raises InvalidConfigError."""
    if text is None:
        if sabotage is None:
            return (), None
        return expand_kinds(sabotage.kinds) if sabotage.kinds else (), sabotage.plan
    if text.startswith("@"):
        return (), read_plan(Path(text[1:]))
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidConfigError(f"no fault is named; choose from {', '.join((*FAMILIES, *KINDS))}", setting="faults")
    return expand_kinds(names), None


def read_plan(path: Path) -> tuple[Fault, ...]:
    """The plan in a file. Raises InvalidConfigError naming the file and the problem."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidConfigError(f"the plan {path} can't be read: {error.strerror}", setting="plan") from error
    return decode_plan(content, str(path))


def choose_part(text: str | None, plan: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The faults with these indexes (`0,3`, or `none`). Raises InvalidConfigError."""
    if text is None:
        return plan
    if text == "none":
        return ()
    try:
        kept = sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise InvalidConfigError(f"--only takes numbers of faults such as 0,3, or none, not {text!r}", setting="only") from error
    if kept[0] < 0 or kept[-1] >= len(plan):
        raise InvalidConfigError(f"--only {text}: the plan has {len(plan)} faults, counted from 0", setting="only")
    return tuple(plan[index] for index in kept)


LISTS = ("workloads", "faults", "sabotages", "invariants", "sometimes")


def entries(what: str) -> list[tuple[str, str]]:
    """Names and meanings of one of LISTS."""
    match what:
        case "workloads":
            from holdfast.chaos.workloads import ON_DEMAND, WORKLOADS

            return [(name, workload.meaning) for name, workload in (*WORKLOADS.items(), *ON_DEMAND.items())]
        case "faults":
            families = [(name, f"all of: {', '.join(kinds)}") for name, kinds in FAMILIES.items()]
            return [*families, *((kind.name, _fault_text(kind.meaning, kind.target, kind.amount)) for kind in KINDS.values())]
        case "sabotages":
            from holdfast.chaos.sabotage import SABOTAGES

            return [(name, f"{found.meaning} ({', '.join(found.invariants)})") for name, found in SABOTAGES.items()]
        case "invariants":
            return list(invariants().items())
        case "sometimes":
            return list(sometimes().items())
    raise InvalidConfigError(f"there is no list of {what!r}; choose from {', '.join(LISTS)}")


def _fault_text(meaning: str, target: str, amount: str) -> str:
    parts = [meaning, f"target: {target}" if target else "", f"amount: {amount}" if amount else ""]
    return "; ".join(part for part in parts if part)


def invariants() -> Mapping[str, str]:
    """Invariants and their meanings."""
    from holdfast.chaos.checkers import INVARIANTS

    own = {
        "expect": "what hf.chaos.expect says of the output of a pipeline of your own",
        "determinism": "a run is the same when it is repeated in another process",
        "simulator": "the run itself raised, or ended its process: a defect of the simulator or of a workload",
        "hang": "the run ended within its limit of real time",
    }
    return {**INVARIANTS, **own}


def sometimes() -> Mapping[str, str]:
    """Dangerous states and their meanings."""
    from holdfast.chaos.checkers.sometimes import SOMETIMES

    return SOMETIMES
