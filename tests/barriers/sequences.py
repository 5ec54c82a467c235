"""Random input of a gate: per channel rising ids with records between, some cancel markers, some early ends; then interleaved."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from tests.scenarios.notation import Event


def channel_script(rng: random.Random, channel: int, ids: int, *, skips: bool) -> list[Event]:
    script: list[Event] = []
    record = 0
    for checkpoint_id in range(1, ids + 1):
        for _ in range(rng.randint(0, 3)):
            record += 1
            script.append(Event("record", channel, record))
        if skips and rng.random() < 0.1:
            continue
        script.append(Event("cancel" if rng.random() < 0.15 else "barrier", channel, checkpoint_id))
    for _ in range(rng.randint(0, 3)):
        record += 1
        script.append(Event("record", channel, record))
    if rng.random() < 0.2:
        script = script[: rng.randint(0, len(script))]
        script.append(Event("end", channel, 0))
    return script


def interleave(rng: random.Random, scripts: list[list[Event]]) -> list[Event]:
    turns = [channel for channel, script in enumerate(scripts) for _ in script]
    rng.shuffle(turns)
    rests = [iter(script) for script in scripts]
    return [next(rests[channel]) for channel in turns]


@st.composite
def gate_inputs(draw: st.DrawFn, *, skips: bool = False) -> tuple[int, list[list[Event]], list[Event]]:
    """(channels, script of each, interleaving). With `skips` an id may be missing on a channel altogether."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    channel_count = draw(st.integers(1, 4))
    ids = draw(st.integers(0, 5))
    scripts = [channel_script(rng, channel, ids, skips=skips) for channel in range(channel_count)]
    return channel_count, scripts, interleave(rng, scripts)
