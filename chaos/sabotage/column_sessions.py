"""Mistakes of sessions that are made of panes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.statebackends.columnar.sessions import SessionPanes
from holdfast.statebackends.columnar.state import NumpyColumnarState


def _only_what_overlaps(original: Any) -> Any:
    def goes_on(self: SessionPanes, pane: int, keys: Any, ends: npt.NDArray[np.int64]) -> Any:
        return original(self, pane, keys, ends - 1)

    return goes_on


SABOTAGES = (
    Sabotage(
        "forgetful_fold",
        "of a session that goes on, the rows of a pane that goes are forgotten",
        ("I1", "I2"),
        (Mutant(NumpyColumnarState, "merge_into", constant(None)),),
        workloads=("column_sessions",),
    ),
    Sabotage(
        "apart_when_touching",
        "sessions of which one begins when the other ends stay two",
        ("I1", "I2"),
        (Mutant(SessionPanes, "_goes_on", _only_what_overlaps),),
        workloads=("column_sessions",),
    ),
)
