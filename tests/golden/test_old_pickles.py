"""State declared `Pickled` whose values hold objects of Holdfast's own, stored when its modules had names without `holdfast.`.

`pickled_v1.json` was written by that version, and is never written again."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.state import Pickled

GOLDEN = Path(__file__).with_name("pickled_v1.json")
STORED = {name: base64.b64decode(text) for name, text in json.loads(GOLDEN.read_text()).items()}
SPEC = TypeSerializer.of(Pickled)
OLD = ("api", "barriers", "coordinator", "operators", "statebackends")

EQUAL: dict[str, Any] = {
    "restart": hf.RestartStrategy(kind="fixed_delay"),
    "rocksdb": hf.RocksDBConfig(),
    "job_config": hf.JobConfig(),
    "claim": hf.ClaimMode.NO_CLAIM,
    "sinks": hf.SinkMode.KEEP,
    "redistribution": hf.Redistribution.UNION,
    "aggregate": hf.mean("delay"),
    "ttl": hf.Ttl(3_600_000),
    "state": hf.ValueStateDescriptor("total", int),
    "list_state": hf.ListStateDescriptor("offsets", int),
    "marker": hf.Pickled,
    "classes": [
        hf.ProcessFunction,
        hf.RichFunction,
        hf.KeyedStream,
        hf.Progress,
        hf.Snapshot,
        hf.Savepoint,
        hf.PreflightReport,
        hf.ParquetSink,
    ],
}


def texts_of(encoded: bytes) -> set[str]:
    return {argument for _, argument, _ in pickletools.genops(encoded) if isinstance(argument, str)}


@pytest.mark.parametrize("name", sorted(EQUAL))
def test_a_value_under_old_names_is_of_todays_classes(name: str) -> None:
    found = SPEC.decode(STORED[name])
    assert found == EQUAL[name]
    assert type(found) is type(EQUAL[name])


def test_errors_batches_and_windows_come_back_with_what_they_hold() -> None:
    failed, busy, inside = (SPEC.decode(STORED[name]) for name in ("error", "error_of_the_service", "inside"))
    assert (type(failed), str(failed), failed.operator, failed.subtask) == (hf.UserFunctionError, "it failed", "op", 1)
    assert (type(busy), str(busy)) == (hf.BusyError, "later")
    why, sinks = inside["why"]
    assert (type(why), why.state, sinks) == (hf.StateValueError, "total", [hf.SinkMode.KEEP])
    batch = SPEC.decode(STORED["batch"])
    assert type(batch) is hf.Batch
    assert list(batch.rows()) == [{"a": 1}, {"a": 2}]
    window = SPEC.decode(STORED["window"])
    assert (type(window), repr(window)) == (hf.Tumbling, repr(hf.Tumbling(seconds=3)))


def test_each_of_them_says_an_old_name_and_none_of_today() -> None:
    for name, encoded in STORED.items():
        texts = texts_of(encoded)
        assert any(text.partition(".")[0] in OLD for text in texts), name
        assert not any(text.partition(".")[0] == "holdfast" for text in texts), name


def test_what_is_stored_today_says_the_names_of_today() -> None:
    for name in STORED:
        value = SPEC.decode(STORED[name])
        encoded = SPEC.encode(value)
        assert not any(text.partition(".")[0] in OLD for text in texts_of(encoded)), name
        assert type(pickle.loads(encoded)) is type(value), name


def test_a_class_whose_module_moved_since_is_found_by_its_former_name() -> None:
    window = pickle.dumps(hf.Tumbling(seconds=3), protocol=2)  # writes modules as lines, without lengths
    old = window.replace(b"holdfast.operators.functions.windows.assigners", b"holdfast.operators.functions.time")
    assert old != window
    assert repr(SPEC.decode(old)) == repr(hf.Tumbling(seconds=3))


@pytest.mark.parametrize(
    ("kind", "former"),
    [
        (hf.CommitPosition, "holdfast.barriers.stagedsink"),
        (hf.FileSink, "holdfast.operators.sinks.parquet"),
        (hf.CommitOwner, "holdfast.operators.sinks.positions"),
        (hf.StagedSink, "holdfast.operators.sinks.staged"),
        (hf.CommitTarget, "holdfast.operators.sinks.target"),
    ],
)
def test_classes_of_sinks_are_found_by_their_former_names(kind: type[Any], former: str) -> None:
    assert SPEC.decode(f"c{former}\n{kind.__qualname__}\n.".encode()) is kind


def test_a_module_that_never_was_is_corrupt_state_under_an_old_name_too() -> None:
    for module in (b"statebackends.nothing", b"nothing.at_all"):
        with pytest.raises(CorruptStateError, match="nothing"):
            SPEC.decode(b"c" + module + b"\nThing\n.")


PROGRAM = """
import base64, sys
sys.path.insert(0, ".")
import holdfast as hf
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.state import Pickled
from api.errors import Mine
spec = TypeSerializer.of(Pickled)
assert type(spec.decode(base64.b64decode(sys.argv[1]))) is hf.BusyError
assert type(spec.decode(spec.encode(Mine()))) is Mine
print(sorted({name.partition(".")[0] for name in sys.modules} & {"api", "barriers", "coordinator", "operators", "statebackends"}))
"""


def test_a_project_that_has_a_package_of_an_old_name_keeps_its_own_classes(tmp_path: Path) -> None:
    """Its `api.errors` has no BusyError, so that one is ours; its Mine stays its own. Ours is loaded under no second name."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "__init__.py").touch()
    (tmp_path / "api" / "errors.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    stored = base64.b64encode(STORED["error_of_the_service"]).decode()
    command = [sys.executable, "program.py", stored]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "['api']"), done.stderr
