"""Group M: the real watermark valve."""

from __future__ import annotations

import re

from holdfast.barriers.alignment.valve import StatusWatermarkValve, TimeSignal
from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Watermark, WatermarkStatus
from tests.scenarios.notation import channel_index, is_empty, parse_setting, plain
from tests.scenarios.outcome import Failed, Outcome, Passed
from tests.scenarios.tables import Row, UnparsedError

EXTREMES = {"MAX": MAX_WATERMARK, "MIN": MIN_WATERMARK}


def number(text: str) -> int:
    return EXTREMES[text] if text in EXTREMES else int(text)


def parse_signal(token: str) -> tuple[int, TimeSignal]:
    """`a5`, `a-5`, `-a`, `+a` -> channel and signal."""
    if found := re.fullmatch(r"([+-])([a-z])", token):
        return channel_index(found.group(2)), WatermarkStatus(idle=found.group(1) == "-")
    if found := re.fullmatch(r"([a-z])(-?\d+|MAX|MIN)", token):
        return channel_index(found.group(1)), Watermark(number(found.group(2)))
    raise UnparsedError(f"unknown signal {token!r}")


def parse_outputs(text: str) -> list[TimeSignal]:
    """`W20+IDLE`, `W4 W10` -> what leaves."""
    if is_empty(text):
        return []
    outputs: list[TimeSignal] = []
    for token in re.split(r"[\s,+]+", text.strip()):
        if token in ("IDLE", "ACTIVE"):
            outputs.append(WatermarkStatus(idle=token == "IDLE"))
        elif found := re.fullmatch(r"W(-?\d+|MAX|MIN)", token):
            outputs.append(Watermark(number(found.group(1))))
        else:
            raise UnparsedError(f"unknown output {token!r}")
    return outputs


def shown(outputs: list[TimeSignal]) -> str:
    names = [f"W{o.timestamp_ms}" if isinstance(o, Watermark) else ("IDLE" if o.idle else "ACTIVE") for o in outputs]
    return " ".join(names) or "(nothing)"


def check_valve_row(row: Row) -> Outcome:
    """Each step's output, and the whole output."""
    channel_count, _ = parse_setting(row.cell("n"))
    text = re.sub(r"\s*(?:→|->|=>)\s*", "→", plain(row.cell("input")))
    steps = [token for token in re.split(r"[\s,;]+", text) if token]
    signals = [(*parse_signal(step.partition("→")[0]), step) for step in steps]
    used = max((channel for channel, _, _ in signals), default=0) + 1
    if channel_count is not None and used > channel_count:
        raise UnparsedError(f"a channel is beyond n={channel_count}")
    valve = StatusWatermarkValve(channel_count or used)
    everything: list[TimeSignal] = []
    for channel, signal, step in signals:
        expected = parse_outputs(step.partition("→")[2])
        got = valve.handle(channel, signal)
        if got != expected:
            return Failed(f"{step.partition('→')[0]} → {shown(expected)}", shown(got))
        everything += got
    total = row.cell("all output", default="-")
    if "all output" in row.header and parse_outputs(plain(total)) != everything:
        return Failed(f"all output {shown(parse_outputs(plain(total)))}", shown(everything))
    return Passed()
