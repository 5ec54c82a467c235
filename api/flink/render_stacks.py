"""Sampled stacks of workers in Flink's dialect: flame graphs of a vertex, thread dumps. Pure functions of answers to records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from holdfast.api.flink import vertex_schemas as shapes
from holdfast.api.flink import worker_schemas
from holdfast.api.flink.render_jobs import vertex_of
from holdfast.api.flink.render_vertices import subtask_of
from holdfast.barriers.messages import CodeLine, SampledStack, TaskState, WorkerAnswer
from holdfast.coordinator.views import AnswerView, JobView

SUBTASKS_MAX = 8
"""Subtasks of a vertex whose workers are asked for one graph; of more, as many that lie evenly among them."""

LOOP = "Worker."
"""Beginning of the functions of a worker's loop."""

TERMINATED = -1
"""Flink's `endTimestamp` of a vertex that has no running subtask."""


class FlameGraphType(StrEnum):
    FULL = "full"
    ON_CPU = "on_cpu"
    """Samples of threads that had a processor."""
    OFF_CPU = "off_cpu"
    """Samples of threads that waited."""


def subtasks_to_ask(view: JobView, vertex_id: str, index: int | None) -> list[int]:
    """Running subtasks of a vertex; their numbers are those of their slots. Raises NotFoundError."""
    vertex_of(view, vertex_id)
    if index is not None:
        subtask_of(view, vertex_id, index)
    vertex = next((each for each in view.vertices if each.vertex_id == vertex_id), None)
    running = [each.subtask for each in vertex.subtasks if each.state is TaskState.RUNNING] if vertex is not None else []
    if index is not None:
        return [index] if index in running else []
    if len(running) <= SUBTASKS_MAX:
        return running
    return [running[number * len(running) // SUBTASKS_MAX] for number in range(SUBTASKS_MAX)]


def flame_graph(found: Sequence[AnswerView], vertex_id: str, kind: FlameGraphType) -> shapes.VertexFlameGraph:
    """Samples in which the loop of a worker worked for the vertex, or waited for work of any; not those in which it worked for
    another vertex."""
    if not found:
        return shapes.VertexFlameGraph(endTimestamp=TERMINATED, data=None)
    root = _Node("root")
    for view in found:
        for stack in _of_loop(view.answer, vertex_id):
            root.add([view.answer.code[index] for index in stack.frames if index < len(view.answer.code)], _samples(stack, kind))
    return shapes.VertexFlameGraph(endTimestamp=max(view.as_of_ms for view in found), data=root.shape())


def _of_loop(answer: WorkerAnswer, vertex_id: str) -> list[SampledStack]:
    stacks = answer.stacks
    loops = {stack.thread for stack in stacks if stack.vertex or _runs_loop(stack, answer.code)}
    return [stack for stack in stacks if stack.vertex == vertex_id or (not stack.vertex and stack.thread in loops)]


def _runs_loop(stack: SampledStack, code: Sequence[CodeLine]) -> bool:
    """Whether it is that of a worker's loop, by its own line: one that has nothing to do works for nobody while it is looked at."""
    lines = (code[index] for index in stack.frames if index < len(code))
    return any(line.own and line.function.startswith(LOOP) for line in lines)


def _samples(stack: SampledStack, kind: FlameGraphType) -> int:
    match kind:
        case FlameGraphType.FULL:
            return stack.samples
        case FlameGraphType.ON_CPU:
            return stack.on_cpu
        case FlameGraphType.OFF_CPU:
            return stack.off_cpu
        case _:
            assert_never(kind)


@dataclass(slots=True)
class _Node:
    name: str
    value: int = 0
    children: dict[str, _Node] = field(default_factory=dict)

    def add(self, lines: Sequence[CodeLine], samples: int) -> None:
        if not samples:
            return
        node = self
        node.value += samples
        for line in lines:
            name = f"{line.function} ({line.file}:{line.line})"
            node = node.children.setdefault(name, _Node(name))
            node.value += samples

    def shape(self) -> shapes.FlameGraphNode:
        return shapes.FlameGraphNode(name=self.name, value=self.value, children=[each.shape() for each in self.children.values()])


def thread_dump(found: AnswerView) -> worker_schemas.ThreadDump:
    """The threads of one look, and of more looks every stack that was seen."""
    answer = found.answer
    return worker_schemas.ThreadDump(
        threadInfos=[
            worker_schemas.ThreadInfo(threadName=stack.thread, stringifiedThreadInfo=_text(stack, answer.code))
            for stack in sorted(answer.stacks, key=lambda each: each.thread)
        ]
    )


def _text(stack: SampledStack, code: Sequence[CodeLine]) -> str:
    lines = [code[index] for index in reversed(stack.frames) if index < len(code)]
    frames = "".join(f"\tat {line.function}({line.file}:{line.line})\n" for line in lines)
    work = f" works for subtask {stack.subtask} of vertex {stack.vertex}" if stack.vertex else ""
    return f'"{stack.thread}"{" waits for work" if stack.idle else work}\n{frames}\n'
