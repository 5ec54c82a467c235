"""Sabotages: one safety rule broken each, to prove that the checkers can fail. The product has no switch for any of them."""

from __future__ import annotations

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.chaos.sabotage.channels import SABOTAGES as CHANNELS
from holdfast.chaos.sabotage.column_sessions import SABOTAGES as COLUMN_SESSIONS
from holdfast.chaos.sabotage.combining import SABOTAGES as COMBINING
from holdfast.chaos.sabotage.coordination import SABOTAGES as COORDINATION
from holdfast.chaos.sabotage.count_windows import SABOTAGES as COUNT_WINDOWS
from holdfast.chaos.sabotage.erasures import SABOTAGES as ERASURES
from holdfast.chaos.sabotage.eventtime import SABOTAGES as EVENT_TIME
from holdfast.chaos.sabotage.fencing import SABOTAGES as FENCING
from holdfast.chaos.sabotage.in_flight import SABOTAGES as IN_FLIGHT
from holdfast.chaos.sabotage.joins import SABOTAGES as JOINS
from holdfast.chaos.sabotage.keys import SABOTAGES as KEYS
from holdfast.chaos.sabotage.late_windows import SABOTAGES as LATE_WINDOWS
from holdfast.chaos.sabotage.lateness import SABOTAGES as LATENESS
from holdfast.chaos.sabotage.localdisk import SABOTAGES as LOCALDISK
from holdfast.chaos.sabotage.members import SABOTAGES as MEMBERS
from holdfast.chaos.sabotage.outside import SABOTAGES as OUTSIDE
from holdfast.chaos.sabotage.panes import SABOTAGES as PANES
from holdfast.chaos.sabotage.restarts import SABOTAGES as RESTARTS
from holdfast.chaos.sabotage.retention import SABOTAGES as RETENTION
from holdfast.chaos.sabotage.rewinding import SABOTAGES as REWINDING
from holdfast.chaos.sabotage.sessions import SABOTAGES as SESSIONS
from holdfast.chaos.sabotage.silence import SABOTAGES as SILENCE
from holdfast.chaos.sabotage.sinks import SABOTAGES as SINKS
from holdfast.chaos.sabotage.sources import SABOTAGES as SOURCES
from holdfast.chaos.sabotage.state import SABOTAGES as STATE
from holdfast.chaos.sabotage.stores import SABOTAGES as STORES
from holdfast.chaos.sabotage.tables import SABOTAGES as TABLES
from holdfast.chaos.sabotage.tasks import SABOTAGES as TASKS
from holdfast.chaos.sabotage.versions import SABOTAGES as VERSIONS
from holdfast.chaos.sabotage.window_joins import SABOTAGES as WINDOW_JOINS
from holdfast.statebackends.errors import InvalidConfigError

__all__ = ["SABOTAGES", "Mutant", "Sabotage", "find_sabotage"]

SABOTAGES: dict[str, Sabotage] = {
    sabotage.name: sabotage
    for area in (
        *(CHANNELS, IN_FLIGHT, LATENESS, LATE_WINDOWS, SILENCE, PANES, VERSIONS, JOINS, WINDOW_JOINS, TABLES),
        *(TASKS, SOURCES, STATE),
        *(KEYS, LOCALDISK, EVENT_TIME, SESSIONS, COLUMN_SESSIONS, COUNT_WINDOWS, COMBINING, OUTSIDE),
        *(MEMBERS, COORDINATION, RESTARTS, RETENTION, ERASURES, REWINDING, FENCING, SINKS, STORES),
    )
    for sabotage in area
}


def find_sabotage(name: str) -> Sabotage:
    """The sabotage of a name. Raises InvalidConfigError naming the choices."""
    if name not in SABOTAGES:
        choices = ", ".join(sorted(SABOTAGES))
        raise InvalidConfigError(f"there is no sabotage {name!r}; choose from {choices}", setting="sabotage")
    return SABOTAGES[name]
