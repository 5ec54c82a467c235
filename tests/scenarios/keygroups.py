"""Group O: hash vectors, string keys, operator ids, ranges, defaults and rescaling, against the real key functions."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from holdfast.statebackends.errors import InvalidConfigError, InvalidKeyError
from holdfast.statebackends.keygroups import (
    assign_key_groups,
    default_max_parallelism,
    key_group_of_hash,
    operator_id,
    spread,
    subtask_of_key_group,
)
from holdfast.statebackends.serialization.key_group_columns import key_groups_of_hashes
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import FACTOR
from tests.scenarios.notation import plain
from tests.scenarios.outcome import Failed, Outcome, Passed
from tests.scenarios.redistribution import subtasks_read_after_rescale
from tests.scenarios.restoring import check_restore_max_parallelism
from tests.scenarios.tables import Row, UnparsedError

UTF8 = KeyType.parse("utf8")


def equal(expected: object, got: object, what: str = "") -> Outcome:
    return Passed() if expected == got else Failed(f"{what} {expected}".strip(), str(got))


def first_failure(outcomes: list[Outcome]) -> Outcome:
    if not outcomes:
        raise UnparsedError("nothing to check was found in the row")
    return next((outcome for outcome in outcomes if not isinstance(outcome, Passed)), outcomes[0])


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


def integer(text: str) -> int:
    try:
        return int(plain(text).replace(" ", "").replace("_", "").replace(",", ""))
    except ValueError as error:
        raise UnparsedError(f"not an integer: {text!r}") from error


# ----------------------------------------------------------------------------------------------------- vector tables


def check_hash_row(row: Row) -> Outcome:
    """A signed hash, its spread value, and its group of the max parallelism that the column names."""
    h32 = integer(row.cells[0])
    return first_failure([_check_hash_column(h32, name, cell) for name, cell in zip(row.header[1:], row.cells[1:], strict=False)])


def _check_hash_column(h32: int, name: str, cell: str) -> Outcome:
    if "spread" in name:
        return equal(integer(cell), spread(h32), name)
    return _check_group_column(h32, name, cell, None)


def check_string_row(row: Row) -> Outcome:
    """A string key: its hash, groups and subtasks. `subtask at p=` counts in the groups of the nearest column to its left."""
    text = row.cells[0].strip().strip("`")
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    try:
        key = json.loads(text) if quoted else text
    except ValueError:
        key = text[1:-1]
    h32 = UTF8.hash32(key)
    outcomes: list[Outcome] = []
    max_parallelism: int | None = None
    for name, cell in zip(row.header[1:], row.cells[1:], strict=False):
        if "hash" in name:
            outcomes.append(equal(integer(cell), h32 - 2**32 if h32 >= 2**31 else h32, name))
            continue
        outcomes.append(_check_group_column(h32, name, cell, max_parallelism))
        if found := re.search(r"group of (\d+)", name):
            max_parallelism = int(found.group(1))
    return first_failure(outcomes)


def _check_group_column(h32: int, name: str, cell: str, max_parallelism: int | None) -> Outcome:
    if found := re.search(r"group of (\d+)", name):
        count = int(found.group(1))
        vectorised = int(key_groups_of_hashes(np.array([h32 & 0xFFFFFFFF], np.uint32), count)[0])
        return equal([integer(cell)] * 2, [key_group_of_hash(h32, count), vectorised], name)
    if found := re.search(r"subtask at p\s*=\s*([\d/,\s]+)", name):
        count = max_parallelism or 128
        group = key_group_of_hash(h32, count)
        return equal(integers(cell), [subtask_of_key_group(group, count, p) for p in integers(found.group(1))], name)
    raise UnparsedError(f"unknown column {name!r}")


def check_uid_row(row: Row) -> Outcome:
    return equal(row.cells[1], operator_id(row.cells[0]), f"operator id of {row.cells[0]!r}")


# ------------------------------------------------------------------------------------------------------------- cases


def check_case_row(row: Row) -> Outcome:
    """A row `case -> expected`: the first rule whose pattern is in the case checks it."""
    case, expected = plain(row.cell("case")), plain(row.cell("expected"))
    for pattern, check in CASES:
        if re.search(pattern, case, re.IGNORECASE):
            return check(case, expected)
    raise UnparsedError(f"no rule for the case {case!r}")


def check_exhaustive(case: str, expected: str) -> Outcome:
    """Disjoint, complete, non-empty ranges that agree with the subtask formula, for every p <= maxP <= a bound."""
    bound = max(integers(case))
    # every one with `make chaos`; every seventh of the large ones, which are most of the work, with `make test`
    for max_parallelism in (number for number in range(1, bound + 1) if FACTOR > 1 or number <= 100 or number % 7 == 0):
        for parallelism in range(1, max_parallelism + 1):
            ranges = [assign_key_groups(max_parallelism, parallelism, index) for index in range(parallelism)]
            # the formula rises with the group, so a range that has both its ends has what is between them
            ends = [(index, group) for index, groups in enumerate(ranges) for group in (groups.start, groups.stop - 1)]
            agree = all(subtask_of_key_group(group, max_parallelism, parallelism) == index for index, group in ends)
            joined = all(left.stop == right.start for left, right in itertools.pairwise(ranges))
            whole = ranges[0].start == 0 and ranges[-1].stop == max_parallelism
            if not agree or not joined or not whole or any(len(groups) == 0 for groups in ranges):
                return Failed(expected, f"p={parallelism}, maxP={max_parallelism}: {ranges}")
    return Passed()


def check_default(case: str, expected: str) -> Outcome:
    """`default maxP for p=1,85 -> 128,128`, and `p=171 -> 256` in a remark."""
    listed = re.search(r"p\s*=\s*(-?\d[-\d,\s/]*)", case)
    if listed is None:
        raise UnparsedError(f"no list of p in {case!r}")
    if re.search(r"refused|error", expected):
        return first_failure([_check_default_refused(p) for p in integers(listed.group(1))])
    remarks = re.findall(r"p\s*=\s*(\d+)\s*(?:→|->|:)\s*(\d+)", expected)
    wanted = integers(re.sub(r"\([^)]*\)", "", expected))
    outcomes = [equal(wanted, [default_max_parallelism(p) for p in integers(listed.group(1))], case)]
    outcomes += [equal(int(value), default_max_parallelism(int(p)), f"p={p}") for p, value in remarks]
    return first_failure(outcomes)


def _check_default_refused(parallelism: int) -> Outcome:
    try:
        found = default_max_parallelism(parallelism)
    except InvalidConfigError:
        return Passed()
    return Failed(f"p={parallelism} refused", str(found))


def check_rescale(case: str, expected: str) -> Outcome:
    """`rescale 2→3, 3→2 (128)`: which old subtasks each new one reads."""
    changes = re.findall(r"(\d+)\s*(?:→|->)\s*(\d+)", case)
    bound = re.search(r"\(\s*(?:maxP\s*=?\s*)?(\d+)\s*\)|maxP\s*=?\s*(\d+)", case)
    if bound is None:
        raise UnparsedError(f"no max parallelism in {case!r}")
    max_parallelism = int(bound.group(1) or bound.group(2))
    wanted = [[integers(old) for old in re.findall(r"\[([^\]]*)\]", part)] for part in expected.split("/")]
    if len(wanted) != len(changes):
        raise UnparsedError(f"{len(changes)} changes but {len(wanted)} expectations")
    got = [subtasks_read_after_rescale(int(old), int(new), max_parallelism) for old, new in changes]
    return equal(wanted, got, "new reads old")


def check_spread_sanity(case: str, expected: str) -> Outcome:
    """Smallest and largest group of the hashes 0 .. count-1."""
    count, groups = integers(case)[:2]
    per_group = np.bincount(key_groups_of_hashes(np.arange(count, dtype=np.uint32), groups), minlength=groups)
    low, high = re.search(r"min\s*=?\s*(\d+)", expected), re.search(r"max\s*=?\s*(\d+)", expected)
    if low is None or high is None:
        raise UnparsedError(f"no min and max in {expected!r}")
    return equal([int(low.group(1)), int(high.group(1))], [int(per_group.min()), int(per_group.max())], "min and max")


def check_null(case: str, expected: str) -> Outcome:
    """Every type refuses a null, alone and in a tuple, and names the operator."""
    for text, value in (("utf8", None), ("int64", None), ("tuple<utf8,int64>", ("a", None))):
        try:
            KeyType.parse(text).hash32(value, operator="count")
        except InvalidKeyError as error:
            if "count" not in str(error):
                return Failed(expected, f"{text}: {error}")
        else:
            return Failed(expected, f"{text} took a null")
    return Passed()


def check_python_keys(case: str, expected: str) -> Outcome:
    """Hashes are the same under another hash salt, and each value is a key of one declared type only."""
    program = (
        "from holdfast.statebackends.serialization.keys import KeyType as T; "
        "print(T.parse('utf8').hash32('user-1'), T.parse('int64').hash32(7))"
    )
    salts = ("1", "2")
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in salts
    }
    if seen != {f"{UTF8.hash32('user-1')} {KeyType.parse('int64').hash32(7)}\n"}:
        return Failed("the same hash in every process", str(seen))
    values: dict[str, object] = {"int64": 1, "float64": 1.0, "bool": True, "utf8": "1"}
    encodings = {KeyType.parse(text).encode(value) for text, value in values.items()}
    if len(encodings) != len(values):
        return Failed("1, 1.0, True and '1' are distinct", str(encodings))
    for text in values:
        for other in (value for name, value in values.items() if name != text):
            try:
                KeyType.parse(text).encode(other)
            except InvalidKeyError:
                continue
            return Failed(f"{text} refuses {other!r}", "taken")
    return Passed()


def _is_refused(parallelism: int, max_parallelism: int) -> bool:
    try:
        assign_key_groups(max_parallelism, parallelism, 0)
    except InvalidConfigError:
        return True
    return False


def check_ranges(case: str, expected: str) -> Outcome:
    """Ranges of all subtasks, `refused`, or `accepted`."""
    pair = re.fullmatch(r"\s*p\s*=\s*(-?\d+)\s*[,;]?\s*maxP\s*=\s*(-?\d+)\s*", case)
    if re.search(r"refus|reject|error|invalid", expected, re.IGNORECASE):
        return _check_refused(case, (int(pair.group(1)), int(pair.group(2))) if pair else None)
    if pair is None:
        raise UnparsedError(f"not `p=,maxP=`: {case!r}")
    parallelism, max_parallelism = int(pair.group(1)), int(pair.group(2))
    if re.search(r"accept|allow|fine", expected, re.IGNORECASE):
        return equal(False, _is_refused(parallelism, max_parallelism), "refused:")
    wanted = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:\s*(?:-|\.\.+|…)\s*(\d+))?", expected)]
    ranges = [assign_key_groups(max_parallelism, parallelism, index) for index in range(parallelism)]
    return equal(wanted, [(groups.start, groups.stop - 1) for groups in ranges], "ranges")


def _check_refused(case: str, pair: tuple[int, int] | None) -> Outcome:
    if pair is not None:
        return equal(True, _is_refused(*pair), f"{case} refused:")
    outcomes: list[Outcome] = []
    for clause in re.split(r"\s*[,;]\s*", case):
        if re.fullmatch(r"p\s*>\s*maxP", clause):
            outcomes.append(equal(True, _is_refused(129, 128) and _is_refused(2, 1), f"{clause} refused:"))
        elif found := re.fullmatch(r"(p|maxP)\s*=\s*(-?\d+)", clause):
            value = int(found.group(2))
            refused = _is_refused(value, 128) if found.group(1) == "p" else _is_refused(1, value)
            outcomes.append(equal(True, refused, f"{clause} refused:"))
        else:
            raise UnparsedError(f"unknown clause {clause!r}")
    return first_failure(outcomes)


CASES: tuple[tuple[str, Callable[[str, str], Outcome]], ...] = (
    (r"default\s+max", check_default),
    (r"\ball\b.*p\s*(?:≤|<=)\s*maxP\s*(?:≤|<=)\s*\d+", check_exhaustive),
    (r"rescale\s+\d+\s*(?:→|->)", check_rescale),
    (r"consecutive", check_spread_sanity),
    (r"\bnull\b|\bnone\b", check_null),
    (r"restore", check_restore_max_parallelism),
    (r"python keys", check_python_keys),
    (r"\bp\s*[=>]|\bmaxP\s*=", check_ranges),
)
