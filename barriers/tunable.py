"""Settings of a job that can be changed while it runs: which, and what holds after a change. Pure.

It knows neither who changes them nor where changes are recorded. A setting belongs here only if the coordinator alone reads it, or
sends it with each trigger: workers are not told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import INT_MAX, clip
from holdfast.statebackends.errors import InvalidConfigError

TUNABLE: tuple[str, ...] = (
    "checkpoint_interval_ms",
    "checkpoint_interval_during_backlog_ms",
    "checkpoint_timeout_ms",
    "min_pause_ms",
    "tolerable_failed_checkpoints",
    "unaligned_checkpoints",
    "aligned_checkpoint_timeout_ms",
)
"""Names of fields of JobConfig, which has their types, meanings and bounds."""

NAME_BYTES_SHOWN_MAX = 64
"""Of a foreign name that an error repeats: behind a longer one nobody would see what is wrong with it."""

SettingValue: TypeAlias = bool | int | str | None

_TYPES = {field.name: field.type for field in msgspec.structs.fields(JobConfig)}


def apply_settings(config: JobConfig, settings: Mapping[str, object]) -> JobConfig:
    """The config with some of its settings replaced.

    Raises InvalidConfigError that names the first setting that is unknown or fixed, of a wrong type, or out of bounds, or that does
    not go with the others."""
    for name, value in settings.items():
        if name not in TUNABLE:
            shown = clip(name, NAME_BYTES_SHOWN_MAX)
            reason = f"{name} is fixed while a job runs" if name in _TYPES else f"{shown!r} is no setting"
            raise InvalidConfigError(f"{reason}: {', '.join(TUNABLE)} can be changed", setting=shown)
        try:
            msgspec.convert(value, _TYPES[name], strict=True)
        except msgspec.ValidationError as error:
            raise InvalidConfigError(f"{name}: {error}", setting=name) from error
    changed = msgspec.structs.replace(config, **settings)
    changed.check()
    return changed


class CheckpointMode(msgspec.Struct, frozen=True):
    """What one checkpoint by hand does in place of the job's settings; None: as these say."""

    unaligned: bool | None = None
    """As JobConfig.unaligned_checkpoints."""
    aligned_timeout_ms: int | None = None
    """As JobConfig.aligned_checkpoint_timeout_ms."""

    def checked(self, config: JobConfig) -> CheckpointMode:
        """What holds for a job with these settings, also if they change before the trigger: both or none of the two are named.

        Raises InvalidConfigError that names `unaligned` or `alignedCheckpointTimeout`, as requests spell them."""
        if self == AS_CONFIGURED:
            return self
        unaligned = config.unaligned_checkpoints if self.unaligned is None else self.unaligned
        timeout_ms = config.aligned_checkpoint_timeout_ms if self.aligned_timeout_ms is None else self.aligned_timeout_ms
        if self.aligned_timeout_ms is not None:
            self._check_timeout(self.aligned_timeout_ms, unaligned=unaligned)
        settings = {"unaligned_checkpoints": unaligned, "aligned_checkpoint_timeout_ms": timeout_ms}
        try:
            apply_settings(config, settings)
        except InvalidConfigError as error:
            message = f"unaligned: this checkpoint can't be taken so: {error.message}"
            raise InvalidConfigError(message, setting="unaligned") from error
        return CheckpointMode(unaligned, timeout_ms)

    def _check_timeout(self, timeout_ms: int, *, unaligned: bool) -> None:
        name = "alignedCheckpointTimeout"
        if not 0 <= timeout_ms <= INT_MAX:
            raise InvalidConfigError(f"{name} must be a whole number of ms from 0 to 2^63 - 1, got {timeout_ms}", setting=name)
        if not unaligned:
            raise InvalidConfigError(f"{name} needs a checkpoint that may overtake: say unaligned, too", setting=name)


AS_CONFIGURED = CheckpointMode()
"""As the job's settings say when the checkpoint is triggered."""


def parse_setting(text: str) -> tuple[str, SettingValue]:
    """A setting from `NAME=VALUE`, as at a command line: numbers, `true`, `false`, and `none`.

    Raises InvalidConfigError for a text without a name or with another value; which names there are, the coordinator says."""
    name, found, value = (each.strip() for each in text.partition("="))
    if not found or not name:
        shown = clip(text, NAME_BYTES_SHOWN_MAX)
        raise InvalidConfigError(f"{shown!r} is not NAME=VALUE", setting=clip(name, NAME_BYTES_SHOWN_MAX) or shown)
    words: dict[str, SettingValue] = {"none": None, "null": None, "true": True, "false": False}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        number = int(value.replace("_", ""))
    except ValueError as error:
        shown = clip(value, NAME_BYTES_SHOWN_MAX)
        raise InvalidConfigError(f"{name}: {shown!r} is neither a whole number nor none, true or false", setting=name) from error
    if abs(number) > INT_MAX:
        shown = clip(value, NAME_BYTES_SHOWN_MAX)
        raise InvalidConfigError(f"{name} must be a whole number below 2^63, got {shown}", setting=name)
    return name, number
