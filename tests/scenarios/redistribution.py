"""Group P: operator state dealt out to another parallelism; and which old subtasks a rescaled keyed operator reads (O)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, OperatorSubtaskState
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.redistribute import broadcast_redistribute, keyed_redistribute, split_redistribute, union_redistribute
from tests.scenarios.notation import is_empty, plain
from tests.scenarios.outcome import Covered, Failed, Outcome, Passed
from tests.scenarios.tables import Row, UnparsedError

OldState = dict[str, list[list[str]]]
"""State name -> entries of each old subtask."""

FUNCTIONS = {"split": split_redistribute, "union": union_redistribute, "broadcast": broadcast_redistribute}
RANDOM_SEEDS = 10_000


def subtasks_read_after_rescale(old: int, new: int, max_parallelism: int) -> list[list[int]]:
    """Old subtasks that each new one reads keyed state of."""
    subtasks = []
    for index in range(old):
        handle = KeyedStateHandle(assign_key_groups(max_parallelism, old, index), "arrow", (), (InlineHandle(b"%d" % index),))
        subtasks.append(OperatorSubtaskState(keyed=(handle,)))
    shares = keyed_redistribute(subtasks, max_parallelism, new)
    return [sorted({_index_of(share.handle) for share in subtask}) for subtask in shares]


def _index_of(handle: KeyedStateHandle) -> int:
    part = handle.parts[0]
    assert isinstance(part, InlineHandle)
    return int(part.data)


def check_redistribution_row(row: Row) -> Outcome:
    mode, old, expected = plain(row.cell("mode")), plain(row.cell("old")), plain(row.cell("expected"))
    parallelism = plain(row.cell("new"))
    if re.search(r"\bfinished\b", mode):
        return check_finished(expected)
    if re.search(r"\brandom\b", mode):
        return check_random(mode, expected)
    if re.search(r"\bsame\b", mode) and not re.search(r"\d", old):
        return check_same_parallelism(expected)
    name = next((name for name in FUNCTIONS if re.search(rf"\b{name}\b", mode)), None)
    if name is None:
        raise UnparsedError(f"unknown mode {mode!r}")
    copies = re.search(r"cop(?:y|ies)\D*(\d+)", old)
    if copies is not None:
        return check_copies(name, int(copies.group(1)), parallelism, expected)
    return check_entries(name, parse_state(old), parallelism, expected)


# ------------------------------------------------------------------------------------------------------------ entries


def parse_entries(text: str) -> list[str]:
    """`x1..x4, y` -> entries; ∅ or nothing for none."""
    entries: list[str] = []
    for part in re.split(r"[,\s]+(?![.…])", re.sub(r"\s*(\.{2,3}|…)\s*", "..", text).strip()):
        if is_empty(part):
            continue
        if found := re.fullmatch(r"([A-Za-z_]*)(\d+)\.\.([A-Za-z_]*)(\d+)", part):
            if found.group(3) not in ("", found.group(1)):
                raise UnparsedError(f"a range over two names: {part!r}")
            entries += [f"{found.group(1)}{number}" for number in range(int(found.group(2)), int(found.group(4)) + 1)]
        elif re.fullmatch(r"[\w.]+", part):
            entries.append(part)
        else:
            raise UnparsedError(f"unknown entry {part!r}")
    return entries


def parse_state(text: str) -> OldState:
    """`x: x1,x2 / x3; y: ∅ / y1` -> entries of each old subtask by state name. A remark may say how many subtasks."""
    remark = " ".join(re.findall(r"\(([^)]*)\)", text))
    state: OldState = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(";"):
        name, colon, entries = part.rpartition(":")
        name = name.strip() if colon else "state"
        if name in state or not part.strip():
            raise UnparsedError(f"state {name!r} is named twice or empty")
        state[name] = [parse_entries(subtask) for subtask in entries.split("/")]
    counts = {len(subtasks) for subtasks in state.values()}
    if len(counts) != 1:
        raise UnparsedError(f"the names have {sorted(counts)} old subtasks")
    told = {"one": 1, "two": 2, "three": 3, "four": 4}
    if found := re.search(r"(\d+|one|two|three|four)\s+old", remark):
        count = told.get(found.group(1)) or int(found.group(1))
        if counts != {count}:
            raise UnparsedError(f"{remark!r}, but {counts.pop()} are given")
    return state


def parse_parallelisms(text: str, old: int) -> list[int]:
    if re.fullmatch(r"(?:the\s+)?same", text):
        return [old]
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if not numbers or re.search(r"[^\d\s/,]", text):
        raise UnparsedError(f"not a parallelism: {text!r}")
    return numbers


def check_entries(mode: str, old: OldState, parallelism: str, expected: str) -> Outcome:
    """Entries of every new subtask; `… at each` or `unchanged` for short."""
    old_count = len(next(iter(old.values())))
    new_count, *more = parse_parallelisms(parallelism, old_count)
    if more:
        raise UnparsedError("several parallelisms need copies")
    got = FUNCTIONS[mode](old, new_count)
    each = re.fullmatch(r"(.*?)\s*(?:at|on|to|for)\s+(?:each|all|every\s*\w*)(?:\s+(?:subtask|one))?", expected)
    if re.match(r"unchanged|(?:each|subtask)s?\s+keeps?", expected):
        wanted = [{name: subtasks[index] for name, subtasks in old.items()} for index in range(old_count)]
    elif each is not None:
        wanted = [by_name(each.group(1), old)] * new_count
    else:
        wanted = [by_name(subtask, old) for subtask in re.sub(r"\([^)]*\)", "", expected).split("/")]
    return Passed() if wanted == got else Failed(shown(wanted), shown(got))


def by_name(text: str, old: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[str]]:
    """Expected entries of one subtask, sorted out by the state that they come from."""
    names = {entry: name for name, subtasks in old.items() for entries in subtasks for entry in entries}
    result: dict[str, list[str]] = {name: [] for name in sorted(old)}
    for entry in parse_entries(re.sub(r"\s*\+\s*", ", ", text)):
        if entry not in names:
            raise UnparsedError(f"{entry!r} is no old entry")
        result[names[entry]].append(entry)
    return result


def shown(state: Sequence[Mapping[str, Sequence[str]]]) -> str:
    return " / ".join(" + ".join(",".join(entries) for entries in names.values() if entries) or "∅" for names in state)


# -------------------------------------------------------------------------------------------------------------- rules


def check_copies(mode: str, old_count: int, parallelism: str, expected: str) -> Outcome:
    """Broadcast of copies that are told apart here by their subtask: which copy each new subtask reads."""
    old = {"state": [[str(index)] for index in range(old_count)]}
    lists = expected.rpartition(":")[2].split("/")
    counts = parse_parallelisms(parallelism, old_count)
    if len(lists) != len(counts):
        raise UnparsedError(f"{len(counts)} parallelisms but {len(lists)} expectations")
    for count, wanted in zip(counts, lists, strict=True):
        got = [",".join(subtask["state"]) for subtask in FUNCTIONS[mode](old, count)]
        if got != re.findall(r"\d+", wanted):
            return Failed(f"p={count}: {wanted.strip()}", ",".join(got))
    return Passed()


def random_state(rng: random.Random) -> OldState:
    count = rng.randint(1, 6)
    return {
        name: [[f"{name}{index}.{n}" for n in range(rng.randint(0, 5))] for index in range(count)]
        for name in rng.sample(["x", "y", "z", "off"], rng.randint(1, 3))
    }


def check_same_parallelism(expected: str) -> Outcome:
    """Split: every subtask keeps its own. Union: still everything everywhere."""
    rng = random.Random(8)
    for _ in range(200):
        old = random_state(rng)
        count = len(next(iter(old.values())))
        kept = [{name: old[name][index] for name in sorted(old)} for index in range(count)]
        if split_redistribute(old, count) != kept:
            return Failed(expected, f"split changed {old}")
        merged = {name: [entry for entries in old[name] for entry in entries] for name in sorted(old)}
        if union_redistribute(old, count) != [merged] * count:
            return Failed(expected, f"union of {old}")
    return Passed()


def check_random(mode: str, expected: str) -> Outcome:
    """Split keeps the multiset and deals evenly; union multiplies by the new parallelism."""
    seeds = re.search(r"(\d+)\s*seeds", mode)
    for seed in range(int(seeds.group(1)) if seeds else RANDOM_SEEDS):
        rng = random.Random(seed)
        old, new_count = random_state(rng), rng.randint(1, 8)
        same = len(next(iter(old.values()))) == new_count
        split, union = split_redistribute(old, new_count), union_redistribute(old, new_count)
        for name, subtasks in old.items():
            entries = sorted(entry for subtask in subtasks for entry in subtask)
            sizes = [len(subtask[name]) for subtask in split]
            if sorted(entry for subtask in split for entry in subtask[name]) != entries:
                return Failed(expected, f"seed {seed}: split of {name} to {new_count}: {split}")
            if not same and max(sizes) - min(sizes) > 1:
                return Failed(expected, f"seed {seed}: sizes of {name}: {sizes}")
            if sum(len(subtask[name]) for subtask in union) != new_count * len(entries):
                return Failed(expected, f"seed {seed}: union of {name}")
    return Passed()


def check_finished(expected: str) -> Outcome:
    """Finished subtasks have no entries: the rest is dealt out as if they had not been. A union that lacks them is refused."""
    with_finished: dict[str, list[list[str]]] = {"x": [["x1", "x2"], [], ["x3"], []]}
    without: dict[str, list[list[str]]] = {"x": [["x1", "x2"], ["x3"]]}
    if split_redistribute(with_finished, 3) != split_redistribute(without, 3):
        return Failed(expected, "finished subtasks change the split")
    test = "tests/coordinator/test_restore_lists.py::test_p10_a_union_that_lacks_the_entries_of_finished_subtasks_is_refused"
    return Covered(test, "the refusal, at the restore")
