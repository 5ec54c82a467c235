"""Mistakes of sessions that are made of panes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.functions.windows.columnar_sessions import SessionWindowOperator
from holdfast.statebackends.columnar.sessions import SessionPanes
from holdfast.statebackends.columnar.state import NumpyColumnarState


def _only_what_overlaps(original: Any) -> Any:
    def goes_on(self: SessionPanes, pane: int, keys: Any, ends: npt.NDArray[np.int64]) -> Any:
        return original(self, pane, keys, ends - 1)

    return goes_on


def _forgets_what_waits(original: Any) -> Any:
    def snapshot_state(self: SessionWindowOperator, checkpoint_id: int) -> None:
        pending = self._pending.copy()
        self._pending.clear()
        original(self, checkpoint_id)
        self._pending.extend(pending)

    return snapshot_state


SABOTAGES = (
    Sabotage(
        "forgetful_fold",
        "of a session that goes on, the rows of a pane that goes are forgotten",
        ("I1", "I2"),
        (Mutant(NumpyColumnarState, "merge_into", constant(None)),),
        workloads=("sessions",),
    ),
    Sabotage(
        "apart_when_touching",
        "sessions of which one begins when the other ends stay two",
        ("I1", "I2"),
        (Mutant(SessionPanes, "_goes_on", _only_what_overlaps),),
        workloads=("sessions",),
    ),
    Sabotage(
        "unstored_firing",
        "sessions that have fired and are not emitted when a barrier comes are not in its snapshot",
        ("I1",),
        (Mutant(SessionWindowOperator, "snapshot_state", _forgets_what_waits),),
        workloads=("sessions",),
        kinds=("crashes", "user_error"),
    ),
)
