"""Sabotages: one safety rule broken each, to prove that the checkers can fail. The product has no switch for any of them."""

from __future__ import annotations

from chaos.sabotage.base import Mutant, Sabotage
from chaos.sabotage.channels import SABOTAGES as CHANNELS
from chaos.sabotage.coordination import SABOTAGES as COORDINATION
from chaos.sabotage.fencing import SABOTAGES as FENCING
from chaos.sabotage.keys import SABOTAGES as KEYS
from chaos.sabotage.lateness import SABOTAGES as LATENESS
from chaos.sabotage.localdisk import SABOTAGES as LOCALDISK
from chaos.sabotage.restarts import SABOTAGES as RESTARTS
from chaos.sabotage.retention import SABOTAGES as RETENTION
from chaos.sabotage.rewinding import SABOTAGES as REWINDING
from chaos.sabotage.sinks import SABOTAGES as SINKS
from chaos.sabotage.sources import SABOTAGES as SOURCES
from chaos.sabotage.state import SABOTAGES as STATE
from chaos.sabotage.stores import SABOTAGES as STORES
from chaos.sabotage.tasks import SABOTAGES as TASKS
from statebackends.errors import InvalidConfigError

__all__ = ["SABOTAGES", "Mutant", "Sabotage", "find_sabotage"]

SABOTAGES: dict[str, Sabotage] = {
    sabotage.name: sabotage
    for area in (
        *(CHANNELS, LATENESS, TASKS, SOURCES, STATE, KEYS, LOCALDISK),
        *(COORDINATION, RESTARTS, RETENTION, REWINDING, FENCING, SINKS, STORES),
    )
    for sabotage in area
}


def find_sabotage(name: str) -> Sabotage:
    """The sabotage of a name. Raises InvalidConfigError naming the choices."""
    if name not in SABOTAGES:
        choices = ", ".join(sorted(SABOTAGES))
        raise InvalidConfigError(f"there is no sabotage {name!r}; choose from {choices}", setting="sabotage")
    return SABOTAGES[name]
