"""What goes wrong at a request, by rule: on the way there, as it is handled, or on the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tests.servers.kafka.errors import Code


class Harm(StrEnum):
    CLOSE = "close"
    """The connection breaks."""
    DROP = "drop"
    """The connection goes silent, for good: neither this request is answered nor what follows."""
    DELAY = "delay"
    """It takes `delay_ms` longer, by the machine's clock."""
    HOLD = "hold"
    """It waits until `release`; its connection may break meanwhile, and it is handled all the same."""
    KILL = "kill"
    """The server kills itself."""
    REFUSE = "refuse"
    """It is answered with `code`, and nothing is done; for requests on topics, transactions and groups."""


@dataclass(frozen=True)
class Fault:
    """`harm` meets requests named `api` ("" any; names as Kafka's: "EndTxn") of clients whose id begins with `client`: after
    `skip` of them, `times` of them (-1: all that follow). `before`: the request is not handled yet; else it is, and its answer is
    harmed."""

    harm: Harm
    api: str = ""
    client: str = ""
    before: bool = True
    skip: int = 0
    times: int = 1
    delay_ms: int = 0
    code: Code = Code.NONE

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Fault:
        return cls(**{**fields, "harm": Harm(fields["harm"]), "code": Code(fields["code"])})


class Faults:
    """Rules in the order in which they were made; the first that fits a request is the one that it meets."""

    def __init__(self) -> None:
        self._planned: list[tuple[Fault, list[int]]] = []  # with the numbers that are left: to skip, to harm

    def plan(self, faults: Iterable[Fault]) -> None:
        self._planned += [(fault, [fault.skip, fault.times]) for fault in faults]

    def clear(self) -> None:
        self._planned.clear()

    def meet(self, api: str, client: str) -> Fault | None:
        for fault, left in self._planned:
            if fault.api not in ("", api) or not client.startswith(fault.client) or not left[1]:
                continue
            if left[0]:
                left[0] -= 1
                continue
            left[1] -= 1
            return fault
        return None
