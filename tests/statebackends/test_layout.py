"""Names on disk: each spelled in one module, and what each is, to the byte; tags of registers as the coordinator writes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, SavepointRecord, encode_record
from holdfast.statebackends import layout
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.layout import JobPaths

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("statebackends", "barriers", "operators", "coordinator", "api", "holdfast/__init__.py", "holdfast/__main__.py")
LAYOUT = ROOT / "statebackends" / "layout.py"
SPELLED = re.compile(
    r"(?<![A-Za-z0-9])(chk-|_metadata\b|_claim\b|_unfinished\b|_fsck\b|_coordinator\.json|taskowned\b|shared/|leader/|submissions\b|savepoint-$)"
    r"|^(_token|manifest\.json|_owner)$"
)


def spelled_paths(source: str) -> Iterator[str]:
    """Texts of a module that spell a part of a path: literals and pieces of f-strings, docstrings not."""
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documented)
    for node in constants:
        if isinstance(node.value, str) and SPELLED.search(node.value):
            yield node.value


def test_paths_are_spelled_in_one_module_alone() -> None:
    found = {}
    for place in PRODUCT:
        for path in [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")):
            texts = list(spelled_paths(path.read_text()))
            if texts and path != LAYOUT:
                found[str(path.relative_to(ROOT))] = texts
    assert found == {}


def test_the_search_finds_what_it_looks_for() -> None:
    source = '''"""chk-1 in a docstring"""
folder = f"{job}/chk-{number}"
path = folder + "/_metadata"
other = f"{job}/{'shared/'}a_claim_of"
'''
    assert sorted(spelled_paths(source)) == ["/_metadata", "/chk-", "shared/"]
    assert len(list(spelled_paths(LAYOUT.read_text()))) > 10


def test_paths_of_a_job() -> None:
    paths = JobPaths("0a" * 16)
    job = "0a" * 16
    assert [paths.leaders, paths.leader(3), paths.submissions, paths.submission(2)] == [
        f"{job}/leader", f"{job}/leader/3", f"{job}/submissions", f"{job}/submissions/2.json",
    ]  # fmt: skip
    assert [paths.attempts, paths.attempt(7), paths.results, paths.result(2)] == [
        f"{job}/attempts", f"{job}/attempts/7.json", f"{job}/results", f"{job}/results/2.json",
    ]  # fmt: skip
    assert [paths.checkpoint(42), paths.claim(42), paths.decision(42), paths.shared] == [
        f"{job}/chk-42", f"{job}/chk-42/_claim", f"{job}/chk-42/_metadata", f"{job}/shared",
    ]  # fmt: skip
    assert [paths.inputs("a/b c"), paths.input_manifest("a/b c", 3)] == [
        f"{job}/sources/a%2Fb%20c", f"{job}/sources/a%2Fb%20c/000003/manifest.json",
    ]  # fmt: skip
    assert layout.is_input_manifest(paths.input_manifest("a/b c", 3))
    assert not layout.is_input_manifest(paths.inputs("a"))
    names = ("leader/3", "submissions/2.json", "attempts/7.json", "results/2.json")
    assert all(map(layout.is_job_record, names)), names


def test_own_files_of_a_state_directory() -> None:
    own = ("_holdfast", "_coordinator.json", "_coordinator.json.0f", "_token", "_lock")
    assert [layout.is_directory_file(name) for name in own] == [True] * 5
    assert [layout.is_directory_file(name) for name in ("_holdfast/s", "_coordinatorXjson", "token", "_fsck/n")] == [False] * 4


def test_folders_of_snapshots() -> None:
    assert layout.savepoint_folder("s3://b/sp/", "0a" * 16, "0123456789ab") == "s3://b/sp/savepoint-0a0a0a-0123456789ab"
    assert layout.metadata_path("j/chk-1") == "j/chk-1/_metadata"
    for named in ("/s/sp", "/s/sp/", "/s/sp/_metadata"):
        assert layout.folder_of_snapshot(named) == "/s/sp"
    assert layout.folder_of_snapshot("/s/my_metadata") == "/s/my_metadata"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("chk-42", 42),
        ("chk-42/", 42),
        ("chk-" + "9" * 18, 10**18 - 1),
        ("chk-" + "9" * 19, None),
        ("chk-042", None),
        ("chk-0", None),
        ("chk-", None),
        ("chk-\u0664", None),
        ("a/chk-1", None),
        ("savepoint-1", None),
    ],
)
def test_ids_in_names_of_folders(name: str, number: int | None) -> None:
    assert layout.parse_checkpoint_name(name) == number


def test_a_uid_in_names_of_files() -> None:
    assert layout.uid_in_names("a b/ü" + "x" * 100) == "a_b__" + "x" * 75
    assert layout.safe_text("a b/ü" + "x" * 100) == "a_b__" + "x" * 100, "what is unique by something else is not cut"
    assert layout.file_name(".a b") == "%2Ea%20b"
    assert layout.exclusive_prefix("a b", 3, 2) == "a_b-3-2-"
    assert layout.shared_prefix(9, "a b", 3, 2) == "9-2-a_b-3-"


def test_tags_are_those_that_the_coordinator_writes() -> None:
    aborted = encode_record(AbortRecord(4, FailureReason.EXPIRED, 1, "n"))
    savepoint = encode_record(SavepointRecord(4, "/sp", CheckpointKind.SAVEPOINT, 5, 1, "n"))
    assert b'"decision": "aborted"' in aborted
    assert b'"decision": "savepoint"' in savepoint
    assert layout.decode_decision_tag(aborted) == layout.DecisionTag.ABORTED
    assert layout.decode_decision_tag(savepoint) == layout.DecisionTag.SAVEPOINT
    assert layout.decode_decision_tag(b'{"format": "holdfast-snapshot"}') is None
    claim = encode_record(ClaimRecord(4, 1, 1, 7, CheckpointKind.CHECKPOINT, "j/chk-4", "n"))
    assert layout.decode_claim_attempt(claim) == 7
    with pytest.raises(UNDECODABLE):
        layout.decode_claim_attempt(b"{}")
