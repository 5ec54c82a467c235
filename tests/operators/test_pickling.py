"""Classes of the user's program arrive in another process, msgspec's included."""

from __future__ import annotations

import base64
import subprocess
import sys

import pytest

from holdfast.operators.pickling import globals_of

PROGRAM = """
import base64, dataclasses, msgspec
from holdfast.operators.pickling import dumps_by_value
from holdfast.statebackends.serialization.type_serializer import TypeSerializer

@dataclasses.dataclass
class Point:
    x: int
    tags: list[str] = dataclasses.field(default_factory=list)

class Base(msgspec.Struct, frozen=True):
    name: str

class Trade(Base, frozen=True):
    price: float
    lots: int = 1
    notes: list[str] = msgspec.field(default_factory=list)

    def total(self):
        return self.price * self.lots

    @staticmethod
    def make(price):
        return Trade("made", price)

TypeSerializer.of(Point).encode(Point(1))
msgspec.json.encode(Trade("a", 2.5))
texts = [TypeSerializer.of(kind).text for kind in (Point, Trade)]
print(base64.b64encode(dumps_by_value((Point, Trade, [Trade("b", 1.5, 2)], texts))).decode())
"""

CHECK = """
import base64, pickle, sys
import msgspec
Point, Trade, trades, texts = pickle.loads(base64.b64decode(sys.argv[1]))
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
spec = TypeSerializer.of(Point)
assert [TypeSerializer.of(kind).text for kind in (Point, Trade)] == texts, "declared types changed on the way"
assert spec.decode(spec.encode(Point(3, ["t"]))) == Point(3, ["t"])
assert trades == [Trade("b", 1.5, 2)] and trades[0].total() == 3.0
assert Trade.make(2.0).lots == 1 and Trade.make(2.0).notes == []
assert msgspec.json.encode(Trade("a", 2.5)) == b'{"name":"a","price":2.5,"lots":1,"notes":[]}'
try:
    trades[0].price = 1.0
except AttributeError:
    print("frozen")
"""


@pytest.mark.slow
def test_records_of_a_users_program_arrive_whole_in_another_process() -> None:
    sent = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert base64.b64decode(sent.stdout)
    got = subprocess.run([sys.executable, "-c", CHECK, sent.stdout.strip()], capture_output=True, text=True, check=False)
    assert (got.returncode, got.stdout.strip()) == (0, "frozen"), got.stderr


def test_globals_of_a_function_are_those_that_it_or_what_is_in_it_reads() -> None:
    known = {"FACTOR": 3, "LIMIT": 4, "total": 5, "Base": object, "row": 6, "written": 7, "__name__": "mine"}
    code = """
def function(row):
    global written
    written = row.total
    class Inner(Base):
        limit = LIMIT
    return lambda: FACTOR * row.FACTOR * absent + Inner().total
"""
    exec(code, known)
    assert globals_of(known["function"]) == {"FACTOR": 3, "LIMIT": 4, "Base": object}  # type: ignore[arg-type]
