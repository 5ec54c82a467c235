"""In which function the subtask of a missing acknowledgement is, by what its worker saw of its own stacks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from os.path import basename
from typing import NamedTuple

from holdfast.barriers.messages import CodeLine, SampledStack, SubtaskKey, WorkerAnswer
from holdfast.coordinator.explain.facts import Facts, shown
from holdfast.coordinator.explain.pending import place_of_wait
from holdfast.coordinator.explain.records import Cause, CauseKind, Situation
from holdfast.coordinator.figures import duration_text

ASKED_MAX = 2
"""Workers that are asked for one explanation."""

_POOL = "holdfast-pool"
"""Threads that store what a subtask has frozen have names that begin so."""


def workers_to_ask(situation: Situation) -> tuple[SubtaskKey, ...]:
    """Subtasks whose workers, of the slots of their numbers, may know why acknowledgements are missing; none unless some are."""
    checkpoint = situation.checkpoint
    if checkpoint is None or checkpoint.status != "IN_PROGRESS":
        return ()
    facts = Facts(situation)
    if not facts.is_slow(checkpoint, facts.job.now_ms - checkpoint.trigger_ms):
        return ()
    found: dict[int, SubtaskKey] = {}
    for key in place_of_wait(facts, checkpoint):
        found.setdefault(key.subtask, key)  # subtask i runs in slot i
    return tuple(islice(found.values(), ASKED_MAX))


def explain_function(facts: Facts, asked_about: Collection[SubtaskKey]) -> Cause | None:
    """What the workers that were asked about these subtasks do, if they do one thing most of the time."""
    for key, answer in facts.situation.looks:
        if key not in asked_about:  # it has acknowledged since
            continue
        cause = _in_step(facts, key, answer) or _in_pool(facts, key, answer)
        if cause is not None:
            return cause
    return None


class _Where(NamedTuple):
    """A line that was seen, and what it waits in if that is further down."""

    vertex: str
    subtask: int
    line: CodeLine
    innermost: CodeLine


def _in_step(facts: Facts, key: SubtaskKey, answer: WorkerAnswer) -> Cause | None:
    """The loop takes a step of a subtask, and that step does not end."""
    found = _most(answer, (stack for stack in answer.stacks if stack.vertex and not stack.idle))
    if found is None:
        return None
    where, samples, on_cpu = found
    place, asked = facts.place(where.vertex, where.subtask), facts.place(key.vertex, key.subtask)
    other = "" if (where.vertex, where.subtask) == (key.vertex, key.subtask) else f"the worker of {asked} works for another: "
    return Cause(CauseKind.IN_FUNCTION, f"{other}{place} {_seen(answer, where, samples, on_cpu)}", place)


def _in_pool(facts: Facts, key: SubtaskKey, answer: WorkerAnswer) -> Cause | None:
    """The loop is free, and what was frozen is being stored."""
    stacks = (stack for stack in answer.stacks if stack.thread.startswith(_POOL) and not stack.idle and not stack.vertex)
    found = _most(answer, stacks)
    if found is None:
        return None
    where, samples, on_cpu = found
    place = facts.place(key.vertex, key.subtask)
    return Cause(CauseKind.IN_FUNCTION, f"the worker of {place} stores state, and {_seen(answer, where, samples, on_cpu)}", place)


def _most(answer: WorkerAnswer, stacks: Iterable[SampledStack]) -> tuple[_Where, int, int] | None:
    """The place that was seen most, in how many samples, and in how many of these with a processor; None if in less than half."""
    seen: Counter[_Where] = Counter()
    on_cpu: Counter[_Where] = Counter()
    for stack in stacks:
        where = _where(answer.code, stack)
        if where is not None:
            seen[where] += stack.samples
            on_cpu[where] += stack.on_cpu
    if not seen:
        return None
    where, samples = seen.most_common(1)[0]
    return (where, samples, on_cpu[where]) if 2 * samples >= answer.samples else None


def _where(code: Sequence[CodeLine], stack: SampledStack) -> _Where | None:
    """The line of the user's function: the first behind ours that is not ours; without one, the innermost."""
    if not stack.frames or max(stack.frames) >= len(code):  # a worker may say anything
        return None
    lines = [code[index] for index in stack.frames]
    ours = next((index for index, line in enumerate(lines) if line.own), -1)
    line = next((line for line in lines[ours + 1 :] if not line.own), lines[-1])
    return _Where(stack.vertex, stack.subtask, line, lines[-1])


def _seen(answer: WorkerAnswer, where: _Where, samples: int, on_cpu: int) -> str:
    often = "in its one look" if answer.samples <= 1 else f"in {samples} of {answer.samples} looks"
    over = f" over {duration_text(answer.sampled_ms)}" if answer.sampled_ms else ""
    deeper = f", there in {_line(where.innermost, short=True)}" if where.innermost != where.line else ""
    kind = ", at work" if 2 * on_cpu > samples else ""
    return f"was in {_line(where.line)}{deeper} {often}{over}{kind}"


def _line(line: CodeLine, *, short: bool = False) -> str:
    file = basename(line.file) if short else line.file
    return f"{shown(line.function)} ({shown(file, 200)}:{line.line})"
